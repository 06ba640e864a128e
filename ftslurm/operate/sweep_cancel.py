"""A sweep is cancelled or stopped: first nothing of it is queued any more, then its jobs end.

The sweep is closed, so that whoever submits or follows it queues nothing more, and every task that
is not over is ordered to stop, so that no batch script queues it again. Only then is the scheduler
asked, in one call for all of them. `ftslurm resume SWEEP` opens the sweep again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ftslurm.errors import FtslurmError, RunError, SchedulerError
from ftslurm.operate.answer import Answer, counted, tell
from ftslurm.operate.standing import require_its_cluster, sweep_elsewhere
from ftslurm.run.acts import note_act
from ftslurm.run.control import SAVE, STOP, ControlFiles
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_lock import queueing
from ftslurm.run.sweep_record import PROGRAM, read_sweep
from ftslurm.scheduler import open_scheduler
from ftslurm.scheduler.lost_arrays import find_lost, find_singles, still_open
from ftslurm.scheduler.whose import jobs_of_others, marks_of_sweep
from ftslurm.sweep.look import (
    ALIVE,
    DONE,
    NOBODY_KNOWS,
    RUNNING,
    SweepLook,
    TaskLook,
    look,
    look_twice,
)

QUEUEING_S = 60.0
"""How long somebody who is queueing tasks is waited for: the answer to an sbatch."""
STARTED_S = 1.0
"""Within it a task that was being started on this machine is on record."""
GONE_S = 10.0
"""How long jobs that only waited are looked for after they were cancelled."""
POLL_S = 1.0


def cancel_sweep(layout: SweepLayout, *, sleep: Callable[[float], None] = time.sleep) -> Answer:
    require_its_cluster(lambda: sweep_elsewhere(layout), "do it there")
    before = _close(layout, sleep)
    live, unknown = _order_to_stop(layout, before)
    if not live:
        return _nothing(before)
    error = _end_jobs(layout, before, live, only_waiting=False)
    after = _until_gone(layout, live, sleep)
    left = [task for task in after.of(*ALIVE, NOBODY_KNOWS) if task.alive and not _ends(task)]
    if left:
        unseen = next((task.reason for task in left if task.state == NOBODY_KNOWS), "")
        raise SchedulerError(
            f"{counted(len(left), 'tasks are')} {'perhaps ' if unseen else ''}still alive "
            f"({_names(left)}): {error or unseen or 'Slurm has not ended them yet'}; the order to "
            "stop is left, so they save and leave at their next step"
        )
    _tidy(layout, after, live)
    _note(layout, live, "cancel")
    told = [
        f"{counted(len(live), 'tasks are cancelled')}, {counted(before.counts[DONE], 'were done')}",
        unknown,
        f"`ftslurm resume {layout.root}` lets the others go on, each from what it has committed",
    ]
    return Answer("cancelled", "; ".join(filter(None, told)), not unknown)


def stop_sweep(layout: SweepLayout, *, sleep: Callable[[float], None] = time.sleep) -> Answer:
    require_its_cluster(lambda: sweep_elsewhere(layout), "do it there")
    before = _close(layout, sleep)
    live, unknown = _order_to_stop(layout, before)
    if not live:
        return _nothing(before)
    waiting = [task for task in live if task.state != RUNNING]
    error = _end_jobs(layout, before, waiting, only_waiting=True)
    after = _until_gone(layout, waiting, sleep)
    over = {task.number for task in after.tasks if not task.alive}
    gone = [task for task in waiting if task.number in over]
    _tidy(layout, after, gone)
    _note(layout, gone, "stop")
    running = len(live) - len(gone)
    note = f" (of those that wait some could not be cancelled: {error})" if error else ""
    told = [
        f"{counted(running, 'tasks are ordered')} to save and leave at the next step, {len(gone)} "
        f"only waited, now cancelled{note}",
        unknown,
        f"`ftslurm resume {layout.root}` lets them go on",
    ]
    text = "; ".join(filter(None, told))
    return Answer("ordered" if running else "stopped", text, not unknown)


def save_sweep(layout: SweepLayout) -> Answer:
    if read_sweep(layout).kind == PROGRAM:
        raise RunError(
            f"the tasks of `{layout.root}` are calls of a program, which saves when it sees fit"
        )
    running = look(layout).of(RUNNING)
    if not running:
        raise RunError(f"no task of `{layout.root}` is running; what is committed is kept")
    for task in running:
        _control(layout, task).give(SAVE)
    return Answer(
        "ordered",
        f"{counted(len(running), 'running tasks save')} at the next step and go on; see the logs",
    )


def _close(layout: SweepLayout, sleep: Callable[[float], None]) -> SweepLook:
    """From now on nobody queues a task; how the sweep stands then."""
    layout.closed.touch()
    if read_sweep(layout).scheduler == "local":
        sleep(STARTED_S)  # whoever runs it here looks for that file before each task and after it
        return look(layout)
    try:
        with queueing(layout, wait_s=QUEUEING_S):
            layout.closed.touch()  # a resume that was starting has taken it away
            find_lost(layout)
            find_singles(layout)
    except RunError as error:
        layout.closed.touch()
        tell(f"{error}; what it queues meanwhile may be missed: look with `ftslurm status`")
    except SchedulerError as error:
        tell(f"a job may have been queued of which nobody knows: {error}")
    return look_twice(layout, sleep)


def _order_to_stop(layout: SweepLayout, before: SweepLook) -> tuple[list[TaskLook], str]:
    """Those that are not over, and what to say of those that may have a job which nobody can name;
    these are ordered to stop as well."""
    live = [task for task in before.of(*ALIVE, NOBODY_KNOWS) if task.alive]
    lost = still_open(layout)
    unknown = [
        task
        for task in before.tasks
        if not task.alive and (task.state == NOBODY_KNOWS or task.number in lost)
    ]
    failed = []
    for task in (*live, *unknown):
        try:
            _control(layout, task).give(STOP)
        except OSError as error:
            failed.append(f"{task.number} ({error})")
    if failed:
        tell(
            f"the order to stop could not be left for tasks {', '.join(failed[:5])}; look with "
            "`ftslurm status` that none is queued afterwards"
        )
    if unknown and not live:
        raise SchedulerError(_nobody_knows(unknown, lost))
    return live, _nobody_knows(unknown, lost)


def _nobody_knows(tasks: Sequence[TaskLook], lost: Mapping[int, str]) -> str:
    """What to say of these; empty: there are none."""
    if not tasks:
        return ""
    why = next(iter(lost.values()), "Slurm does not answer")
    return (
        f"nobody can say whether {counted(len(tasks), 'tasks are')} alive ({_names(tasks)}): "
        f"{why}; the order to stop is left, cancel again then"
    )


def _end_jobs(
    layout: SweepLayout, before: SweepLook, tasks: Sequence[TaskLook], *, only_waiting: bool
) -> str:
    """What the scheduler had against it; empty: nothing. Of what it said an end that came before
    the cancel is a part, so the next look counts."""
    if before.record.scheduler == "local":
        for task in tasks:
            scheduler = open_scheduler("local", run_dir=layout.task(task.number).root)
            scheduler.cancel_all(task.alive, only_waiting=only_waiting)
        return ""
    try:
        named, others = _own_jobs(layout, tasks)
        scheduler = open_scheduler(before.record.scheduler)
        scheduler.cancel_all(named, only_waiting=only_waiting)
    except SchedulerError as error:
        return str(error)
    return others


def _own_jobs(layout: SweepLayout, tasks: Sequence[TaskLook]) -> tuple[list[str], str]:
    """What to name, and what to say of numbers that are other jobs' by now."""
    names = jobs_to_name(tasks)
    if not names:
        return [], ""
    try:
        marks = marks_of_sweep(layout, {task.number: task.group for task in tasks})
    except (FtslurmError, OSError) as error:  # what is damaged is to be ended all the same
        tell(f"whether the jobs are the sweep's is not looked at: {error}")
        return names, ""
    others = jobs_of_others(names, marks)
    return [job_id for job_id in names if job_id not in others], next(iter(others.values()), "")


