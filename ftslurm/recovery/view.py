"""A run's directory and its jobs' states, put together to the view that `ending` judges.

Reads only. Which of several jobs is meant is decided in job_meant.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ftslurm.files import is_listed
from ftslurm.recovery.ending import AttemptView, View
from ftslurm.recovery.job_meant import NO_JOB, JobsOnRecord, choose
from ftslurm.run.attempts import numbers, read_decision, read_progress
from ftslurm.run.layout import AttemptLayout, RunLayout
from ftslurm.scheduler.protocol import JobState


def read_view(
    layout: RunLayout,
    on_record: JobsOnRecord,
    states: Mapping[str, JobState],
    *,
    whole: bool = True,
) -> View:
    """`states`: of the jobs, which were asked before: what they wrote last is then seen with their
    end. Not `whole`: of the attempts before the newest the numbers only."""
    claimed = numbers(layout)
    attempts = [
        _attempt(number, layout.attempt(number), read=whole or number == claimed[-1])
        for number in claimed
    ]
    view = View(tuple(attempts), is_listed(layout.done), NO_JOB, begun_last=on_record.begun_last)
    meant = choose(on_record, states, action=view.action)
    job_id = meant.job.job_id if meant.job else ""
    return dataclasses.replace(view, job=meant.state, job_id=job_id, alive=meant.alive)


def _attempt(number: int, paths: AttemptLayout, *, read: bool) -> AttemptView:
    if not read:
        return AttemptView(number, None, None)
    return AttemptView(number, read_progress(paths), read_decision(paths) or None)
