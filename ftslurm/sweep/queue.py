"""Queues tasks of a sweep: the one way to do it, for who submits it, who follows it and who
resumes it.

What may have been queued by somebody who died is looked for first, so no task is queued twice. What
a limit on jobs does not let pass is left, and so is what would run beside more tasks than
`parallelism` allows: an array knows nothing of what runs beside it, so who is alive is asked and
the others' room is shared. Jobs that follow a task's first by continue_by=resubmit are in no array:
they count here, one job a task, and no array waits for them. The caller holds the sweep's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Optional

from ftslurm.recovery.on_record import jobs_on_record
from ftslurm.run.jobs import BY_SUBMIT, add_job, read_jobs
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_lock import require_open
from ftslurm.run.sweep_record import (
    ArrayRecord,
    TaskRecord,
    read_arrays,
    read_sweep,
    read_tasks,
    unanswered,
)
from ftslurm.scheduler.again import submit_again
from ftslurm.scheduler.arrays import AT_LIMIT, NO_ROOM, Outcome, submit_groups
from ftslurm.scheduler.lost_arrays import find_lost, still_open
from ftslurm.scheduler.protocol import DOUBTFUL, JobState
from ftslurm.scheduler.sbatch import LimitError, NotReachedError, RefusedError, UnclearError
from ftslurm.sweep.look import ask


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
    layout: SweepLayout,
    numbers: Optional[Sequence[int]] = None,
    *,
    over: Collection[int] = (),
) -> Outcome:
    """`queue_tasks` of those that have never had a job."""
    return queue_tasks(
        layout,
        not_queued(layout, numbers),
        parallelism=read_sweep(layout).parallelism,
        over=over,
    )


def queue_tasks(
    layout: SweepLayout,
    tasks: Sequence[TaskRecord],
    *,
    parallelism: Optional[int],
    queued_by: str = BY_SUBMIT,
    alone: Mapping[int, Sequence[str]] = MappingProxyType({}),
    over: Collection[int] = (),
) -> Outcome:
    """Queue these tasks as arrays, group by group; those of `alone` each as a job of its own that
    is kept off the nodes named there, as an array has one list for all. `over`: tasks whose jobs
    are known to have ended.

    RunError for a sweep that was cancelled. SchedulerError: Slurm does not answer, nothing is
    queued; UnclearError of them: for one job or array nobody knows.
    """
    outcome = Outcome(arrays=find_lost(layout))
    unknown = still_open(layout)
    found = set(outcome.taken)
    ready = [task for task in tasks if task.number not in found and task.number not in unknown]
    outcome.left.update(
        {task.number: unknown[task.number] for task in tasks if task.number in unknown}
    )
    room = None
    if parallelism is not None:
        alive = _alive(layout, set(over) - found)
        room = room_beside(parallelism, read_arrays(layout), alive)
    singles = {task.number: alone[task.number] for task in ready if task.number in alone}
    room = _queue_singles(layout, singles, room, queued_by, outcome)
    together = [task for task in ready if task.number not in singles]
    submit_groups(layout, together, room=room, queued_by=queued_by, outcome=outcome)
    return outcome


def room_beside(parallelism: int, arrays: Sequence[ArrayRecord], alive: Iterable[str]) -> int:
    """How many more tasks may run at once, whatever these jobs do, one of each task, and arrays of
    which there is no answer yet: of an array no more run than it was given, and no more than are
    left of it."""
    limits = {array.array_id: array.at_once for array in arrays}
    jobs = Counter(job_id.partition("_")[0] for job_id in alive)
    running = sum(min(count, limits.get(name) or count) for name, count in jobs.items())
    running += sum(array.at_once or len(array.numbers) for array in unanswered(arrays))
    return max(0, parallelism - running)


def _alive(layout: SweepLayout, over: Collection[int]) -> list[str]:
    """Of each task that runs or may yet the job that does it first: others wait for that."""
    jobs = {
        task.number: jobs_on_record(layout.task(task.number), "slurm")
        for task in read_tasks(layout)
        if task.number not in over and not layout.task(task.number).done.exists()
    }
    if not any(one.ids for one in jobs.values()):
        return []
    alive = []
    for number, states in ask(layout, "slurm", jobs).items():
        oldest_first = reversed(jobs[number].ids)
        alive += [one for one in oldest_first if _may_run(states[one])][:1]
    return alive


def _may_run(state: JobState) -> bool:
    return not state.is_over or state.word in DOUBTFUL


def _queue_singles(
    layout: SweepLayout,
    excluded: Mapping[int, Sequence[str]],
    room: Optional[int],
    queued_by: str,
    outcome: Outcome,
) -> Optional[int]:
    """The room that is left then."""
    why = ""
    for number, names in excluded.items():
        why = why or (NO_ROOM if room == 0 else "")
        if why:
            outcome.leave([number], why)
            continue
        require_open(layout)
        try:
            job_id = submit_again(layout.task(number), "slurm", exclude=names)
        except LimitError:
            why = AT_LIMIT
        except (NotReachedError, UnclearError) as error:
            if not outcome.taken:
                raise
            why = str(error)
        except RefusedError as error:
            outcome.refuse([number], str(error))
            continue
        if why:
            outcome.leave([number], why)
            continue
        add_job(layout.task(number), job_id, scheduler="slurm", queued_by=queued_by)
        outcome.singles.append(number)
        room = room and room - 1
    return room
