"""A task of a sweep that Slurm was asked for, and of which nobody has written down the answer: who
wants to end it looks for its job first, and may be told that nobody knows yet."""

from __future__ import annotations

from ftslurm.errors import RunError, SchedulerError
from ftslurm.operate.standing import OpenRun, elsewhere
from ftslurm.recovery.on_record import ask_for_jobs
from ftslurm.run.control import STOP
from ftslurm.run.sweep_layout import find_sweep, parse_task_id
from ftslurm.run.sweep_lock import queueing
from ftslurm.scheduler.lost_arrays import find_lost, still_open

QUEUEING_S = 60.0
"""How long somebody who is queueing tasks is waited for: the answer to an sbatch."""


def require_known(run: OpenRun, verb: str) -> None:
    """What has been found is on record afterwards. SchedulerError: the run may get a job of which
    nobody can say just now; unless it is to pause, the order to stop is left for it."""
    why = "" if run.record.scheduler == "local" else _why_unknown(run)
    if not why or _is_alive(run):
        return
    then = f"`ftslurm {verb} {run.name}` again then"
    if verb != "pause":
        run.control.give(STOP)
        then = f"the order to stop is left, so it leaves at its first step; {then}"
    raise SchedulerError(f"nobody can say whether `{run.layout.root}` is alive: {why}; {then}")


def _why_unknown(run: OpenRun) -> str:
    """Empty: no answer is waited for."""
    task, sweep = parse_task_id(run.layout.root.name), find_sweep(str(run.layout.root.parent))
    if task is None or sweep is None or task[1] not in still_open(sweep):
        return ""
    try:
        why = elsewhere(run)
        if why:
            return why  # here there would be none, for good
        with queueing(sweep, wait_s=QUEUEING_S):
            find_lost(sweep)
    except (RunError, SchedulerError) as error:
        return str(error)
    return still_open(sweep).get(task[1], "")


def _is_alive(run: OpenRun) -> bool:
    _, states = ask_for_jobs(run.layout, run.scheduler)
    return any(not state.is_over for state in states.values())
