"""Which of a run's jobs is meant, which wait behind it, and whether any is alive.

Pure: what is on record and the scheduler's words in, the answer out. Everybody who asks takes it
from here: an operator's verbs, whoever follows a run or a sweep, `status`.

- One job, however often it was requeued: it is meant, whatever its state.
- A successor that waits: the job before it is meant for as long as that is not over.
- One has claimed an attempt: those before it had ended when it began, and are not asked for.
- All are over: the one that Slurm may queue again (DOUBTFUL), unless a person has queued one after
  it; else the newest of which there is a word. One that was only queued to follow a job that ended
  the run was cancelled with it, and tells nothing.
- All are forgotten, and the run has stopped: the one of which that was decided.
- Nobody can say of a job: it counts as alive, so that no second one is started beside it. One that
  Slurm has forgotten is over.
- This machine knows the newest job only, and nothing is ever queued behind that.
- The newest attempt is of a job that nobody wrote down: it is one of the run's all the same.
- No job is on record and none has begun: none is meant. Whether the answer to a submission was lost
  is not told from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from ftslurm.recovery.actions import ENDED, STOP
from ftslurm.run.attempts import Attempt
from ftslurm.run.jobs import BY_PERSON, Job
from ftslurm.scheduler.protocol import DOUBTFUL, UNKNOWN, JobState

NO_JOB = JobState(UNKNOWN, "it has no job")


@dataclass(frozen=True)
class JobsOnRecord:
    """The jobs of a run that the scheduler is to be asked for."""

    jobs: tuple[Job, ...] = ()
    """Oldest first."""
    begun_last: Optional[str] = None
    """Id of the job that has claimed the newest attempt; None: none has begun."""

    @property
    def ids(self) -> list[str]:
        """Newest first, so that a job that ends while it is asked is not taken to run on beside the
        one that has begun since."""
        return [job.job_id for job in reversed(self.jobs)]


@dataclass(frozen=True)
class JobMeant:
    """The answer."""

    job: Optional[Job]
    """None: the run has no job."""
    state: JobState
    behind: tuple[Job, ...] = ()
    """Alive, wait until `job` has ended; newest first."""

    @property
    def alive(self) -> tuple[str, ...]:
        """Jobs that are not over, newest first."""
        jobs = self.behind
        if self.job is not None and not self.state.is_over:
            jobs = (*jobs, self.job)
        return tuple(job.job_id for job in jobs)


def to_ask_for(
    jobs: Sequence[Job], newest_claim: Optional[Attempt], *, scheduler: str
) -> JobsOnRecord:
    """`jobs`: all that are on record, oldest first."""
    known = list({job.job_id: job for job in jobs}.values())
    begun = newest_claim.job_id if newest_claim else None
    if newest_claim is not None and begun not in [job.job_id for job in known]:
        at = newest_claim.claimed_at
        place = next((n for n, job in enumerate(known) if job.queued_at > at), len(known))
        known.insert(place, Job(newest_claim.job_id, scheduler, BY_PERSON, at))
    if scheduler == "local":
        return JobsOnRecord(tuple(known[-1:]), begun)
    first = next((n for n, job in enumerate(known) if job.job_id == begun), 0)
    return JobsOnRecord(tuple(known[first:]), begun)


def is_later(job_id: str, begun_last: Optional[str]) -> bool:
    """The job has not claimed an attempt yet, while one before it has: what was decided after the
    newest attempt is not about it."""
    return begun_last is not None and job_id not in ("", begun_last)


def has_stopped(action: Optional[str], job_id: str, begun_last: Optional[str]) -> bool:
    """The run does not go on by itself. `action`: what was decided after the newest attempt."""
    return action in (STOP, ENDED) and not is_later(job_id, begun_last)


def choose(
    on_record: JobsOnRecord, states: Mapping[str, JobState], *, action: Optional[str]
) -> JobMeant:
    """`states`: of each of `on_record.ids`. `action`: what was decided after the newest attempt."""
    seen = [(job, states[job.job_id]) for job in reversed(on_record.jobs)]
    alive = [(job, state) for job, state in seen if not state.is_over]
    if alive:
        return JobMeant(*alive[-1], tuple(job for job, _ in alive[:-1]))
    if not seen:
        return JobMeant(None, NO_JOB)
    own = seen
    if action in (STOP, ENDED):
        own = [one for one in seen if not _only_followed(one[0], on_record)] or seen
        if all(state.is_forgotten for _, state in seen):
            own = [one for one in seen if one[0].job_id == on_record.begun_last] or seen
    resumed = next((n for n, (job, _) in enumerate(seen) if job.queued_by == BY_PERSON), len(seen))
    doubtful = (one for one in seen[: resumed + 1] if one[1].word in DOUBTFUL)
    ended = (one for one in own if one[1].is_ended)
    return JobMeant(*next(doubtful, next(ended, own[0])))


def _only_followed(job: Job, on_record: JobsOnRecord) -> bool:
    return job.after is not None and job.after == on_record.begun_last
