"""`ftslurm cancel RUN`: end a run's jobs now, without a save; `stop` is the kind way."""

from __future__ import annotations

from typing import Optional

from ftslurm.errors import SchedulerError
from ftslurm.operate.answer import Answer, add_json, finish, parser
from ftslurm.operate.standing import OpenRun, Standing, open_run
from ftslurm.run.control import ORDERS

_EPILOG = """examples:
  ftslurm cancel runs/gpt-20260301-120000-3f9a

What was trained since the newest committed step is lost, unless the ranks manage to save between
the scheduler's TERM and KILL. `ftslurm resume` lets the run go on from there; `ftslurm stop` loses
nothing. results: cancelled | done | not_running."""


def main(argv: Optional[list[str]] = None) -> int:
    made = parser("cancel", "End a run's jobs now, without a save.", _EPILOG)
    add_json(made)
    options = made.parse_args(argv)
    run = open_run(options.run)
    return finish("cancel", cancel(run), run, as_json=options.json)


def cancel(run: OpenRun) -> Answer:
    standing = run.look()
    if standing.done:
        return Answer("done", "the run has finished; there is nothing to cancel")
    job_id = standing.job.job_id
    if standing.is_over:
        return Answer("not_running", f"the run is not running: {standing.why_over}", True, job_id)
    # The successor first: it would start as soon as the job before it has ended.
    for job in (standing.successor, standing.job):
        if job is not None:
            _cancel(run, job.job_id)
    for order in ORDERS:
        run.control.take_away(order)
    text = (
        f"job {job_id} is cancelled; {_lost(standing)}; `ftslurm resume {run.name}` lets it go on"
    )
    return Answer("cancelled", text, True, job_id)


def _cancel(run: OpenRun, job_id: str) -> None:
    try:
        run.scheduler.cancel(job_id)
    except SchedulerError as error:
        raise SchedulerError(
            f"{error}; where you have no right on the job, `ftslurm stop {run.name}` or a file "
            f"`{run.record.run_id}.stop` in the run's recovery.control_dir ends it"
        ) from None


def _lost(standing: Standing) -> str:
    progress = standing.progress
    if standing.is_program and standing.state.is_running:
        return "what the program has not saved is lost"
    if standing.state.is_waiting or progress is None:
        return "it was not training, nothing is lost"
    lost = progress.step - (progress.committed_step or 0)
    return f"{standing.step_words}, so up to {lost} steps are lost"
