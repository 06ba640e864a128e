"""All jobs together: shares of causes, time between failures, lemons, goodput. Pure and bounded.

Jobs are added one by one and not kept; what is kept grows with nodes and their faults, users,
partitions and runs that were joined, not with jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Optional

from ftslurm.diagnosis import causes
from ftslurm.diagnosis.causes import NODE_FAULTS
from ftslurm.report.drains import Drains
from ftslurm.report.jobs import AttemptReport, JobReport
from ftslurm.report.lemons import Judged, NodeTally, Programs, judge, program_of

GROUPS = ("cause", "node", "user", "run", "partition")
HARDWARE = NODE_FAULTS | {causes.NETWORK_TRANSIENT, causes.STORAGE}
"""Causes that are the cluster's and not the program's."""
BLAME = HARDWARE | {causes.STRAGGLER}
"""With which a node that is named is at fault; the rank of an error in the code is on one as well.
"""
SAME_FAULT_S = 600.0
"""Ends of jobs on one node within so long are of one fault."""


@dataclass
class Group:
    """What is summed for one cause, node, user, run or partition."""

    jobs: int = 0
    attempts: int = 0
    failures: int = 0
    gpu_hours: float = 0.0
    node_hours: float = 0.0
    lost_gpu_hours: float = 0.0
    """Of attempts whose records say how much was lost; `unknown_gpu_hours` is all of the others
    that were cut short."""
    unknown_gpu_hours: float = 0.0
    wait_s: float = 0.0

    def add(self, other: Group) -> None:
        self.jobs += other.jobs
        self.attempts += other.attempts
        self.failures += other.failures
        self.gpu_hours += other.gpu_hours
        self.node_hours += other.node_hours
        self.lost_gpu_hours += other.lost_gpu_hours
        self.unknown_gpu_hours += other.unknown_gpu_hours
        self.wait_s += other.wait_s


@dataclass
class Goodput:
    """Of runs with records of their own: where the time of their nodes went, in seconds."""

    trained_s: float = 0.0
    lost_s: float = 0.0
    stall_s: float = 0.0
    restart_s: float = 0.0
    other_s: float = 0.0
    queue_s: float = 0.0
    """Not part of what was allocated."""

    def add(self, other: Goodput) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def allocated_s(self) -> float:
        return self.trained_s + self.lost_s + self.stall_s + self.restart_s + self.other_s

    @property
    def share(self) -> Optional[float]:
        return self.trained_s / self.allocated_s if self.allocated_s else None


@dataclass
class Fleet:
    jobs: int = 0
    states: dict[str, int] = field(default_factory=dict)
    total: Group = field(default_factory=Group)
    by: dict[str, dict[str, Group]] = field(default_factory=lambda: {name: {} for name in GROUPS})
    node_tallies: dict[str, NodeTally] = field(default_factory=dict)
    programs: Programs = field(default_factory=Programs)
    at_fault: dict[str, dict[str, int]] = field(default_factory=dict)
    """Cause -> node -> attempts that it ended there, where the node was blamed."""
    node_faults: int = 0
    """One that has ended several jobs counts once; and so below."""
    hardware_failures: int = 0
    """That ended attempts with GPUs."""
    failed_then_done: int = 0
    failed_for_good: int = 0
    hit_again: int = 0
    """Attempts on a node that had failed the same job before."""
    could_hit_again: int = 0
    goodput: Goodput = field(default_factory=Goodput)
    runs_untold: int = 0
    """Not in the goodput: no record says what they trained."""
    differing: int = 0
    """Runs that trained steps again otherwise than before, though they had to be the same."""
    first_differing: str = ""
    """The directory of one, and what differs there."""
    drains: Optional[Drains] = None
    """Nodes that were out of service; None: it was not asked for, or nobody answers."""
    _faults: set[tuple[str, str, float]] = field(default_factory=set)
    _failed_at: dict[str, float] = field(default_factory=dict)

    def add(self, job: JobReport, *, expand: Callable[[str], list[str]]) -> None:
        """`expand`: host list -> nodes."""
        self.__dict__.pop("judged", None)
        self.jobs += job.tasks
        self.states[job.state] = self.states.get(job.state, 0) + job.tasks
        whole = _sum(job.attempts, jobs=job.tasks)
        self.total.add(whole)
        run = job.sweep.sweep_dir if job.sweep is not None else job.run_dir
        for name, key in (("user", job.user), ("partition", job.partition), ("run", run)):
            if key:
                self._group(name, key).add(whole)
        for cause in {one.cause for one in job.attempts if one.cause}:
            its = [one for one in job.attempts if one.cause == cause]
            self._group("cause", cause).add(_sum(its, jobs=job.tasks))
        blamed = [one for one in job.attempts if one.node and _is_node_fault(one)]
        for node in {one.node for one in blamed if one.node}:
            self._group("node", node).add(_sum(one for one in blamed if one.node == node))
        self._nodes(job, expand)
        if job.twice is not None and job.twice.differ:
            self.differing += 1
            self.first_differing = self.first_differing or f"{job.run_dir}: {job.twice.sentence}"
        # One that was cancelled might still have been done.
        if job.failures and job.state in ("completed", "failed", "timeout"):
            is_done = job.state != "failed" and not job.attempts[-1].is_failure
            self.failed_then_done += is_done
            self.failed_for_good += not is_done

    def _group(self, name: str, key: str) -> Group:
        groups = self.by[name]
        if key not in groups:
            groups[key] = Group()
        return groups[key]

    def _nodes(self, job: JobReport, expand: Callable[[str], list[str]]) -> None:
        hours: dict[str, float] = {}
        blamed: set[str] = set()
        gone_bad: set[str] = set()
        outcome: dict[str, bool] = {}
        for one in job.attempts:
            nodes = expand(one.nodes) if one.nodes else []
            for node in nodes:
                hours[node] = hours.get(node, 0.0) + one.elapsed_s / 3600.0
            if one.cause in HARDWARE and one.is_failure:
                self._count_fault(one, job.job_id)
            if gone_bad and nodes:
                self.could_hit_again += 1
                self.hit_again += bool(gone_bad & set(nodes))
            if one.node and one.cause in BLAME:
                at_fault = self.at_fault.setdefault(one.cause, {})
                at_fault[one.node] = at_fault.get(one.node, 0) + 1
                if one.node not in blamed and self._is_new("blame", one.node, one.end_at):
                    blamed.add(one.node)
            elif one.is_failure:
                outcome.update((node, True) for node in nodes if self._is_apart(node, one.end_at))
            elif not one.is_cut_short and one.end_at is not None:
                for node in nodes:
                    outcome.setdefault(node, False)
            if one.node and _is_node_fault(one):
                gone_bad.add(one.node)
        for node in hours.keys() | blamed:
            tally = self.node_tallies.setdefault(node, NodeTally())
            tally.jobs += 1
            tally.hours += hours.get(node, 0.0)
            tally.blamed += node in blamed
        if outcome:
            self.programs.add(program_of(job.user, job.partition, job.name), outcome)

    def _count_fault(self, one: AttemptReport, job_id: str) -> None:
        place = one.node or one.nodes or job_id
        if _is_node_fault(one):
            self.node_faults += self._is_new("node", place, one.end_at)
        if one.gpus:
            self.hardware_failures += self._is_new("gpu", place, one.end_at)

    def _is_apart(self, node: str, at: Optional[float]) -> bool:
        """Of a failure of which nobody is blamed: no other was near it on the node, as when a file
        system is away and takes down all that runs."""
        if at is None:
            return True
        before = self._failed_at.get(node)
        self._failed_at[node] = at
        return before is None or abs(at - before) > SAME_FAULT_S

    def _is_new(self, kind: str, place: str, at: Optional[float]) -> bool:
        """Not of a fault that has ended another job already."""
        if at is None:
            return True
        span = at // SAME_FAULT_S
        is_new = all((kind, place, span + i) not in self._faults for i in (-1.0, 0.0, 1.0))
        self._faults.add((kind, place, span))
        return is_new

    @cached_property
    def judged(self) -> Judged:
        """Which nodes fail jobs more often than chance would have it."""
        return judge(self.node_tallies, self.programs)

    @property
    def node_mtbf_h(self) -> Optional[float]:
        """Node-hours for each failure of a node or GPU; None without any. The hours are those of
        jobs: where jobs share a node they pass faster than the clock."""
        return self.total.node_hours / self.node_faults if self.node_faults else None

    @property
    def gpu_mtbf_h(self) -> Optional[float]:
        """GPU-hours for each failure that was not the program's, of attempts with GPUs: what
        `ftslurm plan` asks for."""
        return self.total.gpu_hours / self.hardware_failures if self.hardware_failures else None

    @property
    def recovered_share(self) -> Optional[float]:
        """Of the jobs that failed at least once and have ended by themselves: those whose last
        attempt did not fail."""
        ended = self.failed_then_done + self.failed_for_good
        return self.failed_then_done / ended if ended else None

    @property
    def hit_again_share(self) -> Optional[float]:
        return self.hit_again / self.could_hit_again if self.could_hit_again else None


def _is_node_fault(one: AttemptReport) -> bool:
    return one.cause in NODE_FAULTS


def _sum(attempts: Iterable[AttemptReport], *, jobs: int = 1) -> Group:
    group = Group(jobs)
    for one in attempts:
        is_failure, gpu_hours = one.is_failure, one.gpu_hours
        group.attempts += one.is_begun
        group.failures += is_failure
        group.gpu_hours += gpu_hours
        group.node_hours += one.node_hours
        group.wait_s += one.wait_s or 0.0
        if one.lost_s is not None:
            group.lost_gpu_hours += one.lost_s * one.gpus / 3600.0
        elif one.is_cut_short:
            group.unknown_gpu_hours += gpu_hours
    return group
