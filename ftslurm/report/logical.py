"""A logical job: one job, however often Slurm has run it, and why each of its runs ended.

Pure. An attempt here is one run of the job by Slurm; of a run of ours, several attempts may lie in
one of them.
"""

from __future__ import annotations

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

AGENTS_STEP = "agents"
"""Job step of the node agents (scheduler/launch)."""
_OOM = 125
"""SIG_OOM (253) less the core-dump bit, as sacct prints it."""
_TERM = 15
_KILLS = (9, _TERM)
"""Signals that come from outside as a rule, as of the kernel, an operator or another program."""
_NOT_STARTED = 53
"""No signal: slurmd could not open the files of the batch script (seen on 22.05, 24.11, 26.05 where
the folder of --output was not there)."""


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


def ending(run: JobRun) -> Ending:
    """By the state of the run; where that is fine, by how its steps died."""
    word = run.state
    if word in WAITING_STATES or word in RUNNING_STATES:
        return Ending(None, "")
    if word == "REQUEUED" and run.code:  # by RequeueExit, or an expedited requeue
        return Ending(causes.CODE, f"exit code {run.code}, and queued again")
    told = _BY_STATE.get(word)
    if told is not None:
        return Ending(told[0], told[1], failed_node(run) if told[0] == causes.NODE else None)
    if word == "CANCELLED":
        if run.cancelled_by is None or run.uid is None:
            # slurmctld itself leaves no name: --kill-on-invalid-dep (seen on 22.05 to 26.05).
            why = "" if run.nodes else ", as where a job that it depends on has failed"
            return Ending(causes.CANCELLED_USER, f"cancelled, Slurm does not say by whom{why}")
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


def failed_node(run: JobRun) -> Optional[str]:
    """Below 23.02 no field names it: then it is known of a run on one node."""
    return run.failed_node or (run.nodes or None if run.num_nodes == 1 else None)


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
        if step.state == "CANCELLED" and step.signal in _KILLS:
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
    if run.code:
        return _passed_on(run) is not None
    return (dead.signal if dead is not None else run.signal) in (*_KILLS, None)


def _passed_on(run: JobRun) -> Optional[int]:
    """The signal that killed what the script ran, where it passes on the 128 + n of it. Below 25.11
    n is printed, which may be a code of the program's own: then a step has to have died of it."""
    for number in _KILLS:
        killed = (s for s in run.steps if s.state == "CANCELLED" and s.signal == number)
        if run.code == 128 + number or (run.code == number and any(map(_is_program, killed))):
            return None if _ended_itself(run, number) else number
    return None


_OR_SRUN = ", or srun ended it because one of its ranks had failed (-K); srun's output tells"
"""Of ranks on one node the step is CANCELLED, 0:15, however the first one ended: by a code of its
own, by KILL, by `scancel --signal=TERM` (seen on 22.05, 24.11, 26.05)."""


def _ended_itself(run: JobRun, number: int) -> bool:
    """One of its last step's ranks had failed: with --kill-on-bad-exit or --wait srun kills the
    others then, and returns 128 + n (seen on 22.05 and 26.05 with ranks on two nodes)."""
    last = next(filter(_is_program, reversed(run.steps)), None)
    passed_on = (0, None, number, 128 + number)
    return last is not None and last.state == "FAILED" and last.code not in passed_on


def _failed(run: JobRun, dead: Optional[StepRow]) -> str:
    parts = []
    passed_on = _passed_on(run)
    if passed_on is not None:
        or_srun = _OR_SRUN if passed_on == _TERM else ""
        parts.append(
            f"exit code {run.code}, which is 128 + {passed_on}: what it ran was killed{or_srun}"
        )
    elif run.signal == _NOT_STARTED:
        return "its script was not started: slurmd could not open its output (0:53), see --output"
    elif run.signal:
        parts.append(f"signal {run.signal}")
    elif run.code:
        parts.append(f"exit code {run.code}")
    if dead is not None:
        parts.append(f"step {_how(dead)}")
    return ", ".join(parts) or "failed, with a code that is not known (yet)"
