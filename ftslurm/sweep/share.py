"""A sweep runs as many tasks at once as `parallelism` allows, though it is several arrays and each
knows only its own share: what an array that comes to its end leaves of its share is given to those
whose tasks wait for nothing else.

Shares are only ever raised, and by no more than is free whatever Slurm starts next; a task that is
DONE counts as over, though its job may take a second more to leave. The new share is on record
before Slurm is told, so others count with it. The caller holds the sweep's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_lock import is_closed
from ftslurm.run.sweep_record import (
    WIDENED,
    WIDENING,
    ArrayRecord,
    add_event,
    read_arrays,
    read_sweep,
)
from ftslurm.scheduler.throttle import run_at_once
from ftslurm.sweep.queue import alive_jobs, by_array, room_beside


def use_room(
    layout: SweepLayout,
    *,
    over: Collection[int] = (),
    tell_slurm: Callable[[str, int], None] = run_at_once,
) -> None:
    """Raise the shares of arrays by what is free. `over`: tasks whose jobs are known to have ended.
    Of a sweep that is cancelled nothing more is to start. SchedulerError: Slurm does not answer;
    the next one who looks tells it again."""
    parallelism = read_sweep(layout).parallelism
    if parallelism is None or is_closed(layout):
        return
    alive = alive_jobs(layout, over)
    for array in wider(parallelism, read_arrays(layout), alive):
        add_event(layout, WIDENING, array)
        tell_slurm(str(array.array_id), array.at_once or 0)
        add_event(layout, WIDENED, array)


def wider(
    parallelism: int, arrays: Sequence[ArrayRecord], alive: Iterable[str]
) -> list[ArrayRecord]:
    """Arrays with the shares that they are to have, of those whose share changes or of which Slurm
    may not have been told. `alive`: jobs, one of each task, the tasks that may yet run among them.
    """
    jobs = list(alive)
    room = room_beside(parallelism, arrays, jobs)
    newest = {array.array_id: array for array in arrays}
    found = []
    for name, (count, at_once) in by_array(arrays, jobs).items():
        more = min(room, count - at_once)
        room -= more
        array = newest.get(name)
        if array is not None and (more or array.event == WIDENING):
            found.append(replace(array, at_once=max(at_once + more, array.at_once or 0)))
    return found
