"""`ftslurm stop RUN` and `ftslurm pause RUN`: a run saves, leaves and waits for `ftslurm resume`.

A run that trains is given the order as a file and obeys at a step boundary. One whose job only
waits has nothing to save: its job is cancelled, or held.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Optional

from ftslurm.errors import RunError, SchedulerError, UsageError
from ftslurm.operate.answer import Answer, add_json, finish, finish_sweep, parser, tell
from ftslurm.operate.ending import end_jobs
from ftslurm.operate.standing import OpenRun, Standing, open_run, require_own_jobs
from ftslurm.operate.sweep_cancel import stop_sweep
from ftslurm.operate.sweep_lost import require_known
from ftslurm.run.control import LOOK_INTERVAL_S, PAUSE, STOP
from ftslurm.run.sweep_layout import find_sweep
from ftslurm.scheduler.protocol import SECOND_LOOK_S

POLL_S = 1.0
LONGEST_POLL_S = 10.0
BACK_OFF = 1.2

_STOP_EPILOG = """examples:
  ftslurm stop runs/gpt-20260301-120000-3f9a --wait
  ftslurm stop runs/SWEEP                        all its tasks, and no more are queued
  ftslurm resume runs/gpt-20260301-120000-3f9a

The save has no deadline. results: ordered | stopped | cancelled (the job was only queued) | done |
not_running | ended (it ended of itself before the order took effect). Without a right on the run
directory, leave an empty file RUN_ID.stop in the run's recovery.control_dir."""
_PAUSE_EPILOG = """examples:
  ftslurm pause runs/gpt-20260301-120000-3f9a --wait
  ftslurm resume runs/gpt-20260301-120000-3f9a

The run keeps its job: saved, queued again and held. results: ordered | paused | done | ended.
Without a right on the run directory, leave an empty file RUN_ID.pause in the run's
recovery.control_dir."""


def stop_main(argv: Optional[list[str]] = None) -> int:
    return _main(argv, STOP, "Have a run save and leave for good.", _STOP_EPILOG)


def pause_main(argv: Optional[list[str]] = None) -> int:
    return _main(argv, PAUSE, "Have a run save and leave, its job queued and held.", _PAUSE_EPILOG)


def _main(argv: Optional[list[str]], order: str, description: str, epilog: str) -> int:
    made = parser(order, description, epilog, of_sweeps=order == STOP)
    made.add_argument("--wait", action="store_true", help="until it is so")
    add_json(made)
    options = made.parse_args(argv)
    sweep = find_sweep(options.run)
    if sweep is not None:
        if order == PAUSE:
            raise UsageError(
                f"`{options.run}` is a sweep, and only a run keeps its job while it pauses: "
                f"`ftslurm stop {options.run}` has all its tasks save and leave, `ftslurm resume "
                f"{options.run}` queues them again, and `ftslurm pause` takes a task, e.g. "
                f"`{sweep.task(0).root}`"
            )
        if options.wait:
            raise UsageError("--wait is of one run; look with `ftslurm status SWEEP`")
        return finish_sweep(stop_sweep(sweep), sweep, as_json=options.json)
    run = open_run(options.run)
    answer = leave(run, order)
    if options.wait and answer.result == "ordered":
        tell(answer.text)
        answer = wait_until_left(run, order)
    return finish(order, answer, run, as_json=options.json)


def leave(run: OpenRun, order: str, *, sleep: Callable[[float], None] = time.sleep) -> Answer:
    """Give the order, or do to a queued job what it asks for."""
    require_known(run, order)
    standing = run.look()
    if standing.done:
        return _done(standing, order)
    if standing.is_over and not standing.is_doubtful:
        return _not_running(standing, order)
    if standing.state.is_waiting:
        return _leave_queue(run, standing, order, sleep)
    return _ordered(run, standing, order)


