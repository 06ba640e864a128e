"""One logical job as it is reported: its attempts, why each ended, what it cost. Pure.

What accounting does not know is None, never a guess: how much of an attempt was lost is known only
of runs whose own records were found (`joined`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Optional

from ftslurm.diagnosis import causes
from ftslurm.report.logical import LogicalJob, ending
from ftslurm.run.trained_twice import Twice
from ftslurm.scheduler.job_table import JobRun

FREE = frozenset({causes.PREEMPTED, causes.TIME_LIMIT, causes.CANCELLED_USER})
"""Causes that are nobody's fault; an attempt that ended so is no failure."""
FAILURES = frozenset(causes.MEANING) - FREE - {causes.CANCELLED_ADMIN}


@dataclass
class AttemptReport:
    state: str
    """Slurm's word; of an attempt that only the run's records tell of: finished, failed, ..."""
    cause: Optional[str]
    sentence: str
    start_at: Optional[float]
    end_at: Optional[float]
    wait_s: Optional[float]
    """In the queue before it."""
    elapsed_s: float
    num_nodes: int
    gpus: int
    nodes: str
    node: Optional[str] = None
    """The one that is blamed."""
    number: Optional[int] = None
    """Of an attempt that the run's records tell of."""
    rank: Optional[int] = None
    """That failed first."""
    evidence: list[dict[str, Any]] = field(default_factory=list)
    """text, file, line."""
    committed_step: Optional[int] = None
    steps_lost: Optional[int] = None
    tokens_lost: Optional[int] = None
    lost_s: Optional[float] = None
    """Training that was done again, or is lost for good."""
    mttd_s: Optional[float] = None
    rto_s: Optional[float] = None
    is_requeued: bool = False
    more_node_s: float = 0.0
    """Of a job that was resized: beyond `elapsed_s` on `num_nodes` nodes."""
    more_gpu_s: float = 0.0
    is_cut_later: bool = False
    """Cut short, but after the window: why is not told there, and what it had not saved by then is
    lost all the same."""

    @property
    def node_hours(self) -> float:
        return (self.elapsed_s * self.num_nodes + self.more_node_s) / 3600.0

    @property
    def gpu_hours(self) -> float:
        return (self.elapsed_s * self.gpus + self.more_gpu_s) / 3600.0

    @property
    def last_at(self) -> Optional[float]:
        """Its end, or so late it was still there."""
        if self.end_at is not None or self.start_at is None:
            return self.end_at
        return self.start_at + self.elapsed_s

    @property
    def is_cut_short(self) -> bool:
        """It did not come to its own end: whatever it had not saved is lost."""
        return self.cause is not None or self.is_requeued or self.is_cut_later

    @property
    def is_begun(self) -> bool:
        """It counts as an attempt. 22.05 may lose the start of one that a lost node has ended."""
        return self.start_at is not None or self.is_failure

    @property
    def is_failure(self) -> bool:
        return self.cause in FAILURES


@dataclass(frozen=True)
class SweepTask:
    """Which task of a sweep a run is."""

    sweep_dir: str
    number: int
    overrides: list[str]
    """Those that not all tasks of the sweep have."""
    value: Any
    """What it came to, as JSON has it; None: it is not done, or returned nothing."""


@dataclass
class JobReport:
    job_id: str
    name: str
    user: str
    account: str
    partition: str
    state: str
    attempts: list[AttemptReport]
    tasks: int = 1
    run_dir: Optional[str] = None
    committed_step: Optional[int] = None
    last_step: Optional[int] = None
    step_s: Optional[float] = None
    """Median time of a step."""
    sweep: Optional[SweepTask] = None
    """None: it is no task of a sweep."""
    twice: Optional[Twice] = None
    """Its steps that several attempts trained; None: none, or no record tells."""
    notes: list[str] = field(default_factory=list)
    """What is not known, and why."""

    @property
    def gpu_hours(self) -> float:
        return sum(one.gpu_hours for one in self.attempts)

    @property
    def node_hours(self) -> float:
        return sum(one.node_hours for one in self.attempts)

    @property
    def wait_s(self) -> float:
        return sum(one.wait_s or 0.0 for one in self.attempts)

    @property
    def begun(self) -> list[AttemptReport]:
        return [one for one in self.attempts if one.is_begun]

    @property
    def failures(self) -> list[AttemptReport]:
        return [one for one in self.attempts if one.is_failure]

    def causes(self) -> dict[str, int]:
        """Of its attempts, in the order in which they first came."""
        found: dict[str, int] = {}
        for one in self.attempts:
            if one.cause is not None:
                found[one.cause] = found.get(one.cause, 0) + 1
        return found


