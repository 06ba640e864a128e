"""Which jobs a run has had: RUN/submit/jobs.jsonl, a line each, added to and never changed.

A run keeps its job id through requeues; a resubmission, by the batch loop or by a person, gives it
another one. Which of them is meant by "the job of this run" is told in recovery/job_meant.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

from ftslurm.files import append_record, read_records
from ftslurm.run.layout import RunLayout

# Job.queued_by
BY_SUBMIT = "submit"
BY_BATCH = "batch"
"""The batch loop queued it as the successor of its own job."""
BY_PERSON = "person"
"""`ftslurm resume`, or the run's script handed to sbatch by hand."""


@dataclass(frozen=True)
class Job:
    """One job of a run."""

    job_id: str
    scheduler: str
    queued_by: str
    queued_at: float
    after: Optional[str] = None
    """Job id that it waits for, of a successor."""


def add_job(
    layout: RunLayout,
    job_id: str,
    *,
    scheduler: str,
    queued_by: str,
    after: Optional[str] = None,
    now: Callable[[], float] = time.time,
) -> Job:
    """Write down that the scheduler has taken a job for this run; once, whoever says it first: a
    job may begin before its submitter has come to this."""
    for known in read_jobs(layout):
        if known.job_id == job_id:
            return known
    job = Job(job_id, scheduler, queued_by, now(), after)
    append_record(layout.jobs, {"schema_version": 1, **vars(job)})
    return job


def read_jobs(layout: RunLayout) -> list[Job]:
    """All jobs, oldest first; none for a run that no scheduler has taken."""
    return [
        Job(
            job_id=str(record["job_id"]),
            scheduler=str(record["scheduler"]),
            queued_by=str(record["queued_by"]),
            queued_at=float(record["queued_at"]),
            after=record.get("after"),
        )
        for record in read_records(layout.jobs)
    ]