def jobs_to_name(tasks: Sequence[TaskLook]) -> list[str]:
    """Successors first, they would start when the job before them has ended; then arrays, whole:
    all that is in one is of this sweep, and what has ended of it is left alone by Slurm."""
    jobs = [job_id for task in tasks for job_id in task.alive]
    single = [job_id for job_id in jobs if "_" not in job_id]
    arrays = dict.fromkeys(job_id.partition("_")[0] for job_id in jobs if "_" in job_id)
    return [*single, *arrays]


def _until_gone(
    layout: SweepLayout, tasks: Sequence[TaskLook], sleep: Callable[[float], None]
) -> SweepLook:
    numbers = {task.number for task in tasks}
    deadline = time.monotonic() + GONE_S
    while True:
        after = look(layout)
        left = [task for task in after.tasks if task.number in numbers and task.alive]
        if not [task for task in left if not _ends(task)] or time.monotonic() > deadline:
            return after
        sleep(POLL_S)


def _ends(task: TaskLook) -> bool:
    """Is being torn down."""
    return task.job == "COMPLETING"


def _tidy(layout: SweepLayout, after: SweepLook, tasks: Sequence[TaskLook]) -> None:
    """While a batch script is left, the order is its to find, and to take away."""
    numbers = {task.number for task in tasks}
    for task in after.tasks:
        if task.number in numbers and not task.alive:
            control = _control(layout, task)
            control.take_away_leaving()
            control.take_away(SAVE)


def _note(layout: SweepLayout, tasks: Sequence[TaskLook], verb: str) -> None:
    for task in tasks:
        note_act(layout.task(task.number), verb, "cancelled", task.job_id)


def _control(layout: SweepLayout, task: TaskLook) -> ControlFiles:
    """In the run directory: what lies in a recovery.control_dir is that of whoever put it there."""
    return ControlFiles(layout.task(task.number), task.run_id)


def _nothing(before: SweepLook) -> Answer:
    counts = before.counts
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    is_done = counts[DONE] == len(before.tasks)
    return Answer(
        "done" if is_done else "not_running",
        f"no task is alive ({told or 'it has no tasks'}), and none is queued any more",
    )


def _names(tasks: Sequence[TaskLook]) -> str:
    some = ", ".join(task.run_id for task in tasks[:5])
    return some if len(tasks) <= 5 else f"{some} and {len(tasks) - 5} more"
