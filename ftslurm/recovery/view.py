"""A run's directory and its jobs' states, put together to the view that `ending` judges.

Reads only. A run may have one job after the other: the one that is meant is the one that runs,
else the newest.
"""

from __future__ import annotations

from typing import Optional

from ftslurm.files import read_json
from ftslurm.recovery.ending import AttemptView, View
from ftslurm.run.attempts import claimed_numbers, numbers, read_attempt, read_progress
from ftslurm.run.jobs import read_jobs
from ftslurm.run.layout import AttemptLayout, RunLayout
from ftslurm.scheduler.protocol import JobState


def job_to_watch(layout: RunLayout) -> Optional[str]:
    """The job that has begun last, else the first one; None: no job of the run is known."""
    jobs = read_jobs(layout)
    return begun_last(layout) or (jobs[0].job_id if jobs else None)


def begun_last(layout: RunLayout) -> Optional[str]:
    claimed = claimed_numbers(layout)
    return read_attempt(layout, claimed[-1]).job_id if claimed else None


def later_job(layout: RunLayout, job_id: str) -> Optional[str]:
    """The newest job of the run, unless it is this one."""
    jobs = [job.job_id for job in read_jobs(layout)]
    return jobs[-1] if jobs and jobs[-1] != job_id else None


def takes_over(layout: RunLayout, later: str, state: JobState, before: JobState) -> bool:
    """A successor is queued when its predecessor begins: it is the one to watch once that has
    ended, or when it has itself begun."""
    if before.is_over:
        return state.is_known and not state.is_ended
    return begun_last(layout) == later


def read_view(layout: RunLayout, job_id: str, job: JobState, *, whole: bool = True) -> View:
    """`job` was asked before: what it wrote last is then seen with its end. Not `whole`: of the
    attempts before the newest the numbers only."""
    claimed = numbers(layout)
    attempts = [
        _attempt(number, layout.attempt(number), read=whole or number == claimed[-1])
        for number in claimed
    ]
    return View(tuple(attempts), layout.done.exists(), job, job_id)


def _attempt(number: int, paths: AttemptLayout, *, read: bool) -> AttemptView:
    if not read:
        return AttemptView(number, None, None)
    try:
        decision = read_json(paths.decision_json)
    except FileNotFoundError:
        decision = None
    return AttemptView(number, read_progress(paths), decision)
