"""A job of a run that waits for a person: why, and what lets it go on.

Asks the scheduler whether it lives, then for each job, and changes nothing; where nobody can say,
nothing is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ftslurm.errors import FtslurmError
from ftslurm.operate.standing import open_run
from ftslurm.scheduler.protocol import JobState

# Slurm's words for a job that only an operator may let go (seen: `Access/permission denied`).
_OPERATORS = (
    "JobHeldAdmin",
    "JobHoldMaxRequeue",
    "launch failure limit exceeded requeued held",
)
_LAUNCH_FAILED = "launch failed requeued held"


@dataclass(frozen=True)
class Held:
    job_id: str
    reason: str
    """Slurm's word."""
    sentence: str


def look_for_hold(root: Path) -> Optional[Held]:
    try:
        run = open_run(str(root))
        if not run.scheduler.controller_alive():
            return None
        standing = run.look()
    except FtslurmError:
        return None
    if not standing.state.is_held:
        return None
    job_id, state = standing.job.job_id, standing.state
    return Held(job_id, state.reason, why_held(job_id, state, run.name))


def why_held(job_id: str, state: JobState, name: str) -> str:
    """`name`: of the run, as it is to be typed."""
    reason = state.reason.replace("_", " ")
    if reason in _OPERATORS:
        return (
            f"job {job_id} is held ({reason}) and only an operator can release it: ask for "
            f"`scontrol release {job_id}`, or let `ftslurm cancel {name}` and `ftslurm resume "
            f"{name}` queue a new job"
        )
    why = reason or state.word
    if reason == _LAUNCH_FAILED:
        why = f"{reason}: the prolog of a node failed, and Slurm has drained that node"
    return f"job {job_id} is held ({why}); `ftslurm resume {name}` releases it"
