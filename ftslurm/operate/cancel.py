"""`ftslurm cancel RUN`: end a run's jobs now, without a save; `stop` is the kind way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Optional

from ftslurm.errors import SchedulerError
from ftslurm.operate.answer import Answer, add_json, finish, finish_sweep, parser
from ftslurm.operate.ending import end_jobs
from ftslurm.operate.standing import (
    OpenRun,
    Standing,
    elsewhere,
    open_run,
    require_its_cluster,
    require_own_jobs,
)
from ftslurm.operate.sweep_cancel import cancel_sweep
from ftslurm.operate.sweep_lost import require_known
from ftslurm.run.control import SAVE, STOP
from ftslurm.run.sweep_layout import find_sweep

_EPILOG = """examples:
  ftslurm cancel runs/gpt-20260301-120000-3f9a
  ftslurm cancel runs/SWEEP                      all its tasks, and no more are queued

What was trained since the newest committed step is lost, unless the ranks manage to save between
the scheduler's TERM and KILL. `ftslurm resume` lets the run go on from there; `ftslurm stop` loses
nothing. results: cancelled | done | not_running."""


def main(argv: Optional[list[str]] = None) -> int:
    made = parser("cancel", "End a run's jobs now, without a save.", _EPILOG, of_sweeps=True)
    add_json(made)
    options = made.parse_args(argv)
    sweep = find_sweep(options.run)
    if sweep is not None:
        return finish_sweep(cancel_sweep(sweep), sweep, as_json=options.json)
    run = open_run(options.run)
    return finish("cancel", cancel(run), run, as_json=options.json)


def cancel(run: OpenRun, *, sleep: Callable[[float], None] = time.sleep) -> Answer:
    require_known(run, "cancel")
    standing = run.look_twice(sleep)
    if standing.done:
        return Answer("done", "the run has finished; there is nothing to cancel")
    job_id = standing.job.job_id
    if standing.is_over:
        return Answer("not_running", f"the run is not running: {standing.why_over}", True, job_id)
    require_own_jobs(run, standing)
    if not standing.state.is_known:
        # The order to stop is left all the same.
        there = f"cancel it there; the order of `ftslurm stop {run.name}` reaches it from here"
        require_its_cluster(lambda: elsewhere(run), there)
    try:
        end_jobs(run, standing, sleep)
    except SchedulerError as error:
        raise SchedulerError(f"{error}; {_other_ways(run)}") from None
    run.control.take_away(SAVE)
    text = (
        f"job {job_id} is cancelled; {_lost(standing)}; `ftslurm resume {run.name}` lets it go on"
    )
    return Answer("cancelled", text, True, job_id)


def _other_ways(run: OpenRun) -> str:
    if run.control.is_given(STOP):
        return (
            "the order to stop is left, so the run saves and leaves at its next step; `ftslurm "
            f"resume {run.name}` withdraws it"
        )
    return (
        f"where you have no right on the job, `ftslurm stop {run.name}` or a file "
        f"`{run.record.run_id}.stop` in the run's recovery.control_dir ends it"
    )


def _lost(standing: Standing) -> str:
    progress = standing.progress
    if standing.is_program and standing.state.is_running:
        return "what the program has not saved is lost"
    if standing.state.is_waiting or progress is None:
        return "it was not training, nothing is lost"
    lost = progress.step - (progress.committed_step or 0)
    return f"{standing.step_words}, so up to {lost} steps are lost"
