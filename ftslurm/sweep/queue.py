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

from ftslurm.errors import RunError
from ftslurm.files import is_listed
from ftslurm.recovery.on_record import jobs_on_record
from ftslurm.run.jobs import BY_SUBMIT, read_jobs
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_lock import require_open
from ftslurm.run.sweep_record import (
    ASKED,
    LEFT,
    ArrayRecord,
    TaskRecord,
    add_array,
    add_event,
    read_arrays,
    read_sweep,
    read_tasks,
    unanswered,
)
from ftslurm.scheduler.again import submit_again
from ftslurm.scheduler.arrays import (
    AT_LIMIT,
    NO_PLACE,
    NO_ROOM,
    Outcome,
    event_of,
    note_array,
    submit_groups,
)
from ftslurm.scheduler.lost_arrays import find_lost, still_open
from ftslurm.scheduler.protocol import DOUBTFUL, JobState
from ftslurm.scheduler.sbatch import (
    FullError,
    LimitError,
    NotReachedError,
    RefusedError,
    UnclearError,
)
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
    array_size: Optional[int] = None,
) -> Outcome:
    """Queue these tasks as arrays, group by group; those of `alone` each as a job of its own that
    is kept off the nodes named there, as an array has one list for all. `over`: tasks whose jobs
    are known to have ended. `array_size`: MaxArraySize; None: Slurm is asked.

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
        alive = alive_jobs(layout, set(over) - found)
        room = room_beside(parallelism, read_arrays(layout), alive)
    singles = [task for task in ready if task.number in alone]
    room = _queue_singles(layout, singles, alone, room, queued_by, outcome)
    together = [task for task in ready if task.number not in alone]
    if NO_PLACE in outcome.left.values():  # to ask again takes two minutes
        outcome.leave([task.number for task in together], NO_PLACE)
        return outcome
    submit_groups(
        layout, together, room=room, queued_by=queued_by, array_size=array_size, outcome=outcome
    )
    return outcome


def room_beside(parallelism: int, arrays: Sequence[ArrayRecord], alive: Iterable[str]) -> int:
    """How many more tasks may run at once, whatever these jobs do, one of each task, and arrays of
    which there is no answer yet: of an array no more run than it was given, and no more than are
    left of it."""
    running = sum(at_once for _, at_once in by_array(arrays, alive).values())
    running += sum(array.at_once or len(array.numbers) for array in unanswered(arrays))
    return max(0, parallelism - running)


def by_array(arrays: Sequence[ArrayRecord], alive: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Array, or job that is in none -> (how many of these jobs it has, how many of them may run at
    once)."""
    limits = {array.array_id: array.at_once for array in arrays}
    counts = Counter(job_id.partition("_")[0] for job_id in alive)
    return {name: (count, min(count, limits.get(name) or count)) for name, count in counts.items()}


def alive_jobs(layout: SweepLayout, over: Collection[int]) -> list[str]:
    """Of each task that runs or may yet the job that does it first: others wait for that. `over`:
    tasks whose jobs are known to have ended."""
    jobs = {
        task.number: jobs_on_record(layout.task(task.number), "slurm")
        for task in read_tasks(layout)
        if task.number not in over and not is_listed(layout.task(task.number).done)
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
    tasks: Sequence[TaskRecord],
    excluded: Mapping[int, Sequence[str]],
    room: Optional[int],
    queued_by: str,
    outcome: Outcome,
) -> Optional[int]:
    """The room that is left then."""
    why = ""
    for task in tasks:
        number = task.number
        why = why or (NO_ROOM if room == 0 else "")
        if why:
            outcome.leave([number], why)
            continue
        require_open(layout)
        try:
            queue_alone(layout, task, exclude=excluded[number], queued_by=queued_by)
        except LimitError as error:
            why = NO_PLACE if isinstance(error, FullError) else AT_LIMIT
        except (NotReachedError, UnclearError) as error:
            if not outcome.taken:
                raise
            why = str(error)
            if isinstance(error, UnclearError):  # it may run
                room = room and room - 1
        except RefusedError as error:
            outcome.refuse([number], str(error))
            continue
        if why:
            outcome.leave([number], why)
            continue
        outcome.singles.append(number)
        room = room and room - 1
    return room


def queue_alone(
    layout: SweepLayout, task: TaskRecord, *, exclude: Sequence[str], queued_by: str
) -> str:
    """The id of its job, in no array. RefusedError: it has certainly none; UnclearError: it may,
    and whoever queues next looks for it."""
    asked = add_array(layout, ASKED, task.group, [task.number], alone=True)
    try:
        job_id = submit_again(layout.task(task.number), "slurm", exclude=exclude)
    except RefusedError as error:
        add_event(layout, event_of(error), asked)
        raise
    except RunError:  # sbatch was not called
        add_event(layout, LEFT, asked)
        raise
    note_array(layout, asked, job_id, queued_by)
    return job_id
