"""Where the tasks of a sweep stand: their folders' word and the scheduler's, looked at once.

Reads only. The scheduler is asked once for all tasks; of a task that is DONE it is not asked. A
thousand tasks are a handful of small files each, so what is large is not opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Optional

from ftslurm.errors import FormatError
from ftslurm.files import list_folder
from ftslurm.recovery.actions import PAUSED, STOP
from ftslurm.recovery.ending import View
from ftslurm.recovery.job_meant import JobsOnRecord
from ftslurm.recovery.on_record import jobs_on_record
from ftslurm.recovery.view import read_view
from ftslurm.run.acts import newest_act
from ftslurm.run.attempts import Progress, read_progress
from ftslurm.run.layout import RunLayout
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import (
    SweepRecord,
    TaskRecord,
    read_arrays,
    read_sweep,
    read_tasks,
    unanswered,
)
from ftslurm.run.value import read_value
from ftslurm.scheduler import open_scheduler
from ftslurm.scheduler.protocol import DOUBTFUL, SECOND_LOOK_S, JobState

# TaskLook.state
DONE = "done"
RUNNING = "running"
WAITING = "waiting"
HELD = "held"
ON_PAUSE = "paused"
FAILED = "failed"
STOPPED = "stopped"
CANCELLED = "cancelled"
NOT_QUEUED = "not queued"
NOBODY_KNOWS = "unknown"
STATES = (DONE, RUNNING, WAITING, HELD, ON_PAUSE, STOPPED, CANCELLED, FAILED, NOT_QUEUED,
          NOBODY_KNOWS)  # fmt: skip
ALIVE = (RUNNING, WAITING, HELD, ON_PAUSE)
OVER = (STOPPED, CANCELLED, FAILED)


@dataclass(frozen=True)
class TaskLook:
    """A task as it stands."""

    number: int
    run_id: str
    overrides: tuple[str, ...]
    group: int
    state: str
    """A word of STATES."""
    reason: str
    """Why it waits or has failed; empty: nothing to say."""
    job_id: Optional[str]
    """The one that is meant (recovery/job_meant.py); None: it has none yet."""
    job: str
    """The scheduler's word for that job; empty: it was not asked."""
    alive: tuple[str, ...]
    """Jobs of it that have not ended, the newest first."""
    leaves: bool
    """It runs, and its batch script has decided that it ends."""
    attempts: int
    step: Optional[int]
    steps: Optional[int]
    committed_step: Optional[int]
    value: Any
    """What it came to; None: not done, or it has none."""
    log: str
    """Where to read on, relative to the sweep's folder."""


