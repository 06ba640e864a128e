"""`ftslurm resume RUN`: a run that was stopped, paused or cancelled, or that has ended, goes on.

There is never a second job beside one that is alive: a held job is released, and only when the
scheduler says that no job of the run is left is the run's own frozen command run again. Where
nobody can say, nothing is done. Orders to stop or pause are withdrawn.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from typing import Optional

from ftslurm.errors import RunError, SchedulerError
from ftslurm.operate.answer import Answer, add_json, finish, parser, tell
from ftslurm.operate.standing import OpenRun, Standing, open_run
from ftslurm.recovery.policy import ENDED, STOP
from ftslurm.run.jobs import BY_BATCH, BY_PERSON, add_job, read_jobs
from ftslurm.run.layout import RunLayout
from ftslurm.run.trust import require_own
from ftslurm.scheduler.again import submit_again

ENDING_S = 90.0
"""How long a job that is being torn down is waited for: KillWait and all epilogs."""
SECOND_LOOK_S = 5.0
POLL_S = 2.0
HASTEN_S = 10.0
HASTEN_POLL_S = 0.5

_EPILOG = """examples:
  ftslurm resume runs/gpt-20260301-120000-3f9a
  ftslurm resume runs/gpt-20260301-120000-3f9a --json

The run goes on from its newest verified checkpoint, with its code and configuration as frozen.
results: queued (a new job) | released | waiting (it is queued already) | running."""

# Slurm may queue a job again a moment after it has called it so.
_DOUBTFUL = ("NODE_FAIL", "PREEMPTED")


def main(argv: Optional[list[str]] = None) -> int:
    made = parser("resume", "Let a stopped, paused, cancelled or failed run go on.", _EPILOG)
    add_json(made)
    options = made.parse_args(argv)
    run = open_run(options.run)
    return finish("resume", resume(run), run, as_json=options.json)


def resume(run: OpenRun, *, sleep: Callable[[float], None] = time.sleep) -> Answer:
    require_own(run.layout)
    with _alone(run.layout):
        standing = _settled(run, sleep)
        if standing.done:
            raise RunError("the run has finished; for more steps submit a new run")
        job_id, state = standing.job.job_id, standing.state
        if not (standing.is_over or state.is_known):
            raise RunError(
                f"nobody can say whether job {job_id} is alive ({state.reason}), and a second job "
                "of one run must not start beside it; try again when the scheduler answers"
            )
        withdrawn = _withdraw(run)
        if standing.is_over:
            return _again(run, withdrawn)
        if _would_leave(standing):
            run.scheduler.cancel(job_id)
            return _again(run, withdrawn)
        if state.is_held:
            return _release(run, job_id, sleep)
        if state.is_waiting:
            return Answer("waiting", f"job {job_id} is queued already{withdrawn}", True, job_id)
        return Answer("running", f"it runs as job {job_id}{withdrawn}", True, job_id)


def _settled(run: OpenRun, sleep: Callable[[float], None]) -> Standing:
    """Once the job is not in the middle of its end."""
    deadline = time.monotonic() + ENDING_S
    standing = run.look()
    if standing.state.is_ending:
        tell(f"job {standing.job.job_id} is {standing.state.word}; waiting for its end")
    while standing.state.is_ending:
        if time.monotonic() > deadline:
            raise RunError(
                f"job {standing.job.job_id} is {standing.state.word} for {ENDING_S:g} s; try again "
                "when it has ended"
            )
        sleep(POLL_S)
        standing = run.look()
    if standing.state.word in _DOUBTFUL:
        sleep(SECOND_LOOK_S)
        standing = run.look()
    return standing


def _would_leave(standing: Standing) -> bool:
    """A successor that the batch loop queued before the run was ended, and could not cancel: it
    leaves when it starts (recovery/successor.py)."""
    action = (standing.decision or {}).get("action")
    is_left_over = standing.job.queued_by == BY_BATCH and standing.state.is_waiting
    return is_left_over and action in (STOP, ENDED)


def _withdraw(run: OpenRun) -> str:
    given = run.control.read_leaving()
    run.control.take_away_leaving()
    return f"; the order `{given}` is withdrawn" if given else ""


def _release(run: OpenRun, job_id: str, sleep: Callable[[float], None]) -> Answer:
    try:
        run.scheduler.release(job_id)
    except SchedulerError as error:
        raise SchedulerError(
            f"job {job_id} is held and not released: {error}; ask an operator of the cluster, or "
            f"`ftslurm cancel {run.name}` and resume again, which queues a new job"
        ) from None
    with contextlib.suppress(SchedulerError):
        _hasten(run, job_id, sleep)
    return Answer("released", f"job {job_id} is released and goes on", True, job_id)


def _hasten(run: OpenRun, job_id: str, sleep: Callable[[float], None]) -> None:
    """Released soon after its requeue a job would wait for the rest of two minutes. Slurm says so
    only when it has next looked at its queue."""
    deadline = time.monotonic() + HASTEN_S
    while not run.scheduler.hasten(job_id) and time.monotonic() < deadline:
        state = run.scheduler.job_state(job_id)
        if not (state.is_held or state.reason in ("", "BeginTime")) or not state.is_waiting:
            break
        sleep(HASTEN_POLL_S)


def _again(run: OpenRun, withdrawn: str) -> Answer:
    # One that nobody has written down: the answer to its submission was lost.
    for queued in run.scheduler.waiting(run.layout.script):
        return Answer(
            "waiting", f"job {queued.job_id} is queued already{withdrawn}", True, queued.job_id
        )
    job_id = submit_again(run.layout, run.record.scheduler)
    # The job itself writes this down when it starts before us.
    if job_id not in [job.job_id for job in read_jobs(run.layout)]:
        add_job(run.layout, job_id, scheduler=run.record.scheduler, queued_by=BY_PERSON)
    return Answer("queued", f"job {job_id} is queued and goes on where the run was", True, job_id)


@contextlib.contextmanager
def _alone(layout: RunLayout) -> Iterator[None]:
    """One resume at a time. A file system without locks gives none, and no protection."""
    with (layout.submit / "resume.lock").open("w") as stream:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another `ftslurm resume` of `{layout.root}` is at work; wait for its word"
            ) from None
        except OSError as error:
            tell(f"this file system has no locks ({error}); see that nobody else resumes the run")
        yield
