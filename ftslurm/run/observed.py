"""How often training has failed here: this run's earlier attempts, and the runs beside it.

Reads only, and a bounded number of records, however many runs there are. Counted is training time
alone, from an attempt's first step to its last sign, and as a failure every end that no save
preceded, unless it would have come however often was saved: the program's own faults, and a
person's word. Of another run only what is the cluster's counts: a neighbour in a sweep may have
failed of the values it was given. What cannot be read, is torn or belongs to another user is passed
over.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ftslurm.errors import FtslurmError
from ftslurm.files import list_folder
from ftslurm.run.attempt_records import Records, read_attempt_records
from ftslurm.run.attempts import FINISHED, PACED, STOPPED, numbers
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import RunRecord, read_record
from ftslurm.run.spec import RunSpec
from ftslurm.run.sweep_layout import find_sweep, parse_task_id

ATTEMPTS, RUNS = 30, 20
"""The newest that are looked at, of each run and beside this one."""
FOLDERS = 200
"""So many are asked when they last changed, to find the newest."""
SIBLINGS, SIBLING_ATTEMPTS = 8, 3
"""The same within a sweep, of which a thousand tasks may look at each other: those before this one.
"""
READ_S = 20.0
"""After so long no further run is begun with."""
_TIME = re.compile(r"\d{8}-\d{6}")

NOT_BY_CHANCE = frozenset(
    {"code", "data", "numeric", "checkpoint", "oom_gpu", "never_retry", "cancelled_user",
     "cancelled_admin", "ordered"}
)  # fmt: skip
"""Words of a decision: such an end meets the same steps again, or was somebody's wish."""
OF_CLUSTER = frozenset(
    {"node", "gpu", "network_transient", "storage", "straggler", "preempted", "time_limit",
     "asked_to_leave", "start_forgotten"}
)  # fmt: skip
"""Those of another run that would have met this one as well."""


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
        seen += _seen(record.spec, one, is_over=following, counts=_is_by_chance)
        for event in one.events:
            if event["kind"] == PACED:
                stall_s, lag_s = event.get("stall_s"), event.get("lag_s")
    seen = Seen(seen.failures, seen.gpu_hours, 0)
    siblings = _siblings(layout.root.resolve())
    beside = _newest_beside(layout.root.resolve()) if siblings is None else siblings
    most = ATTEMPTS if siblings is None else SIBLING_ATTEMPTS
    for folder in beside:
        if clock() >= until:
            break
        seen += _seen_in(RunLayout(folder), record, most)
    return LookBack(seen, stall_s, lag_s)


def _seen_in(layout: RunLayout, record: RunRecord, most: int) -> Seen:
    """Another run of the same cluster."""
    seen = Seen()
    with contextlib.suppress(OSError, FtslurmError, KeyError, TypeError, ValueError):
        other = read_record(layout)
        if other.scheduler == record.scheduler and not other.spec.program:
            for one, following in _attempts(layout, most=most):
                seen += _seen(other.spec, one, is_over=following, counts=_is_of_cluster)
    return Seen(seen.failures, seen.gpu_hours, int(seen.gpu_hours > 0))


def _attempts(
    layout: RunLayout, *, before: Optional[int] = None, most: int = ATTEMPTS
) -> Iterator[tuple[Records, bool]]:
    """Oldest first, each with whether another one follows it."""
    claimed = [number for number in numbers(layout) if before is None or number < before]
    for number in claimed[-most:]:
        with contextlib.suppress(OSError, FtslurmError):
            yield read_attempt_records(layout, number), before is not None or number != claimed[-1]


def _siblings(root: Path) -> Optional[list[Path]]:
    """Of a task of a sweep: the tasks before it, which began earlier. None: it is no task."""
    sweep, task = find_sweep(str(root.parent)), parse_task_id(root.name)
    if sweep is None or task is None:
        return None
    _, number = task
    least = max(0, number - SIBLINGS)
    before = [sweep.task(one).root for one in range(number - 1, least - 1, -1)]
    return [folder for folder in before if _changed_at(folder) is not None]


def _newest_beside(root: Path) -> list[Path]:
    """By when an attempt was last claimed; of too many, those whose names say that they are the
    newest (a run id ends in the time of its submit)."""
    try:
        names = [name for name in list_folder(root.parent) if name != root.name]
    except OSError:
        return []
    names = sorted(names, key=_submitted, reverse=True)[:FOLDERS]
    found = [(at, name) for name in names if (at := _changed_at(root.parent / name)) is not None]
    return [root.parent / name for _, name in sorted(found, reverse=True)[:RUNS]]


def _submitted(name: str) -> str:
    match = _TIME.search(name)
    return match[0] if match else ""


def _changed_at(folder: Path) -> Optional[float]:
    """None for what has no attempts, or is another user's."""
    try:
        state = (folder / "attempts").stat()
    except OSError:
        return None
    return state.st_mtime if state.st_uid == os.geteuid() else None


def _seen(spec: RunSpec, one: Records, *, is_over: bool, counts: Callable[[str], bool]) -> Seen:
    """`is_over`: it is known to have ended, whatever its records say; `counts`: a cause does."""
    trained_s = _trained_s(one)
    if trained_s is None:
        return Seen()
    world_size = one.world_size or spec.world_size
    hours = gpus_of(spec, world_size) * trained_s / 3600.0
    return Seen(int(_has_failed(one, is_over=is_over, counts=counts)), hours, 1)


def _is_by_chance(cause: str) -> bool:
    return cause not in NOT_BY_CHANCE


def _is_of_cluster(cause: str) -> bool:
    return cause in OF_CLUSTER


def _trained_s(one: Records) -> Optional[float]:
    began = next((event["at"] for event in one.events if event["kind"] == "first_step"), None)
    if began is None:
        return None
    signs = [float(event["at"]) for event in one.events if event["kind"] in _SIGNS]
    signs.append(one.progress.written_at if one.progress else 0.0)
    return max(0.0, max(signs) - float(began))


_SIGNS = ("first_step", "committed", "ranks_ended")


def _has_failed(one: Records, *, is_over: bool, counts: Callable[[str], bool]) -> bool:
    if one.outcome is not None and one.outcome.result == FINISHED:
        return False
    if one.outcome is not None and one.outcome.result == STOPPED:
        return one.outcome.committed_step != one.outcome.step
    if not one.decision:
        return is_over  # nobody was left to decide: its batch shell went with it
    return counts(str(one.decision.get("cause", "")))
