"""When whoever follows a run shortens the wait of its requeued job: once for each wait, as asking
again would put the start off again, and never the wait of a job that has not begun yet: nobody has
requeued that, and a start time that it has is its submitter's.
"""

from __future__ import annotations

from ftslurm.errors import SchedulerError
from ftslurm.scheduler.protocol import JobState, Scheduler


def waits_for_its_time(state: JobState) -> bool:
    return state.word == "PENDING" and state.reason == "BeginTime"


def hasten_once(
    scheduler: Scheduler,
    job_id: str,
    state: JobState,
    *,
    is_done: bool,
    has_begun: bool,
) -> bool:
    """Whether this wait is shortened, now or before (`is_done`). `has_begun`: whether this job
    has claimed the newest attempt."""
    if not waits_for_its_time(state):
        return False
    if is_done or not has_begun:
        return is_done
    try:
        return scheduler.hasten(job_id)
    except SchedulerError:
        return False  # the job starts all the same, only later; the next look asks again