def wait_until_left(
    run: OpenRun, order: str, *, sleep: Callable[[float], None] = time.sleep
) -> Answer:
    """Tell how far the run is until it has left."""
    said, poll_s, looks_over = "", POLL_S, 0
    while True:
        standing = run.look()
        if standing.done:
            return _done(standing, order)
        if standing.state.is_waiting:
            return _leave_queue(run, standing, order, sleep)
        looks_over = looks_over + 1 if standing.is_over else 0
        if looks_over > 1 or (looks_over and _has_obeyed(standing)):
            return _left(run, standing, order)
        news = standing.step_words
        if not standing.is_program:
            news += f", {standing.progress.phase if standing.progress else 'starting'}"
        if news != said:
            tell(news)
        said = news
        sleep(SECOND_LOOK_S if standing.is_doubtful else poll_s)
        poll_s = min(LONGEST_POLL_S, BACK_OFF * poll_s)


def _ordered(run: OpenRun, standing: Standing, order: str) -> Answer:
    place = run.control.give(order)
    state = standing.state
    known = f"job {standing.job.job_id} is {state.word}"
    if not state.is_known:
        known = f"nobody can say how job {standing.job.job_id} stands ({state.reason})"
    when = f"rank 0 looks every {LOOK_INTERVAL_S:g} s, all ranks save and leave"
    if not state.is_running:
        when = "if the job runs or comes back, all ranks save and leave at the first step"
    return Answer(
        "ordered",
        f"{known}; the order is `{place}`: {when}; {standing.step_words}",
        True,
        standing.job.job_id,
    )


def _leave_queue(
    run: OpenRun, standing: Standing, order: str, sleep: Callable[[float], None]
) -> Answer:
    require_own_jobs(run, standing)
    job_id = standing.job.job_id
    try:
        if order == STOP:
            return _cancel_queued(run, standing, sleep)
        if not standing.state.is_held:
            run.scheduler.hold(job_id)
    except SchedulerError as error:
        place = run.control.give(order)
        return Answer(
            "ordered",
            f"job {job_id} waits and could not be taken ({error}); the order is `{place}` instead, "
            "the run obeys at the first step when it starts",
            True,
            job_id,
        )
    if run.look().state.is_running:  # it began before it could be held
        return _ordered(run, standing, order)
    run.control.take_away(PAUSE)
    text = f"job {job_id} is queued and held; `ftslurm resume {run.name}` lets it go on"
    return Answer("paused", f"{text}; {standing.step_words}", True, job_id)


def _cancel_queued(run: OpenRun, standing: Standing, sleep: Callable[[float], None]) -> Answer:
    end_jobs(run, standing, sleep)
    return Answer(
        "cancelled",
        f"job {standing.job.job_id} was only queued and is cancelled; `ftslurm resume {run.name}` "
        f"queues the run again; {standing.step_words}",
        True,
        standing.job.job_id,
    )


def _done(standing: Standing, order: str) -> Answer:
    return Answer("done", f"the run has finished; there is nothing to {order}", order == STOP)


def _not_running(standing: Standing, order: str) -> Answer:
    if order == PAUSE:
        raise RunError(
            f"the run is not running and has no job to hold ({standing.why_over}); `ftslurm "
            "resume` lets it go on"
        )
    return Answer(
        "not_running", f"the run is not running: {standing.why_over}", True, standing.job.job_id
    )


def _left(run: OpenRun, standing: Standing, order: str) -> Answer:
    job_id = standing.job.job_id
    if _has_obeyed(standing):
        return Answer("stopped", f"{standing.why_over}; {standing.step_words}", True, job_id)
    run.control.take_away(order)
    return Answer(
        "ended",
        f"the run has ended before the order took effect, which is taken back: "
        f"{standing.why_over}; {standing.step_words}",
        False,
        job_id,
    )


def _has_obeyed(standing: Standing) -> bool:
    return standing.outcome is not None and standing.outcome.order is not None