def report_of(job: LogicalJob) -> JobReport:
    """By accounting alone."""
    newest = job.newest
    attempts = [_attempt(run) for run in job.attempts]
    for one in attempts[:-1]:
        one.is_requeued = True
    return JobReport(
        job_id=job.job_id,
        name=newest.name,
        user=newest.user,
        account=newest.account,
        partition=newest.partition,
        state=job.state,
        attempts=attempts,
        tasks=job.tasks,
    )


def _attempt(run: JobRun) -> AttemptReport:
    end = ending(run)
    return AttemptReport(
        state=run.state,
        cause=end.cause,
        sentence=end.sentence,
        start_at=run.start_at,
        end_at=run.end_at,
        wait_s=queued_s(run),
        elapsed_s=run.elapsed_s,
        num_nodes=run.num_nodes,
        gpus=run.gpus,
        nodes=run.nodes,
        node=end.node,
        more_node_s=run.more_node_s,
        more_gpu_s=run.more_gpu_s,
    )


def within(job: JobReport, since: Optional[float], until: Optional[float]) -> JobReport:
    """What of it lies between the two (None: no bound), so that windows side by side add up: time
    is of the window it lies in, a wait of the one with the start, the end and its cause of the one
    with the end. One that ended after `until` had not ended then. A job that waits is told as it
    is."""
    kept = [_clipped(one, since, until) for one in job.attempts if _is_inside(one, since, until)]
    if kept == job.attempts:
        return job
    return replace(job, attempts=kept, state=_state_at(job, until))


def _state_at(job: JobReport, until: Optional[float]) -> str:
    """As of `until`, where something came after it."""
    if until is None or not any(_is_after(one.last_at, until) for one in job.attempts):
        return job.state
    begun = [one for one in job.attempts if one.start_at is not None and one.start_at < until]
    return "running" if any(_is_after(one.last_at, until) for one in begun) else "waiting"


def _is_inside(one: AttemptReport, since: Optional[float], until: Optional[float]) -> bool:
    begin, end = (one.end_at if one.start_at is None else one.start_at), one.end_at
    if until is not None and begin is not None and begin >= until:
        return False
    return since is None or end is None or end >= since


def _is_after(at: Optional[float], until: Optional[float]) -> bool:
    return at is not None and until is not None and at >= until


def _clipped(one: AttemptReport, since: Optional[float], until: Optional[float]) -> AttemptReport:
    start_at, end_at = one.start_at, one.last_at
    if start_at is None or end_at is None:
        return one
    begin = start_at if since is None else max(start_at, since)
    end = end_at if until is None else min(end_at, until)
    part = max(0.0, end - begin) / (end_at - start_at) if end_at > start_at else 1.0
    found = replace(
        one,
        start_at=begin,
        wait_s=one.wait_s if begin == start_at else None,
        elapsed_s=one.elapsed_s * part,
        more_node_s=one.more_node_s * part,
        more_gpu_s=one.more_gpu_s * part,
    )
    return _unended(found) if one.end_at is not None and _is_after(end_at, until) else found


def _unended(one: AttemptReport) -> AttemptReport:
    """Without its end, and what is told of that."""
    return replace(
        one,
        state="RUNNING",
        end_at=None,
        cause=None,
        sentence="",
        node=None,
        rank=None,
        evidence=[],
        steps_lost=None,
        tokens_lost=None,
        mttd_s=None,
        rto_s=None,
        is_requeued=False,
        is_cut_later=one.is_cut_short,
    )


def queued_s(run: JobRun) -> Optional[float]:
    """From when it might have started (dependencies, --begin and holds aside) until it did."""
    since = run.eligible_at or run.submit_at
    if since is None or run.start_at is None:
        return None
    return max(0.0, run.start_at - since)
