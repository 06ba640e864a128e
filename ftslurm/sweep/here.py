"""Tasks of a sweep on this machine, so many at once and in their order, each to its end.

Starts, waits and counts; why a task has failed is for others to tell. A task that is started goes
on when this process ends, those after it are not started then. Whether somebody has cancelled the
sweep is looked for before each start and after it: a task that came in between is ended.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from ftslurm.files import is_listed
from ftslurm.run.control import STOP, ControlFiles
from ftslurm.run.jobs import add_job
from ftslurm.run.layout import RunLayout
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_lock import is_closed
from ftslurm.scheduler import open_scheduler

POLL_S = 0.2
START_S = 60.0
"""A job that has not begun by then never will."""


def run_here(
    layout: SweepLayout,
    numbers: Sequence[int],
    *,
    at_once: int,
    start: Callable[[RunLayout], str],
    queued_by: str,
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> list[int]:
    """Those that were started: on return each of them has ended, and the others were not started
    because somebody has cancelled the sweep. `start` gives the id of a run's job."""
    waiting, running = list(numbers), dict[int, tuple[str, float]]()
    begun: list[int] = []
    done = failed = 0
    while True:
        while _may_go_on(layout, waiting) and len(running) < at_once:
            number = waiting.pop(0)
            run = layout.task(number)
            job_id = start(run)
            add_job(run, job_id, scheduler="local", queued_by=queued_by)
            running[number] = (job_id, time.monotonic())
            begun.append(number)
            if _is_closed(layout):  # who cancelled it has not seen this one
                ControlFiles(run, run.root.name).give(STOP)
                open_scheduler("local", run_dir=run.root).cancel(job_id)
        if not running:
            return begun
        sleep(POLL_S)
        for number, (job_id, began_at) in list(running.items()):
            run = layout.task(number)
            try:
                if not _is_over(run, job_id, began_at):
                    continue
                is_done = is_listed(run.done)
            except OSError:  # the next look tells
                continue
            del running[number]
            done, failed = (done + 1, failed) if is_done else (done, failed + 1)
            told = f"{len(running)} running, {len(waiting)} waiting, {failed} failed"
            say(f"{done} of {len(numbers)} done, {told}")


def _may_go_on(layout: SweepLayout, waiting: list[int]) -> bool:
    """Whether another is to be started; once the sweep is cancelled none waits."""
    if waiting and _is_closed(layout):
        waiting.clear()
    return bool(waiting)


def _is_closed(layout: SweepLayout) -> bool:
    """Where that cannot be told just now, the next look tells."""
    with contextlib.suppress(OSError):
        return is_closed(layout)
    return False


def _is_over(run: RunLayout, job_id: str, began_at: float) -> bool:
    state = open_scheduler("local", run_dir=run.root).job_state(job_id)
    return state.is_ended or (not state.is_known and time.monotonic() - began_at > START_S)
