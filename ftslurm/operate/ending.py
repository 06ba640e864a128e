"""All jobs of a run are ended at a person's word: none trains on, and none is queued after them."""

from __future__ import annotations

import time
from collections.abc import Callable

from ftslurm.errors import SchedulerError
from ftslurm.operate.answer import tell
from ftslurm.operate.standing import OpenRun, Standing
from ftslurm.run.control import STOP

GONE_S = 5.0
"""How long a job that only waited is looked for after it was cancelled."""
POLL_S = 0.2


def end_jobs(run: OpenRun, standing: Standing, sleep: Callable[[float], None]) -> None:
    """SchedulerError: some job may be left, and so is the order to stop."""
    _order_to_stop(run)
    failed = []
    # Those behind first: they would start as soon as the job before them has ended.
    for job in (*standing.behind, standing.job):
        try:
            run.scheduler.cancel(job.job_id)
        except SchedulerError as error:
            failed.append(str(error))
    if failed:
        raise SchedulerError("; ".join(failed))
    deadline = time.monotonic() + GONE_S
    after = run.look()
    while after.state.is_waiting and time.monotonic() < deadline:
        sleep(POLL_S)
        after = run.look()
    # While a batch script is left, the order is its to find, and to take away.
    if after.is_over and not after.is_doubtful:
        run.control.take_away_leaving()


def _order_to_stop(run: OpenRun) -> None:
    """Without accounting the batch script cannot tell a cancelled job from one that was preempted,
    and would queue the run's next job."""
    try:
        run.control.give(STOP)
    except OSError as error:
        tell(
            f"the order to stop could not be left ({error}); look with squeue that no job of "
            f"{run.record.run_id} is queued afterwards"
        )