@dataclass(frozen=True)
class SweepLook:
    """A sweep as it stands."""

    record: SweepRecord
    tasks: tuple[TaskLook, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Of each word of STATES, zeros too."""
        counts = dict.fromkeys(STATES, 0)
        for task in self.tasks:
            counts[task.state] += 1
        return counts

    def of(self, *states: str) -> list[TaskLook]:
        return [task for task in self.tasks if task.state in states]


def look_twice(layout: SweepLayout, sleep: Callable[[float], None]) -> SweepLook:
    """As `look`, and once more where a task's end cannot be believed yet: Slurm may queue a job
    again a moment after it has called it so."""
    seen = look(layout)
    if any(task.job in DOUBTFUL for task in seen.tasks):
        sleep(SECOND_LOOK_S)
        seen = look(layout)
    return seen


def look(layout: SweepLayout) -> SweepLook:
    record = read_sweep(layout)
    tasks = read_tasks(layout)
    names = {task.number: _names(layout.task(task.number)) for task in tasks}
    jobs = {
        task.number: jobs_on_record(layout.task(task.number), record.scheduler)
        for task in tasks
        if "DONE" not in names[task.number]
    }
    # The jobs are asked before the other files: what they wrote last is then seen with their end.
    states = ask(layout, record.scheduler, jobs)
    successors = _come_since(layout, record.scheduler, jobs, states)
    if successors:
        jobs.update(successors)
        states.update(ask(layout, record.scheduler, successors))
    arrays = unanswered(read_arrays(layout))
    asked = {number for array in arrays for number in array.numbers}
    return SweepLook(
        record,
        tuple(
            _look_done(layout, task)
            if "DONE" in names[task.number]
            else _look(
                layout,
                task,
                jobs[task.number],
                states[task.number],
                is_frozen="run.json" in names[task.number],
                is_asked=task.number in asked,
            )
            for task in tasks
        ),
    )


def ask(
    layout: SweepLayout, scheduler: str, jobs: Mapping[int, JobsOnRecord]
) -> dict[int, dict[str, JobState]]:
    """Task -> job -> state. A job on this machine is known by its run directory alone."""
    if scheduler == "local":
        return {
            number: open_scheduler("local", run_dir=layout.task(number).root).job_states(one.ids)
            for number, one in jobs.items()
        }
    together = [job_id for one in jobs.values() for job_id in one.ids]
    states = open_scheduler(scheduler).job_states(together)
    return {number: {job_id: states[job_id] for job_id in one.ids} for number, one in jobs.items()}


def _come_since(
    layout: SweepLayout,
    scheduler: str,
    jobs: Mapping[int, JobsOnRecord],
    states: Mapping[int, Mapping[str, JobState]],
) -> dict[int, JobsOnRecord]:
    """Of tasks that look over, but have a job that came on record while the others were asked for:
    a job may queue its successor as it ends."""
    found = {}
    for number, before in jobs.items():
        if before.jobs and all(state.is_over for state in states[number].values()):
            now = jobs_on_record(layout.task(number), scheduler)
            if set(now.ids) - set(before.ids):
                found[number] = now
    return found


def _names(layout: RunLayout) -> list[str]:
    """Listed afresh: a name that was missed once may stay away for a minute (nfs(5))."""
    try:
        return list_folder(layout.root)
    except FileNotFoundError:
        return []


def _look_done(layout: SweepLayout, task: TaskRecord) -> TaskLook:
    run = layout.task(task.number)
    view = read_view(run, JobsOnRecord(), {}, whole=False)
    value = None
    try:
        value = read_value(run)
    except FormatError as error:
        return _told(layout, task, view, DONE, f"its value cannot be read: {error}")
    return _told(layout, task, view, DONE, "", value=value)


def _look(
    layout: SweepLayout,
    task: TaskRecord,
    jobs: JobsOnRecord,
    states: Mapping[str, JobState],
    *,
    is_frozen: bool,
    is_asked: bool,
) -> TaskLook:
    run = layout.task(task.number)
    view = read_view(run, jobs, states, whole=False)
    if view.done:
        return _look_done(layout, task)
    if view.job_id and not (is_asked and view.job.is_over):
        state, why = judge(view, _was_cancelled(run, view))
    elif not is_frozen:
        state, why = NOT_QUEUED, "its folder is gone or not whole; submit it anew"
    elif is_asked:
        state, why = (
            NOBODY_KNOWS,
            "Slurm was asked for it, no answer is on record; resume looks for it",
        )
    else:
        state, why = NOT_QUEUED, ""
    return _told(layout, task, view, state, why)


def judge(view: View, was_cancelled: bool) -> tuple[str, str]:
    """(state, reason) of a run that is not DONE and has a job."""
    job, decision = view.job, view.latest.decision if view.latest else None
    reason = str((decision or {}).get("reason") or "")
    if job.is_held:
        why = reason if view.has_stopped else job.reason or job.word
        return (ON_PAUSE, "") if view.action == PAUSED else (HELD, why)
    if job.is_waiting:
        return WAITING, job.reason
    if job.is_running or job.is_ending:
        return RUNNING, "" if job.is_running else job.word
    if not job.is_over:
        return NOBODY_KNOWS, job.reason
    if was_cancelled:
        return CANCELLED, reason
    if view.has_stopped:
        return FAILED if view.action == STOP else STOPPED, reason
    if job.word == "CANCELLED":
        return CANCELLED, reason
    word = job.word if job.is_known else "no longer known to the scheduler"
    return FAILED, f"its job is {word}{', after: ' + reason if reason else ''}"


def _was_cancelled(run: RunLayout, view: View) -> bool:
    if not view.job.is_over:
        return False
    # What its batch script has decided is by the order to stop, which `cancel` leaves first.
    act = newest_act(run)
    return act is not None and act.result == "cancelled"


def _told(
    layout: SweepLayout,
    task: TaskRecord,
    view: View,
    state: str,
    reason: str,
    *,
    value: Any = None,
) -> TaskLook:
    run = layout.task(task.number)
    progress = _progress(run, view)
    return TaskLook(
        number=task.number,
        run_id=task.run_id,
        overrides=task.overrides,
        group=task.group,
        state=state,
        reason=reason,
        job_id=view.job_id or None,
        job=view.job.word if view.job_id else "",
        alive=view.alive,
        leaves=state == RUNNING and view.has_stopped,
        attempts=len(view.attempts),
        step=progress.step if progress else None,
        steps=progress.steps if progress else None,
        committed_step=progress.committed_step if progress else None,
        value=value,
        log=log_of(layout, task.number, view),
    )


def _progress(run: RunLayout, view: View) -> Optional[Progress]:
    """Of the newest attempt that has trained."""
    for attempt in reversed(view.attempts):
        progress = attempt.progress or read_progress(run.attempt(attempt.number))
        if progress is not None:
            return progress
    return None


def log_of(layout: SweepLayout, number: int, view: View) -> str:
    """The ranks' logs of the newest attempt; of a task that never began, its batch script's."""
    run = layout.task(number)
    if view.latest is not None:
        return str(run.attempt(view.latest.number).logs.relative_to(layout.root))
    name = f"{view.job_id}.out" if view.job_id else ""
    return str((run.submit / name).relative_to(layout.root))
