"""A run that gets nowhere without ever failing: job after job lasts until its time limit, and
nothing is committed. Ranks that hang leave no word, and their batch shell is killed with them.

Preemptions and lost nodes never count, however many: the scheduler is asked how a job ended that
nobody has decided anything about. Whether the run then ends is the caller's.
"""

from __future__ import annotations

from typing import Any, Optional

from ftslurm.diagnosis.causes import TIME_LIMIT
from ftslurm.recovery.actions import ENDED, PAUSED, STOP
from ftslurm.recovery.evidence import has_gone_on, read_history
from ftslurm.recovery.own_job import OwnJob
from ftslurm.recovery.policy import CAUSE_ASKED
from ftslurm.run.attempts import Attempt, claimed_numbers, read_attempt, read_decision
from ftslurm.run.spec import parse_time_s

MORE_THAN_FAILURES = 3
"""On top of recovery.max_failures: less is known of these than of a failure."""

_NOT_ITS_OWN_END = frozenset(
    {"PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED", "REVOKED", "CANCELLED"}
)


def why_it_stands_still(job: OwnJob) -> Optional[str]:
    """A sentence for the person who has to look; None: the run may go on."""
    layout, spec = job.layout, job.record.spec
    enough = spec.recovery.max_failures + MORE_THAN_FAILURES
    numbers = claimed_numbers(layout)
    if len(numbers) < enough or has_gone_on(layout, job.record, numbers[-1]):
        return None
    in_vain = _in_vain(job, numbers, enough)
    if len(in_vain) < enough:
        return None
    progress = "a change in RUN/resume" if spec.program else "a newly committed step"
    return (
        f"{enough} attempts in a row were ended from outside without {progress}, and not by a "
        f"preemption or a lost node (the last is {in_vain[0]}, its logs are in "
        f"`{layout.attempt(in_vain[0]).logs}`): the ranks hang, or the first save needs longer "
        "than a job lasts; mend the cause, or save more often"
    )


def _in_vain(job: OwnJob, numbers: list[int], enough: int) -> list[int]:
    """The newest attempts that have used their jobs up for nothing, newest first. One that failed
    is counted where failures are; any other end ends the row."""
    history = {past.number: past for past in read_history(job.layout, job.record, numbers[-1])}
    found: list[int] = []
    following: Optional[Attempt] = None  # None: it is to be claimed now
    for number in reversed(numbers):
        past, attempt = history.get(number), read_attempt(job.layout, number)
        decision = read_decision(job.layout.attempt(number))
        if past is not None and past.progressed:
            break
        # A person has let the run go on since.
        if decision.get("action") in (STOP, ENDED, PAUSED):
            break
        if past is None or not past.failed:
            if not _has_used_up(job, attempt, following, decision):
                break
            found.append(number)
        if len(found) == enough:
            break
        following = attempt
    return found


def _has_used_up(
    job: OwnJob, attempt: Attempt, following: Optional[Attempt], decision: dict[str, Any]
) -> bool:
    if decision:
        asked = decision.get("cause") == CAUSE_ASKED and bool(decision.get("term"))
        return decision.get("cause") == TIME_LIMIT or (asked and bool(decision.get("limit_passed")))
    next_id = following.job_id if following else job.job_id
    if attempt.job_id == next_id:
        return False  # Slurm itself has queued it again, which it never does after a time limit
    word = job.scheduler.end_word(attempt.job_id)
    if word is not None:
        return word not in _NOT_ITS_OWN_END
    # Nobody can say (no accounting). A shorter time than the limit holds no whole job.
    next_at = following.claimed_at if following else job.now()
    return next_at - attempt.claimed_at >= parse_time_s(job.record.spec.cluster.time)
