"""The next job of a run that gets a new job each time: found, queued, cancelled, and whether one
that starts may still run.

A job has one successor, whatever happens in between: what waits in the queue with the run's own
batch script is asked for first, so that neither a lost answer of sbatch nor a second claim of the
same job makes two. Whether a run goes on is not decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, Optional

from ftslurm.errors import FormatError, RunError, SchedulerError, warn
from ftslurm.files import best_effort, write_atomic
from ftslurm.recovery.actions import ENDED, STOP
from ftslurm.recovery.keep_out import keep_out_of_waiting, settle_exclusions
from ftslurm.recovery.own_job import OwnJob, noted_ways
from ftslurm.run.attempts import claimed_numbers, read_attempt, read_decision, read_outcome
from ftslurm.run.jobs import BY_BATCH, BY_PERSON, BY_SUBMIT, Job, add_job, read_jobs
from ftslurm.run.layout import RunLayout
from ftslurm.scheduler.protocol import CommandMissing, QueuedJob
from ftslurm.scheduler.sbatch import (
    NotReachedError,
    RefusedError,
    UnclearError,
    frozen_arguments,
    with_excluded,
)

LONGEST_PAUSE_S = 5.0

KEEP_OUT_S = 5.0
"""How long it is tried to change a waiting job, which looks at its nodes itself when it starts."""


def note_own_job(job: OwnJob) -> None:
    """Write the job down that nobody has: its submitter is slower than it, or a person's own."""
    by = BY_PERSON if read_jobs(job.layout) else BY_SUBMIT
    with best_effort("the job is not on record"):
        add_job(job.layout, job.job_id, scheduler=job.scheduler.name, queued_by=by)


def reason_to_leave(job: OwnJob) -> Optional[str]:
    """Why this job must not go on with the run; None: it may. Looks only, so that others may ask
    for a job that waits. What a person queues always begins; a successor that was queued before the
    run was ended, or a job that Slurm queues once more after it, does not."""
    if is_persons_word(job):
        return None
    newest = claimed_numbers(job.layout)[-1]
    decision = read_decision(job.layout.attempt(newest))
    if decision.get("action") in (STOP, ENDED):
        return f"attempt {newest} has ended the run: {decision['reason']}"
    order = order_to_act_on(job.layout, newest)
    if order is not None:
        return f"attempt {newest} has obeyed the order `{order}`"
    own = _own(job)
    if own is None or own.queued_by != BY_BATCH or own.after is None or _has_begun(job):
        return None
    if not noted_ways(job.layout, own.after) and job.scheduler.was_cancelled(own.after):
        return f"somebody has cancelled job {own.after}, which this one was to follow"
    return None


def order_to_act_on(layout: RunLayout, number: int) -> Optional[str]:
    """stop | pause: obeyed by the ranks of an attempt whose batch shell died before it could decide
    anything."""
    paths = layout.attempt(number)
    if read_decision(paths):
        return None
    try:
        outcome = read_outcome(paths)
    except FormatError:
        return None
    return None if outcome is None else outcome.order


def is_persons_word(job: OwnJob) -> bool:
    """Nothing binds this job: a person has queued it, at first or after all that has happened, and
    it has not begun yet."""
    own = _own(job)
    is_successor = own is not None and own.queued_by == BY_BATCH
    return not claimed_numbers(job.layout) or not (is_successor or _has_begun(job))


def _own(job: OwnJob) -> Optional[Job]:
    return next((one for one in read_jobs(job.layout) if one.job_id == job.job_id), None)


def _has_begun(job: OwnJob) -> bool:
    numbers = reversed(claimed_numbers(job.layout))
    return any(read_attempt(job.layout, number).job_id == job.job_id for number in numbers)


