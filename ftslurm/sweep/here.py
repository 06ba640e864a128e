"""Tasks of a sweep on this machine, so many at once and in their order, each to its end.

Starts and waits; how a task has ended is for others to tell. A task that is started goes on when
this process ends, those after it are not started then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ftslurm.run.jobs import add_job
from ftslurm.run.layout import RunLayout
from ftslurm.run.sweep_layout import SweepLayout
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
    sleep: Callable[[float], None] = time.sleep,
) -> list[int]:
    """Those that were started: on return each of them has ended, and the others were not started
    because somebody has cancelled the sweep. `start` gives the id of a run's job."""
    waiting, running = list(numbers), dict[int, tuple[str, float]]()
    begun: list[int] = []
    while True:
        if layout.closed.exists():
            waiting.clear()
        while waiting and len(running) < at_once:
            number = waiting.pop(0)
            run = layout.task(number)
            job_id = start(run)
            add_job(run, job_id, scheduler="local", queued_by=queued_by)
            running[number] = (job_id, time.monotonic())
            begun.append(number)
        if not running:
            return begun
        sleep(POLL_S)
        for number, (job_id, began_at) in list(running.items()):
            if _is_over(layout.task(number), job_id, began_at):
                del running[number]


def _is_over(run: RunLayout, job_id: str, began_at: float) -> bool:
    state = open_scheduler("local", run_dir=run.root).job_state(job_id)
    return state.is_ended or (not state.is_known and time.monotonic() - began_at > START_S)
