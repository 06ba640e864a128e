"""Rows of accounting folded into logical jobs: one job, however often Slurm has run it.

Pure, and bounded: of a table of any length one logical job is held at a time. An attempt here is
one run of the job by Slurm; of a run of ours, several attempts may lie in one of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Optional

from ftslurm.diagnosis import causes
from ftslurm.scheduler.job_table import JobRun, StepRow

REQUEUED_STATES = frozenset({"REQUEUED", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL"})
"""After which Slurm may start the same job again."""
WAITING_STATES = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD",
     "EXPEDITING"}
)  # fmt: skip
RUNNING_STATES = frozenset(
    {"RUNNING", "SUSPENDED", "COMPLETING", "STAGE_OUT", "RESIZING", "SIGNALING", "STOPPED"}
)
FAILED_STATES = frozenset(
    {"FAILED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "LAUNCH_FAILED", "RECONFIG_FAIL"}
)
"""Words of job_state_string() of 22.05 to 26.05. A word that is none of them is unknown, and no
failure."""

RECYCLED_S = 7 * 86_400.0
"""So long after its end no job comes back under its own number; another one may."""

_RANGE = re.compile(r"_\[([^\]]*)\]$")
AGENTS_STEP = "agents"
"""Job step of the node agents (scheduler/launch)."""
_OOM = 125
"""SIG_OOM (253) less the core-dump bit, as sacct prints it."""


@dataclass
class LogicalJob:
    """`attempts` in order; of a het job those of its first part, with the resources of all."""

    job_id: str
    attempts: list[JobRun] = field(default_factory=list)
    tasks: int = 1
    """Of an array those that a row of waiting tasks stands for."""
    parts: int = 1
    """Of a het job."""

    @property
    def newest(self) -> JobRun:
        return self.attempts[-1]

    @property
    def state(self) -> str:
        """waiting | running | completed | failed | timeout | cancelled | preempted | unknown"""
        word = self.newest.state
        if word in WAITING_STATES:
            return "waiting"
        if word in RUNNING_STATES:
            return "running"
        if word in FAILED_STATES:
            return "failed"
        told = {"COMPLETED": "completed", "TIMEOUT": "timeout", "DEADLINE": "timeout",
                "CANCELLED": "cancelled", "PREEMPTED": "preempted", "REQUEUED": "waiting",
                "REVOKED": "cancelled"}  # fmt: skip
        return told.get(word, "unknown")


@dataclass(frozen=True)
class Ending:
    """Why a run of a job ended, by accounting alone. `cause` None: it has not, or all is well."""

    cause: Optional[str]
    sentence: str
    node: Optional[str] = None


def fold(runs: Iterable[JobRun]) -> Iterator[LogicalJob]:
    """The rows of one job stand together in sacct's table, oldest first (seen)."""
    job: Optional[LogicalJob] = None
    part, index = "0", 0
    for run in runs:
        base, _, offset = run.job_id.partition("+")
        if job is not None and base == job.job_id and offset not in ("", "0"):
            # A further part of a het job: the same attempts once more, on other nodes.
            if offset != part:
                part, index = offset, 0
                job.parts += 1
            if index < len(job.attempts):
                _add_resources(job.attempts[index], run)
            index += 1
            continue
        if job is not None and base == job.job_id and _goes_on(job.newest, run):
            job.attempts.append(run)
            continue
        if job is not None:
            yield job
        job, part, index = LogicalJob(base, [run], tasks=_tasks(base)), "0", 0
    if job is not None:
        yield job


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


def _tasks(job_id: str) -> int:
    """`70_[3-9,12%2]`: 8."""
    found = _RANGE.search(job_id)
    if found is None:
        return 1
    count = 0
    for piece in found[1].partition("%")[0].split(","):
        span, _, stride = piece.partition(":")
        first, _, last = span.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            continue  # `...`: sacct has cut a long list
        step = int(stride) if stride.isdigit() and int(stride) else 1
        count += 1 + max(0, int(last or first) - int(first)) // step
    return max(1, count)