def ensure_successor(job: OwnJob, *, give_up: Callable[[], bool] = lambda: False) -> str:
    """Id of the job that follows ours, queued if there is none. Tries on while slurmctld is away,
    until `give_up()`. RefusedError: there is none, and there will be none."""
    if job.scheduler.name == "local":
        raise RefusedError("a run on this machine has one job at a time, and it ends now")
    pause_s = 0.5
    while True:
        try:
            found = find_successor(job)
            if found is None:
                return _queue(job)
            _keep_out(job, found)
            return found
        except CommandMissing as error:
            raise RefusedError(str(error)) from None
        except SchedulerError as error:
            for_good = isinstance(error, RefusedError) and not isinstance(error, NotReachedError)
            if for_good or give_up():
                raise
        job.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def queue_beside(job: OwnJob, *, without: Sequence[str] = ()) -> str:
    """Id of a job that goes on with the run without waiting for the end of ours, nor for the nodes
    `without` which it has to start, whatever is known of them. SchedulerError: there is none."""
    if job.scheduler.name == "local":
        raise RefusedError("a run on this machine has one job at a time")
    begun = follower_that_has_begun(job) or _follower_that_runs(job)
    if begun is not None:
        return begun
    waiting = _waiting(job)
    found = _beside(job, waiting)
    if found is not None:
        _keep_out(job, found, without)
        return found
    try:
        job_id = _queue(job, waits=False, without=without)
    except UnclearError:
        found = _beside(job, _waiting(job))
        if found is None:
            raise
        job_id = found
    for one in waiting:  # they would start after this one, and find nothing to do
        try:
            job.scheduler.cancel(one.job_id)
        except SchedulerError as error:
            warn(f"job {one.job_id} is left in the queue: {error}")
    return job_id


def follower_that_has_begun(job: OwnJob) -> Optional[str]:
    """Id of the job that was queued to follow ours, and has claimed the newest attempt."""
    numbers = claimed_numbers(job.layout)
    newest = read_attempt(job.layout, numbers[-1]).job_id if numbers else None
    return newest if newest in _followers(job) else None


def _follower_that_runs(job: OwnJob) -> Optional[str]:
    """One that has not come to claim yet: it neither waits in the queue nor has begun."""
    followers = _followers(job)
    return next((one for one in followers if job.scheduler.job_state(one).is_running), None)


def _followers(job: OwnJob) -> list[str]:
    return [one.job_id for one in read_jobs(job.layout) if one.after == job.job_id]


def _beside(job: OwnJob, waiting: Sequence[QueuedJob]) -> Optional[str]:
    return next((one.job_id for one in waiting if not one.waits_for(job.job_id)), None)


def _keep_out(job: OwnJob, job_id: str, without: Sequence[str] = ()) -> None:
    """What has been learned of nodes since the successor was queued holds for it too."""
    names = sorted({*settle_exclusions(job), *without})
    keep_out_of_waiting(job, job_id, names, for_s=KEEP_OUT_S)


def find_successor(job: OwnJob) -> Optional[str]:
    """Id of a job that waits to go on with this run; SchedulerError when nobody can say."""
    waiting = _waiting(job)
    for one in waiting:
        if one.waits_for(job.job_id):
            _note(job, one.job_id)
            return one.job_id
    return waiting[0].job_id if waiting else None


def cancel_successors(job: OwnJob) -> list[str]:
    """Cancel what the batch loop itself has queued; their ids. SchedulerError: some may be left."""
    queued = {one.job_id for one in read_jobs(job.layout) if one.queued_by == BY_BATCH}
    # Asked also where none is on record: the answer to its submission may have been lost.
    doomed = [
        one.job_id for one in _waiting(job) if one.job_id in queued or one.waits_for(job.job_id)
    ]
    for job_id in doomed:
        job.scheduler.cancel(job_id)
    return doomed


def _waiting(job: OwnJob) -> list[QueuedJob]:
    waiting = job.scheduler.waiting(job.layout.script)
    return [one for one in waiting if one.job_id != job.job_id]


def _queue(job: OwnJob, *, waits: bool = True, without: Sequence[str] = ()) -> str:
    try:
        *options, script = frozen_arguments(job.layout)
    except RunError as error:
        raise RefusedError(str(error)) from None
    # singleton alone lets a job start while nodes of the one before are still being cleaned up.
    after = f"afterany:{job.job_id}"
    if "--dependency=singleton" in options:
        after = f"singleton,{after}"
    # Of two --dependency the last one holds.
    arguments = [*options, *([f"--dependency={after}"] if waits else []), script]
    with best_effort("that a successor is asked for is not on record"):
        write_atomic(job.layout.successor_asked, b"")
    job_id = job.submit(with_excluded(arguments, sorted({*settle_exclusions(job), *without})))
    _note(job, job_id)
    return job_id


def _note(job: OwnJob, job_id: str) -> None:
    with best_effort(f"successor {job_id} is not on record"):
        add_job(
            job.layout,
            job_id,
            scheduler=job.scheduler.name,
            queued_by=BY_BATCH,
            after=job.job_id,
            now=job.now,
        )
