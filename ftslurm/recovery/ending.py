"""Whether a run is over, and how it went, as it looks to somebody who waits for it.

Pure: a view of the run in, an ending out; what was seen before is a value too, the clock a number.
The same rules hold for one run that is followed and for each task of a sweep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from ftslurm.recovery.actions import PAUSED
from ftslurm.recovery.job_meant import has_stopped
from ftslurm.run.attempts import Progress
from ftslurm.run.wording import format_count
from ftslurm.scheduler.protocol import DOUBTFUL, SECOND_LOOK_S, JobState

UNSEEN_S = {"local": 60.0, "slurm": 900.0}
"""Give up on a job of which the scheduler knows nothing for so long (a controller may be away)."""

LATE_FILES_S = {"local": 0.0, "slurm": 75.0}
"""How long a job has to be COMPLETED without DONE. A login node that has looked for a file before
it was there may go on missing it for acdirmax, 60 s unless set (nfs(5))."""


@dataclass(frozen=True)
class AttemptView:
    """One attempt as it stands."""

    number: int
    progress: Optional[Progress]
    decision: Optional[dict[str, Any]]
    """What `ftslurm recover` decided when it ended: action, cause, reason."""


@dataclass(frozen=True)
class View:
    """A run as it stands."""

    attempts: tuple[AttemptView, ...]
    done: bool
    job: JobState
    """Of the job that is meant."""
    job_id: str = ""
    """Empty: it has none."""
    alive: tuple[str, ...] = ()
    """Its jobs that are not over, newest first."""
    begun_last: Optional[str] = None
    """Id of the job that has claimed the newest attempt."""

    @property
    def latest(self) -> Optional[AttemptView]:
        return self.attempts[-1] if self.attempts else None

    @property
    def action(self) -> Optional[str]:
        """What was decided after the newest attempt; None: nothing yet."""
        decision = self.latest.decision if self.latest else None
        return None if decision is None else str(decision["action"])

    @property
    def has_stopped(self) -> bool:
        """It does not go on by itself."""
        return has_stopped(self.action, self.job_id, self.begun_last)


@dataclass(frozen=True)
class Ending:
    """How it went."""

    finished: bool
    attempts: int
    text: str


def ending(view: View) -> Optional[Ending]:
    """None while the run goes on or may go on."""
    count = len(view.attempts)
    attempts = format_count(count, "attempt")
    if view.done:
        last = view.latest.progress if view.latest else None
        steps = f"{last.step} steps, " if last else ""
        return Ending(True, count, f"finished: {steps}{attempts}")
    decision = view.latest.decision if view.latest else None
    stopped = view.has_stopped
    if view.job.is_held and view.action == PAUSED:
        return Ending(False, count, "is paused: `ftslurm resume` lets it go on")
    # Slurm forgets an ended job after MinJobAge; the run directory does not. One that asked for
    # --requeue=expedite may be held in place of failed.
    if view.job.is_ended or (stopped and (view.job.is_held or not view.job.is_known)):
        why = f": {decision['reason']}" if decision and stopped else ", see submit/ and attempts/"
        return Ending(False, count, f"did not finish (job {view.job.word}, {attempts}){why}")
    if view.job.is_held:
        return Ending(
            False,
            count,
            f"is held by Slurm ({view.job.reason or view.job.word}); `scontrol release` it, or ask "
            "an operator to",
        )
    return None


def out_of_sight(view: View) -> Ending:
    """Of a run of whose job nobody has known anything for UNSEEN_S."""
    return Ending(
        False,
        len(view.attempts),
        f"is out of sight: the scheduler knows no such job ({view.job.reason or 'no word'}); see "
        "submit/ in the run directory",
    )


@dataclass
class Belief:
    """Which ending can be believed, for one run: a bad one when it is seen twice of the same job,
    SECOND_LOOK_S apart where Slurm may queue that again; COMPLETED without DONE when files have had
    time to show. A question without an answer is no second look."""

    scheduler: str
    """slurm | local"""
    bad_end: Optional[Ending] = None
    """As seen last, not believed yet."""
    bad_since: float = 0.0
    job_id: str = ""
    """Of which job that was seen."""

    def patience_s(self, view: View) -> float:
        if view.job.word in DOUBTFUL:
            return SECOND_LOOK_S
        is_early = view.job.word == "COMPLETED" and not view.has_stopped
        return LATE_FILES_S[self.scheduler] if is_early else 0.0

    def of(self, view: View, now: float) -> Optional[Ending]:
        """The ending that this view, after those before it, lets believe."""
        end = ending(view)
        if end is not None and end.finished:
            return end
        # A job that Slurm has forgotten meanwhile has ended all the same.
        goes_on = end is None and not view.job.is_forgotten
        if goes_on or view.job_id != self.job_id:
            self.bad_end, self.job_id = None, view.job_id
        if self.bad_end is None:
            self.bad_end, self.bad_since = end, now
            return None
        self.bad_end = end or self.bad_end
        return self.bad_end if now - self.bad_since >= self.patience_s(view) else None