def ending(run: JobRun) -> Ending:
    """By the state of the run; where that is fine, by how its steps died."""
    word = run.state
    if word in WAITING_STATES or word in RUNNING_STATES:
        return Ending(None, "")
    if word == "REQUEUED" and run.code:  # by RequeueExit, or an expedited requeue
        return Ending(causes.CODE, f"exit code {run.code}, and queued again")
    told = _BY_STATE.get(word)
    if told is not None:
        return Ending(told[0], told[1], run.failed_node)
    if word == "CANCELLED":
        if run.cancelled_by is None or run.uid is None:
            return Ending(causes.CANCELLED_USER, "cancelled, Slurm does not say by whom")
        if run.cancelled_by == run.uid:
            return Ending(causes.CANCELLED_USER, "cancelled by its owner")
        return Ending(causes.CANCELLED_ADMIN, f"cancelled by user id {run.cancelled_by}")
    dead = dead_step(run)
    if word == "COMPLETED":
        if dead is None or _went_on(run, dead):
            return Ending(None, "")
        return Ending(_step_cause(dead), f"COMPLETED, but step {_how(dead)}")
    if word == "OUT_OF_MEMORY" or (dead is not None and _is_oom(dead)):
        where = f"step {dead.step_id} " if dead is not None else ""
        return Ending(causes.OOM_HOST, f"{where}ran out of host memory")
    if word == "FAILED":
        return Ending(
            causes.UNKNOWN if _says_nothing(run, dead) else causes.CODE, _failed(run, dead)
        )
    return Ending(causes.UNKNOWN, f"ended in a state that is not known here: {word}")


_BY_STATE: dict[str, tuple[Optional[str], str]] = {
    "PREEMPTED": (causes.PREEMPTED, "preempted"),
    "TIMEOUT": (causes.TIME_LIMIT, "its time limit was up"),
    "DEADLINE": (causes.TIME_LIMIT, "its deadline was up"),
    "NODE_FAIL": (causes.NODE, "a node failed"),
    "BOOT_FAIL": (causes.NODE, "a node did not boot"),
    "LAUNCH_FAILED": (causes.NODE, "a node could not launch it"),
    "REVOKED": (causes.CANCELLED_ADMIN, "revoked: another cluster has started it"),
    "REQUEUED": (None, "requeued by its owner, an operator or its prolog"),
}


def dead_step(run: JobRun) -> Optional[StepRow]:
    """The step that a signal or a lack of memory has ended. `.extern` is nobody's program; a step
    that is CANCELLED by TERM or KILL was ended by the job's own script, by its end, or by Slurm
    because another one had died; and our node agents are ended when all is over."""
    for step in run.steps:
        if step.step_id.endswith((".extern", ".interactive")) or step.name == AGENTS_STEP:
            continue
        if step.state == "CANCELLED" and step.signal in (9, 15):
            continue
        if step.state == "OUT_OF_MEMORY" or (step.signal or 0) not in (0, 15):
            return step
    return None


def _went_on(run: JobRun, dead: StepRow) -> bool:
    """The job's own script has started its program again, and that was done."""
    later = run.steps[run.steps.index(dead) + 1 :]
    return any(step.state == "COMPLETED" and _is_program(step) for step in later)


def _is_program(step: StepRow) -> bool:
    return step.step_id.rpartition(".")[2].isdigit() and step.name != AGENTS_STEP


def _is_oom(step: StepRow) -> bool:
    return step.state == "OUT_OF_MEMORY" or step.signal == _OOM


def _step_cause(step: StepRow) -> str:
    return causes.OOM_HOST if _is_oom(step) else causes.CODE


def _how(step: StepRow) -> str:
    if _is_oom(step):
        return f"{step.step_id} ran out of host memory"
    return f"{step.step_id} died of signal {step.signal}"


def _says_nothing(run: JobRun, dead: Optional[StepRow]) -> bool:
    """A kill from outside looks like one of the program's own."""
    return _was_killed(run) or (dead is not None and dead.signal == 9 and not run.code)


def _was_killed(run: JobRun) -> bool:
    """A script that passes on srun's 137 of a step that was killed (seen on 22.05 to 26.05; a code
    of 128 or more is printed less 128 below 25.11)."""
    return run.code in (9, 137) and any(
        step.state == "CANCELLED" and step.signal == 9 and _is_program(step) for step in run.steps
    )


def _failed(run: JobRun, dead: Optional[StepRow]) -> str:
    parts = []
    if _was_killed(run):
        parts.append(f"exit code {run.code}, which is 128 + 9: its step was killed")
    elif run.signal:
        parts.append(f"signal {run.signal}")
    elif run.code:
        parts.append(f"exit code {run.code}")
    if dead is not None:
        parts.append(f"step {_how(dead)}")
    return ", ".join(parts) or "failed, with a code that is not known (yet)"
