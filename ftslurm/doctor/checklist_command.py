"""`ftslurm doctor --checklist [RUN]`: reads what there is, has it judged, prints it.

Exit 0: nothing known stands against production, whatever is not known; 1: something does.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Optional

from ftslurm.doctor.answer import Answer, Asked
from ftslurm.doctor.checklist import answers, counted
from ftslurm.doctor.line import FAIL, OK, SKIPPED, WARN, Line
from ftslurm.doctor.run_facts import Past, past_runs
from ftslurm.doctor.run_history import read_past_run
from ftslurm.errors import EXIT_FAILED, EXIT_OK, RunError
from ftslurm.run.layout import RunLayout
from ftslurm.run.mounts import mount_of
from ftslurm.run.record import read_record
from ftslurm.run.sweep_layout import place_of_run

_MARKS = {OK: "yes ", WARN: "part", FAIL: "NO  ", SKIPPED: "?   "}


def show_checklist(
    run: str,
    runs: Path,
    slurm: Callable[[], Optional[Sequence[Line]]],
    store: Callable[[], Sequence[Line]],
    *,
    as_json: bool,
) -> int:
    """`run`: a run directory; empty: the newest below `runs`."""
    found = read_asked(run, runs, slurm(), store())
    told = answers(found)
    if as_json:
        print(json.dumps(to_json(told, found), indent=1))  # noqa: T201
    else:
        print("\n".join(render(told, found)))  # noqa: T201
    return EXIT_FAILED if any(one.state == FAIL for one in told) else EXIT_OK


def read_asked(
    run: str,
    runs: Path,
    slurm: Optional[Sequence[Line]],
    store: Sequence[Line] = (),
    *,
    now: Callable[[], float] = time.time,
) -> Asked:
    """RunError where `run` is none, or `runs` may not be looked into."""
    past: list[Past]
    # By `/.` no file is taken for a folder.
    if not run and not os.access(f"{runs}/.", os.R_OK | os.X_OK):
        raise RunError(f"`{runs}` is no folder that you may look into; name another with --runs")
    if run:
        layout = RunLayout(place_of_run(run).absolute())
        past, runs = [Past(layout, read_record(layout))], layout.root
    else:
        past = list(past_runs(runs, with_tasks=True))
    read = (read_past_run(one, now=now()) for one in past)
    disk = os.statvfs(runs)
    return Asked(
        runs=[one for one in read if one is not None],
        mount=mount_of(runs),
        free_bytes=float(disk.f_bavail * disk.f_frsize),
        slurm=None if slurm is None else {line.name: line for line in slurm},
        store=store,
        at=now(),
    )


def to_json(told: Sequence[Answer], asked: Asked) -> dict[str, object]:
    return {
        "schema_version": 1,
        "runs": [run.name for run in asked.runs],
        "answers": [
            {**asdict(one), "state": "unknown" if one.state == SKIPPED else one.state,
             "date": _date(one.at)}
            for one in told
        ],
    }  # fmt: skip


def render(told: Sequence[Answer], asked: Asked) -> list[str]:
    lines = []
    for one in told:
        lines.append(f"{_MARKS[one.state]} {one.number:2}  {one.question}")
        date = _date(one.at)
        lines.append(f"{'':9}{f'{date}  ' if date else ''}{one.seen}")
        if one.todo:
            lines.append(f"{'':9}-> {one.todo}")
    counts = counted(told)
    lines.append(
        f"{counts.get(OK, 0)} yes, {counts.get(WARN, 0)} in part, {counts.get(FAIL, 0)} no,"
        f" {counts.get(SKIPPED, 0)} not known, by the newest {len(asked.runs)} runs; a date is that"
        " of the evidence"
    )
    return lines


def _date(at: Optional[float]) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else ""
