"""The jobs of a run as its directory has them, and how they stand.

Which of them is meant is decided in job_meant.py.
"""

from __future__ import annotations

from typing import Optional

from ftslurm.errors import FormatError
from ftslurm.files import is_listed
from ftslurm.recovery.job_meant import JobsOnRecord, to_ask_for
from ftslurm.run.attempts import Attempt, numbers, read_attempt
from ftslurm.run.jobs import read_jobs
from ftslurm.run.layout import RunLayout
from ftslurm.scheduler.protocol import JobState, Scheduler


def jobs_on_record(layout: RunLayout, scheduler: str) -> JobsOnRecord:
    """`scheduler`: slurm | local"""
    return to_ask_for(read_jobs(layout), newest_claim(layout), scheduler=scheduler)


def ask_for_jobs(
    layout: RunLayout, scheduler: Scheduler
) -> tuple[JobsOnRecord, dict[str, JobState]]:
    """The jobs and their states. A job may queue its successor as it ends: where all look over,
    those that have come on record meanwhile are asked for as well."""
    states: dict[str, JobState] = {}
    while True:
        on_record = jobs_on_record(layout, scheduler.name)
        unasked = [job_id for job_id in on_record.ids if job_id not in states]
        states.update({job_id: scheduler.job_state(job_id) for job_id in unasked})
        if not unasked or not all(states[job_id].is_over for job_id in on_record.ids):
            return on_record, states


def has_begun(layout: RunLayout, job_id: str) -> bool:
    """Whether the newest attempt is this job's."""
    newest = newest_claim(layout)
    return newest is not None and newest.job_id == job_id


def newest_claim(layout: RunLayout) -> Optional[Attempt]:
    """The newest attempt of which the record can be read."""
    for number in reversed(numbers(layout)):
        if not is_listed(layout.attempt(number).attempt_json):
            continue  # its claim was cut off
        try:
            return read_attempt(layout, number)
        except (FileNotFoundError, FormatError):
            continue
    return None
