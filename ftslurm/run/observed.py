"""How often training has failed here: this run's earlier attempts, and the runs beside it.

Reads only, and a bounded number of the newest records. Counted is training time alone, from an
attempt's first step to its last sign, and as a failure every end that no save preceded, unless it
would have come however often was saved: the program's own faults, and a person's word. What cannot
be read, is torn or belongs to another user is passed over.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ftslurm.errors import FtslurmError
from ftslurm.run.attempt_records import Records, read_attempt_records
from ftslurm.run.attempts import FINISHED, PACED, STOPPED, numbers
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import RunRecord, read_record
from ftslurm.run.spec import RunSpec

ATTEMPTS, RUNS = 30, 20
"""The newest that are looked at, of each run and beside this one."""
READ_S = 20.0
"""After so long no further run is begun with."""

NOT_BY_CHANCE = frozenset(
    {"code", "data", "numeric", "checkpoint", "oom_gpu", "never_retry", "cancelled_user",
     "cancelled_admin", "ordered"}
)  # fmt: skip
"""Words of a decision: such an end meets the same steps again, or was somebody's wish."""


@dataclass(frozen=True)
class Seen:
    """Failures counted, and the GPU-hours of training they came in; a rank without a GPU counts as
    one."""

    failures: int = 0
    gpu_hours: float = 0.0
    runs: int = 0
    """That have trained."""

    def __add__(self, other: Seen) -> Seen:
        return Seen(
            self.failures + other.failures,
            self.gpu_hours + other.gpu_hours,
            self.runs + other.runs,
        )


@dataclass(frozen=True)
class LookBack:
    """What there was before an attempt."""

    seen: Seen
    stall_s: Optional[float] = None
    lag_s: Optional[float] = None
    """Of a save, as an earlier attempt of the run has last measured it."""


def gpus_of(spec: RunSpec, world_size: int) -> int:
    """That `world_size` ranks of the run train on; ranks without any count as one each."""
    cluster = spec.cluster
    in_all = cluster.gpus_per_node * cluster.nodes or cluster.gpus_per_task * spec.world_size
    return max(1, round((in_all or spec.world_size) * world_size / spec.world_size))


def look_back(
    layout: RunLayout,
    record: RunRecord,
    number: int,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> LookBack:
    """Before attempt `number` of the run."""
    until = clock() + READ_S
    seen, stall_s, lag_s = Seen(), None, None
    for one, following in _attempts(layout, before=number):
        seen += _seen(record.spec, one, is_over=following)
        for event in one.events:
            if event["kind"] == PACED:
                stall_s, lag_s = event.get("stall_s"), event.get("lag_s")
    seen = Seen(seen.failures, seen.gpu_hours, 0)
    for beside in _beside(layout, record):
        if clock() >= until:
            break
        seen += _seen_in(beside, record)
    return LookBack(seen, stall_s, lag_s)


def _seen_in(layout: RunLayout, record: RunRecord) -> Seen:
    """Another run of the same cluster."""
    seen = Seen()
    with contextlib.suppress(OSError, FtslurmError, KeyError, TypeError, ValueError):
        other = read_record(layout)
        if other.scheduler == record.scheduler and not other.spec.program:
            for one, following in _attempts(layout):
                seen += _seen(other.spec, one, is_over=following)
    return Seen(seen.failures, seen.gpu_hours, int(seen.gpu_hours > 0))


def _attempts(layout: RunLayout, *, before: Optional[int] = None) -> Iterator[tuple[Records, bool]]:
    """Oldest first, each with whether another one follows it."""
    claimed = [number for number in numbers(layout) if before is None or number < before]
    for number in claimed[-ATTEMPTS:]:
        with contextlib.suppress(OSError, FtslurmError):
            yield read_attempt_records(layout, number), before is not None or number != claimed[-1]


def _beside(layout: RunLayout, record: RunRecord) -> Iterator[RunLayout]:
    """Newest first."""
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for folder in layout.root.resolve().parent.iterdir():
            with contextlib.suppress(OSError):
                state = (folder / "attempts").stat()
                if state.st_uid == os.geteuid() and folder.name != layout.root.resolve().name:
                    found.append((state.st_mtime, folder))
    for _, folder in sorted(found, reverse=True)[:RUNS]:
        yield RunLayout(folder)


def _seen(spec: RunSpec, one: Records, *, is_over: bool) -> Seen:
    """`is_over`: it is known to have ended, whatever its records say."""
    trained_s = _trained_s(one)
    if trained_s is None:
        return Seen()
    world_size = one.world_size or spec.world_size
    hours = gpus_of(spec, world_size) * trained_s / 3600.0
    return Seen(int(_has_failed(one, is_over=is_over)), hours, 1)


def _trained_s(one: Records) -> Optional[float]:
    began = next((event["at"] for event in one.events if event["kind"] == "first_step"), None)
    if began is None:
        return None
    signs = [float(event["at"]) for event in one.events if event["kind"] in _SIGNS]
    signs.append(one.progress.written_at if one.progress else 0.0)
    return max(0.0, max(signs) - float(began))


_SIGNS = ("first_step", "committed", "ranks_ended")


def _has_failed(one: Records, *, is_over: bool) -> bool:
    if one.outcome is not None and one.outcome.result == FINISHED:
        return False
    if one.outcome is not None and one.outcome.result == STOPPED:
        return one.outcome.committed_step != one.outcome.step
    if one.decision.get("cause") in NOT_BY_CHANCE:
        return False
    return is_over or bool(one.decision)
