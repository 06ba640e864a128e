"""Saves and restores of one rank while each call to the file system in turn fails.

Run with libfailing.so (fakes/storage) preloaded; prints one JSON object: how many calls there were
to break, and a sentence for each outcome that must not be. What may be: the save was reported
committed and is what a restore takes, bit for bit; or it was reported failed and a restore takes
the step before. Either way the run goes on saving, and one bad step later that outcome still holds.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from test_checkpointer import POSITION, Trainer, damage, same

from ftslurm import files
from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.run import attempts
from ftslurm.run.attempts import AdoptedStep, Attempt
from ftslurm.run.layout import RunLayout
from ftslurm.train.restore import StorageError

READING = ["open", "close", "read", "list", "stat", "fstat", "mkdir", "create", "rename"]
WRITING = [*READING, "write", "fsync", "fdatasync", "renameat2", "rmdir", "unlink"]
REFUSED, LOST, SHORT = range(3)
FOR_EVER = 10**6
DEADLINE_S = 90.0


@dataclass(frozen=True)
class Break:
    kind: str
    number: int
    manner: int = REFUSED
    times: int = 1

    def __str__(self) -> str:
        manner = ("refused", "answer lost", "short")[self.manner]
        times = "once" if self.times == 1 else "for ever"
        return f"{self.kind} {errno.errorcode.get(self.number, '')} {manner} {times}"


class Storage:
    """The preloaded library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)

    def arm(self, folder: Path, what: Break, call: int) -> None:
        self._library.failing_arm(
            str(folder).encode(), what.kind.encode(), call, call + what.times - 1, what.number,
            what.manner,
        )  # fmt: skip

    def disarm(self) -> int:
        return int(self._library.failing_disarm())


class Run:
    """A run directory with the steps 1 and 2 of attempt 1, and an attempt 2 that has restored."""

    def __init__(self, root: Path, template: Path) -> None:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(template, root)
        self.layout = RunLayout(root)

    def attempt(self, number: int) -> tuple[Trainer, list[AdoptedStep]]:
        known = adopted(self.layout)
        claim(self.layout, known)
        return Trainer(self.layout.root, seed=number, attempt=number, keep_last=2), known


def claim(layout: RunLayout, known: list[AdoptedStep]) -> None:
    attempts.claim(layout, Attempt(0, "7", 0, ["n1"], 0.0, known))


def adopted(layout: RunLayout) -> list[AdoptedStep]:
    steps = CheckpointStore(layout).published()
    return [AdoptedStep(step.step, step.committed_digest) for step in steps]


def make_template(root: Path) -> list[Any]:
    """Returns the values of step 2."""
    root.mkdir(parents=True)
    claim(RunLayout(root), [])
    first = Trainer(root, keep_last=2)
    assert first.save(1) and first.save(2)
    first.checkpointer.close(timeout_s=DEADLINE_S)
    return first.values()


def saving(storage: Storage, run: Run, before: list[Any], what: Break, call: int) -> Iterator[str]:
    second, known = run.attempt(2)
    second.checkpointer.restore(known)
    second.train()
    values = second.values()
    storage.arm(run.layout.root, what, call)
    second.checkpointer.save(3, POSITION)
    second.checkpointer.close(timeout_s=DEADLINE_S)
    yield str(storage.disarm())
    is_committed = second.checkpointer.committed_step == 3
    if is_committed == bool(second.reported("save_failed")):
        yield f"reported both or neither: {second.events}"
    if not is_committed and 3 in [row.step for row in adopted(run.layout)]:
        yield f"reported failed and published: {second.reported('save_failed')}"
    if not is_committed and not second.checkpointer.emergency_save(3, POSITION, deadline_s=9.0):
        yield f"cannot be saved again: {second.reported('save_failed')}"
    if not second.save(4):
        yield f"the next step cannot be saved: {second.reported('save_failed')}"
    second.checkpointer.close(timeout_s=DEADLINE_S)
    if not CheckpointStore(run.layout).verify(newest(run.layout), full=True).ok:
        yield "the next step does not verify"
    damage(newest(run.layout))
    third, known = run.attempt(3)
    restored = third.checkpointer.restore(known)
    if restored is None or restored.step != 3 or not same(third.values(), values):
        yield f"a restore behind the next step takes {restored and restored.step}"


def newest(layout: RunLayout) -> Path:
    return CheckpointStore(layout).published()[0].path


def restoring(
    storage: Storage, run: Run, before: list[Any], what: Break, call: int
) -> Iterator[str]:
    second, known = run.attempt(2)
    storage.arm(run.layout.root, what, call)
    try:
        restored = second.checkpointer.restore(known)
    except StorageError:
        restored = None
    except Exception as error:  # noqa: BLE001 - the finding
        yield str(storage.disarm())
        yield f"ends the run: {error!r}"
        return
    yield str(storage.disarm())
    if restored is None:
        third, known = run.attempt(3)
        restored, second = third.checkpointer.restore(known), third
    if restored is None or restored.step != 2 or not same(second.values(), before):
        yield f"takes {restored and restored.step}"


Scenario = Callable[[Storage, Run, list[Any], Break, int], Iterator[str]]


def sweep(
    storage: Storage, home: Path, scenario: Scenario, breaks: list[Break], *, every: int
) -> dict[str, Any]:
    template = home / "template"
    before = make_template(template)
    cases, found = 0, []
    for what in breaks:
        call = 1
        while True:
            run = Run(home / "run", template)
            words = list(scenario(storage, run, before, what, call))
            cases += 1
            found += [f"{what}, call {call}: {word}" for word in words[1:]]
            if call > int(words[0]):
                break
            call += every
    return {"cases": cases, "found": found}


def all_breaks(scenario: str) -> list[Break]:
    kinds = WRITING if scenario == "saving" else READING
    numbers = [errno.EIO, errno.ENOSPC] if scenario == "saving" else [errno.EIO, errno.ESTALE]
    breaks = [
        Break(kind, number, manner, times)
        for kind in kinds
        for number in numbers
        for manner, times in ((REFUSED, 1), (REFUSED, FOR_EVER), (LOST, 1))
    ]
    return [*breaks, Break("write", 0, SHORT, FOR_EVER)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("home", type=Path)
    parser.add_argument("scenario", choices=["saving", "restoring"])
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args()
    files.VIEW_LAG_S, files.STUMBLE_S = 0.06, 0.06
    logging.disable()
    breaks = all_breaks(options.scenario)
    if options.only:
        breaks = [what for what in breaks if what.kind in options.only]
    scenario = saving if options.scenario == "saving" else restoring
    print(json.dumps(sweep(Storage(), options.home, scenario, breaks, every=options.every)))  # noqa: T201


if __name__ == "__main__":
    main()
