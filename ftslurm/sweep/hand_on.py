"""A task that has ended hands on what its array leaves of its share of `parallelism`: nobody has to
follow the sweep for that.

Called in the task's own job, once its end is on record, and costs a question to Slurm; where no
other task of its array waits, and one of another array may, what is free is looked for in the whole
sweep. Of many that end at once few do that: one is at it and one waits, who sees all that have come
to their end by then. Raises shares and queues nothing: a job would queue other tasks side by side
with other jobs, and not every file system that nodes share has locks. What goes wrong is said and
costs the sweep its speed alone.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Optional

from ftslurm.errors import FtslurmError, warn
from ftslurm.files import is_listed
from ftslurm.recovery.actions import ENDED, STOP
from ftslurm.run.attempts import numbers, read_attempt, read_decision
from ftslurm.run.jobs import read_jobs
from ftslurm.run.layout import RunLayout
from ftslurm.run.sweep_layout import SweepLayout, parse_task_id
from ftslurm.run.sweep_lock import is_closed, queueing, waiting_in_line
from ftslurm.run.sweep_record import (
    WIDENING,
    ArrayRecord,
    SweepRecord,
    read_arrays,
    read_sweep,
    read_tasks,
)
from ftslurm.scheduler import open_scheduler

_OVER = (ENDED, STOP)


def hand_on(run: RunLayout) -> None:
    """Of a run that is no task of a sweep, or has nothing to hand on, nothing happens."""
    task, layout = parse_task_id(run.root.name), SweepLayout(run.root.parent)
    if task is None or task[0] != layout.sweep_id:
        return
    number = task[1]
    with _said():
        if not layout.sweep_json.exists() or not _is_shared(read_sweep(layout)):
            return
        arrays = read_arrays(layout)
        if not _has_others(arrays) or is_closed(layout):
            return
        if _leaves_room(arrays, number) and _others_may_wait(layout, arrays, number):
            _give(layout, number)


@contextlib.contextmanager
def _said() -> Iterator[None]:
    try:
        yield
    except (FtslurmError, OSError) as error:
        warn(f"fewer tasks of the sweep may run at once than might: {error}")


def _is_shared(record: SweepRecord) -> bool:
    return record.parallelism is not None and record.scheduler != "local"


def _has_others(arrays: Sequence[ArrayRecord]) -> bool:
    """An array that is the only one has all there is."""
    return len({array.array_id for array in arrays if array.array_id}) > 1


def _leaves_room(arrays: Sequence[ArrayRecord], number: int) -> bool:
    """Whether no task of its array waits for the place of this one."""
    own = _array_of(arrays, number)
    if own is None or own.alone or own.at_once is None:
        return True
    ids = [own.job_id(one) for one in own.numbers]
    states = open_scheduler("slurm").job_states(ids).values()
    if not any(state.is_known for state in states):
        return False  # this job is there, so nobody has answered, or would tell of the others
    return sum(not state.is_over for state in states) <= own.at_once


def _array_of(arrays: Sequence[ArrayRecord], number: int) -> Optional[ArrayRecord]:
    """The newest that Slurm has taken it with, and what it may run now; None: it is in none."""
    return next((one for one in reversed(arrays) if one.array_id and number in one.numbers), None)


def _others_may_wait(layout: SweepLayout, arrays: Sequence[ArrayRecord], number: int) -> bool:
    """Whether another array has more tasks left than it may run at once, as far as files tell, or
    Slurm may not have been told of its share."""
    own = _array_of(arrays, number)
    newest = {array.array_id: array for array in arrays if array.array_id}
    return any(
        array.event == WIDENING or _has_more(layout, array)
        for name, array in newest.items()
        if own is None or name != own.array_id
    )


def _has_more(layout: SweepLayout, array: ArrayRecord) -> bool:
    if array.at_once is None or array.at_once >= len(array.numbers):
        return False
    left = (number for number in array.numbers if not is_listed(layout.task(number).done))
    return next(itertools.islice(left, array.at_once, None), None) is not None


def _give(layout: SweepLayout, number: int) -> None:
    from ftslurm.sweep.share import use_room  # late: most have nothing to give

    with contextlib.ExitStack() as line:
        if not line.enter_context(waiting_in_line(layout)):
            return
        with queueing(layout):
            line.close()  # who comes now may not be seen any more
            use_room(layout, over={number, *_have_ended(layout)})


def _have_ended(layout: SweepLayout) -> Iterator[int]:
    """Tasks that are not DONE and whose batch script has decided that they end. Their jobs may take
    their time to leave: they wait for the lock, or an epilog is run after them."""
    for task in read_tasks(layout):
        run = layout.task(task.number)
        attempt = next(reversed(numbers(run)), None)
        if attempt is None or read_decision(run.attempt(attempt)).get("action") not in _OVER:
            continue
        jobs = read_jobs(run)
        # Else somebody has queued it since.
        if jobs and read_attempt(run, attempt).job_id == jobs[-1].job_id:
            yield task.number
