"""How an operator's verb takes its arguments and says what came of it: one sentence, or JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from typing import Any, Optional

from ftslurm.errors import EXIT_FAILED, EXIT_OK
from ftslurm.operate.standing import OpenRun
from ftslurm.run.acts import note_act
from ftslurm.run.sweep_layout import SweepLayout


@dataclass(frozen=True)
class Answer:
    """What came of it."""

    result: str
    """One word, for programs; each verb's help lists its own."""
    text: str
    ok: bool = True
    """The run is as the operator wants it, or will be."""
    job_id: Optional[str] = None


def parser(
    verb: str, description: str, epilog: str, *, of_sweeps: bool = False
) -> argparse.ArgumentParser:
    """`of_sweeps`: it is done to all tasks of a sweep as well."""
    made = argparse.ArgumentParser(
        prog=f"ftslurm {verb}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what, which = ("RUN|SWEEP", "a run or a sweep") if of_sweeps else ("RUN", "a run")
    made.add_argument(
        "run", metavar=what, help=f"directory of {which}, or its id under ./runs; a task is a run"
    )
    return made


def add_json(made: argparse.ArgumentParser) -> None:
    made.add_argument("--json", action="store_true", help="for programs; schema_version 1")


def finish(verb: str, answer: Answer, run: OpenRun, *, as_json: bool) -> int:
    """Note and print it; the exit code of the verb."""
    note_act(run.layout, verb, answer.result, answer.job_id)
    record = {"run_id": run.record.run_id, "run_dir": str(run.layout.root), **vars(answer)}
    return _finish(run.record.run_id, answer, record if as_json else None)


def finish_sweep(answer: Answer, layout: SweepLayout, *, as_json: bool) -> int:
    """Print what came of a verb on a sweep; its exit code. What it did to a task is noted there."""
    told = {name: value for name, value in vars(answer).items() if name != "job_id"}
    record = {"sweep_id": layout.sweep_id, "sweep_dir": str(layout.root), **told}
    return _finish(layout.sweep_id, answer, record if as_json else None)


def _finish(name: str, answer: Answer, record: Optional[dict[str, Any]]) -> int:
    """`record`: print that, not the sentence."""
    if record is None:
        print(f"{name}: {answer.text}")  # noqa: T201
    else:
        print(json.dumps({"schema_version": 1, **record}, indent=1, sort_keys=True))  # noqa: T201
    return EXIT_OK if answer.ok else EXIT_FAILED


_OF_ONE = {"tasks": "task", "ones": "one", "are": "is", "were": "was", "stay": "stays",
           "save": "saves"}  # fmt: skip


def counted(count: int, words: str) -> str:
    """`3 tasks are queued`, `1 task is queued`: `words` as they are said of several."""
    said = words.split(" ")
    if count == 1:
        said[:3] = [_OF_ONE.get(word, word) for word in said[:3]]
    return " ".join([str(count), *said])


def tell(text: str) -> None:
    """News while a verb waits; not on stdout, which is for the answer."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)  # noqa: T201
