"""The job we run in, its run, and the ways to act on both; whether it has given way to another.

Reads only. What follows the job is found and queued in successor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

from ftslurm.run.attempts import claimed_numbers, read_events
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import RunRecord
from ftslurm.scheduler.protocol import Scheduler

GAVE_WAY = "gave_way"
"""Event of an attempt whose batch loop has cancelled its own job in favour of the successor."""

RECENT_ATTEMPTS = 3
"""In whose journals GAVE_WAY is looked for: who notes it may not see yet what was claimed last."""


def submit_as(pid: int, arguments: Sequence[str]) -> str:
    """sbatch, in the environment that this process of our job was started with."""
    from ftslurm.scheduler.sbatch import environment_of_job, submit  # late: few attempts submit

    return submit(arguments, environ=environment_of_job(pid))


def submit_from_job(arguments: Sequence[str]) -> str:
    """In that of the batch shell above us."""
    return submit_as(os.getppid(), arguments)


@dataclass(frozen=True)
class OwnJob:
    """The job we run in, its run, and the ways to act on both."""

    layout: RunLayout
    record: RunRecord
    scheduler: Scheduler
    job_id: str
    restart_count: int = 0
    submit: Callable[[Sequence[str]], str] = submit_from_job
    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep

    @classmethod
    def of(
        cls,
        layout: RunLayout,
        record: RunRecord,
        scheduler: Scheduler,
        environ: Mapping[str, str],
    ) -> OwnJob:
        """The job whose environment this is."""
        restart_count = int(environ.get("SLURM_RESTART_COUNT") or 0)
        return cls(layout, record, scheduler, scheduler.own_job_id(environ), restart_count)


def has_given_way(job: OwnJob) -> bool:
    """Whether our own job is, or is about to be, cancelled in favour of its successor. What it did
    before Slurm queued it again does not count."""
    counts = [event.get("restart_count") for event in noted_ways(job.layout, job.job_id)]
    return any(count in (None, job.restart_count) for count in counts)


def noted_ways(layout: RunLayout, job_id: str) -> list[dict[str, Any]]:
    """The events by which this job has given way, in the newest attempts of whichever job."""
    return [
        event
        for number in claimed_numbers(layout)[-RECENT_ATTEMPTS:]
        for event in read_events(layout.attempt(number))
        if event["kind"] == GAVE_WAY and event.get("job_id") == job_id
    ]
