"""Queues those tasks of a sweep that no scheduler has taken yet.

Whoever submits a sweep queues what a limit on jobs lets pass; the rest is queued as room appears,
by whoever follows the sweep or resumes it. What may have been queued by somebody who died is looked
for first, so no task is queued twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from ftslurm.run.jobs import BY_SUBMIT, read_jobs
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import TaskRecord, read_sweep, read_tasks
from ftslurm.scheduler.arrays import find_lost, submit_groups


def not_queued(layout: SweepLayout, numbers: Optional[Sequence[int]] = None) -> list[TaskRecord]:
    """Tasks, of `numbers` or all, that are ready and have never had a job."""
    wanted = None if numbers is None else set(numbers)
    return [
        task
        for task in read_tasks(layout)
        if (wanted is None or task.number in wanted)
        and not read_jobs(layout.task(task.number))
        and layout.task(task.number).run_json.exists()
    ]


def queue_left(
    layout: SweepLayout, numbers: Optional[Sequence[int]] = None, *, alive: int = 0
) -> int:
    """Queue as many of the tasks that are left as Slurm takes; how many it took. `alive`: of those
    that it has. SchedulerError: nobody can say whether there are some, or Slurm wants none. The
    caller holds the lock."""
    find_lost(layout)
    return queue(layout, not_queued(layout, numbers), alive=alive, queued_by=BY_SUBMIT)


def queue(layout: SweepLayout, tasks: Sequence[TaskRecord], *, alive: int, queued_by: str) -> int:
    """Queue these tasks, group by group, until Slurm takes no more; how many it took. An array
    knows nothing of what runs beside it, so its own limit is what those leave, at least one."""
    parallelism = read_sweep(layout).parallelism
    if parallelism is not None:
        parallelism = max(1, parallelism - alive)
    arrays = submit_groups(layout, tasks, parallelism=parallelism, queued_by=queued_by)
    return sum(len(array.numbers) for array in arrays)
