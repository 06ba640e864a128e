"""Rows of accounting folded into logical jobs. Pure, and bounded by how many jobs run at a time.

sacct prints rows in the order of their Submit, and a requeue or a resize begins a row whose Submit
is that moment (22.05: seen): between the rows of one job stand those of all that were submitted
while it ran. So a job is held until the table is past the time at which it may still come back.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ftslurm.report.logical import REQUEUED_STATES, LogicalJob
from ftslurm.scheduler.job_table import JobRun, resized

RECYCLED_S = 7 * 86_400.0
"""So long after its end no job comes back under its own number; another one may."""
HELD_S = 3_600.0
"""So long after its end a job may be queued again: slurmctld knows it for MinJobAge (300 s)."""
MOST_HELD = 50_000
"""Jobs at a time, of some 2 kB each. Beyond it those that have ended are taken for whole before
their time, and at last those that were queued again: only the next rows of these would be told as
another job."""

_COMES_BACK = REQUEUED_STATES | {"RESIZING"}

_RANGE = re.compile(r"_\[([^\]]*)\]$")


class _Held:
    """A job that may have further rows."""

    __slots__ = ("job", "runs_of_part", "until")

    def __init__(self, job: LogicalJob) -> None:
        self.job = job
        self.runs_of_part: dict[str, int] = {}
        self.until = _until(job.newest)

    def takes(self, run: JobRun, offset: str) -> bool:
        """Whether the run is of this job; then it is part of it."""
        newest = self.job.newest
        if offset not in ("", "0"):
            # Of a het job first all parts in its first run are printed, then all in its second.
            index = self.runs_of_part.get(offset, 0)
            if index < len(self.job.attempts):
                _add_resources(self.job.attempts[index], run)
            self.runs_of_part[offset] = index + 1
            self.job.parts = 1 + len(self.runs_of_part)
            return True
        if newest.state == "RESIZING":
            self.job.attempts[-1] = resized(newest, run)
        elif _goes_on(newest, run):
            self.job.attempts.append(run)
        else:
            return False
        self.until = _until(self.job.newest)
        return True


def fold(runs: Iterable[JobRun]) -> Iterator[LogicalJob]:
    """Each job when it is whole."""
    held: dict[tuple[str, str], _Held] = {}
    ended: list[tuple[float, int, tuple[str, str]]] = []
    comes_back: list[tuple[float, int, tuple[str, str]]] = []
    now = 0.0
    for place, run in enumerate(runs):
        base, _, offset = run.job_id.partition("+")
        key = (run.cluster, base)
        one = held.get(key)
        known_until = one.until if one is not None else None
        if one is not None and not one.takes(run, offset):
            yield held.pop(key).job
            one = known_until = None
        if one is None:
            one = held[key] = _Held(LogicalJob(base, [run], tasks=_tasks(base)))
        if one.until != known_until:
            due = comes_back if one.job.newest.state in _COMES_BACK else ended
            heapq.heappush(due, (one.until, place, key))
        now = max(now, run.submit_at or 0.0)
        for due in (ended, comes_back):
            while due and (due[0][0] < now or len(held) > MOST_HELD):
                until, _, key = heapq.heappop(due)
                if key in held and held[key].until <= until:
                    yield held.pop(key).job
    yield from (one.job for one in held.values())


def _until(run: JobRun) -> float:
    return (run.end_at or run.submit_at or run.start_at or 0.0) + HELD_S


def _goes_on(before: JobRun, run: JobRun) -> bool:
    """Whether this is the next run of the same job and not another job under its old number."""
    if run.restarts is not None and before.restarts is not None:
        may_say_less = before.state in REQUEUED_STATES  # rows of before an upgrade to 24.11 say 0
        if run.restarts != before.restarts or not may_say_less:
            return run.restarts > before.restarts
    if (run.user, run.name, run.cluster) != (before.user, before.name, before.cluster):
        return False
    ended_at = before.end_at or before.start_at or before.submit_at
    begun_at = run.submit_at or run.start_at
    return ended_at is None or begun_at is None or begun_at - ended_at < RECYCLED_S


def _add_resources(leader: JobRun, part: JobRun) -> None:
    leader.gpus += part.gpus
    leader.more_node_s += part.more_node_s
    leader.more_gpu_s += part.more_gpu_s
    leader.num_nodes += part.num_nodes
    leader.nodes = ",".join(filter(None, (leader.nodes, part.nodes)))
    leader.steps += part.steps
    leader.failed_node = leader.failed_node or part.failed_node


def split_waiting(jobs: Iterable[LogicalJob], job_ids: Iterable[str]) -> Iterator[LogicalJob]:
    """Tasks of an array that wait stand in one row: those of `job_ids` become jobs of their own,
    what is left stays one."""
    wanted: dict[str, list[int]] = {}
    for job_id in job_ids:
        array, _, number = job_id.partition("_")
        if number.isdigit():
            wanted.setdefault(array, []).append(int(number))
    for job in jobs:
        array, _, ranges = job.job_id.partition("_[")
        if not ranges or array not in wanted:
            yield job
            continue
        spans = sorted(_spans(job.job_id), key=lambda span: span.start)
        begins = [span.start for span in spans]  # in bit_fmt's lists no two overlap
        places = ((number, bisect_right(begins, number) - 1) for number in wanted[array])
        own = [number for number, place in places if place >= 0 and number in spans[place]]
        for job_id in (f"{array}_{number}" for number in own):
            yield LogicalJob(job_id, [replace(run, job_id=job_id) for run in job.attempts])
        if len(own) < job.tasks:
            yield replace(job, tasks=job.tasks - len(own))


def _tasks(job_id: str) -> int:
    """`70_[3-9,12%2]`: 8."""
    return max(1, sum(map(len, _spans(job_id))))


def _spans(job_id: str) -> list[range]:
    """Which tasks a row stands for; none: it is no range."""
    found = _RANGE.search(job_id)
    if found is None:
        return []
    spans = []
    for piece in found[1].partition("%")[0].split(","):
        span, _, stride = piece.partition(":")
        first, _, last = span.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            continue  # `...`: sacct has cut a long list
        step = int(stride) if stride.isdigit() and int(stride) else 1
        spans.append(range(int(first), int(last or first) + 1, step))
    return spans
