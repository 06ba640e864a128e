"""Watch a submitted run until it has ended: reads the run directory, asks the scheduler, says news.

A run may have one job after the other; the one that is watched is the one that runs, else the
newest. What is news is decided from two views, values alone; the loop looks, backs off, and does
the two things a watcher may: shorten the wait of a requeued job, and, when a drill was asked for,
send the ranks the signal that a preemption would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Optional

from ftslurm.errors import RunError, SchedulerError
from ftslurm.files import read_json
from ftslurm.recovery.policy import ENDED, PAUSED, STOP
from ftslurm.run.attempts import Progress, claimed_numbers, numbers, read_attempt, read_progress
from ftslurm.run.jobs import read_jobs
from ftslurm.run.layout import RunLayout
from ftslurm.scheduler.protocol import JobState, Scheduler

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 15.0
BACK_OFF = 1.3
DRILL_PAUSE_S = 2.0
"""While a drill is due: the run must not be over before it is ripe."""

UNSEEN_S = {"local": 60.0, "slurm": 900.0}
"""Give up on a job of which the scheduler knows nothing for so long (a controller may be away)."""

LATE_FILES_S = {"local": 0.0, "slurm": 75.0}
"""How long a job has to be COMPLETED without DONE. A login node that has looked for a file before
it was there may go on missing it for acdirmax, 60 s unless set (nfs(5))."""

LAST_WORD_S = 5.0
"""DONE is written by the ranks, the last attempt's decision a moment later by the batch script."""
LAST_WORD_PAUSE_S = 0.5


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
    job_id: str = ""

    @property
    def latest(self) -> Optional[AttemptView]:
        return self.attempts[-1] if self.attempts else None


@dataclass(frozen=True)
class Ending:
    """How it went."""

    finished: bool
    attempts: int
    text: str


def job_to_watch(layout: RunLayout) -> Optional[str]:
    """The job that has begun last, else the first one; None: no job of the run is known."""
    jobs = read_jobs(layout)
    return _begun_last(layout) or (jobs[0].job_id if jobs else None)


def look(layout: RunLayout, scheduler: Scheduler, job_id: str) -> View:
    """`job_id`: the job that was watched so far."""
    # The job is asked before the files: what it wrote last is then seen with its end.
    job = scheduler.job_state(job_id)
    later = _later_job(layout, job_id)
    if later is not None:
        next_job = scheduler.job_state(later)
        if _takes_over(layout, later, next_job, job):
            job_id, job = later, next_job
    attempts = []
    for number in numbers(layout):
        paths = layout.attempt(number)
        try:
            decision = read_json(paths.decision_json)
        except FileNotFoundError:
            decision = None
        attempts.append(AttemptView(number, read_progress(paths), decision))
    return View(tuple(attempts), layout.done.exists(), job, job_id)


def _later_job(layout: RunLayout, job_id: str) -> Optional[str]:
    """The newest job of the run, unless it is this one."""
    jobs = [job.job_id for job in read_jobs(layout)]
    return jobs[-1] if jobs and jobs[-1] != job_id else None


def _takes_over(layout: RunLayout, later: str, state: JobState, before: JobState) -> bool:
    """A successor is queued when its predecessor begins: it is the one to watch once that has
    ended, or when it has itself begun."""
    if before.is_ended or before.is_forgotten:
        return state.is_known and not state.is_ended
    return _begun_last(layout) == later


def _begun_last(layout: RunLayout) -> Optional[str]:
    claimed = claimed_numbers(layout)
    return read_attempt(layout, claimed[-1]).job_id if claimed else None


def news(before: View, after: View) -> Iterator[str]:
    """What a person wants to hear of the change from one view to the next."""
    if before.job_id and after.job_id != before.job_id:
        yield f"the run goes on in job {after.job_id}"
    if after.job != before.job and after.job.is_known:
        reason = f" ({after.job.reason})" if after.job.reason not in ("", "None") else ""
        yield f"job is {after.job.word}{reason}"
    known = {attempt.number: attempt for attempt in before.attempts}
    for attempt in after.attempts:
        old = known.get(attempt.number)
        if old is None:
            yield f"attempt {attempt.number} begins"
        progress = attempt.progress
        resumed = progress.restored_step if progress else None
        if resumed is not None and not (old and old.progress and old.progress.restored_step):
            yield f"attempt {attempt.number} goes on from step {resumed}"
        if progress is not None and _is_further(old.progress if old else None, progress):
            yield _progress_line(attempt.number, progress)
        decision = attempt.decision
        if decision is not None and (old is None or old.decision != decision):
            yield f"attempt {attempt.number} ended: {decision['reason']} -> {decision['action']}"


def ending(view: View) -> Optional[Ending]:
    """None while the run goes on or may go on."""
    count = len(view.attempts)
    if view.done:
        last = view.latest.progress if view.latest else None
        steps = f"{last.step} steps, " if last else ""
        return Ending(True, count, f"finished: {steps}{_attempts(count)}")
    decision = view.latest.decision if view.latest else None
    stopped = _has_stopped(view)
    if view.job.is_held and decision is not None and decision["action"] == PAUSED:
        return Ending(False, count, "is paused: `ftslurm resume` lets it go on")
    # Slurm forgets an ended job after MinJobAge; the run directory does not. One that asked for
    # --requeue=expedite may be held in place of failed.
    if view.job.is_ended or (stopped and (view.job.is_held or not view.job.is_known)):
        why = f": {decision['reason']}" if decision and stopped else ", see submit/ and attempts/"
        return Ending(
            False, count, f"did not finish (job {view.job.word}, {_attempts(count)}){why}"
        )
    if view.job.is_held:
        return Ending(
            False,
            count,
            f"is held by Slurm ({view.job.reason or view.job.word}); `scontrol release` it, or ask "
            "an operator to",
        )
    return None


def is_ripe_for_drill(view: View) -> bool:
    """The first attempt trains, and loses something that a committed step makes good."""
    progress = view.latest.progress if view.latest else None
    return (
        len(view.attempts) == 1
        and view.job.is_running
        and progress is not None
        and progress.phase == "training"
        and progress.committed_step is not None
        and progress.committed_step < progress.step < progress.steps
    )


@dataclass
class Follower:
    """One watch over one run."""

    layout: RunLayout
    scheduler: Scheduler
    job_id: str
    """Of the job to begin with, then of the one that is watched."""
    say: Callable[[str], None]
    drill_signal: Optional[str] = None
    """Send it once to the ranks, as a preemption would."""
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.monotonic
    hastened: bool = False
    bad_end: Optional[Ending] = None
    """As seen last, not believed yet."""
    bad_since: float = 0.0

    def follow(self) -> Ending:
        """Say news until the run has ended; how it went."""
        view = View((), False, JobState("UNKNOWN"))
        pause_s, seen_at = FIRST_PAUSE_S, self.now()
        while True:
            seen = self._look(seen_at)
            if seen is None:
                self.sleep(pause_s)
                continue
            before, view = view, seen
            self.job_id = view.job_id
            self._say_news(before, view)
            end = self._believed(ending(view), view)
            if end is not None:
                return self._with_last_word(end, view)
            if view.job.is_known:
                seen_at = self.now()
            elif self.now() - seen_at > UNSEEN_S[self.scheduler.name]:
                return Ending(False, len(view.attempts), _lost(view))
            self._hasten(view)
            self._drill(view)
            pause_s = min(LONGEST_PAUSE_S, pause_s * BACK_OFF)
            if _is_turn(before, view):
                pause_s = FIRST_PAUSE_S
            elif self.drill_signal is not None:
                pause_s = min(DRILL_PAUSE_S, pause_s)
            self.sleep(pause_s)

    def _say_news(self, before: View, after: View) -> None:
        for line in news(before, after):
            self.say(line)

    def _look(self, seen_at: float) -> Optional[View]:
        """None when the files cannot be read now: they are replaced while they are read (ESTALE on
        NFS). RunError when that has gone on since `seen_at` for too long."""
        try:
            return look(self.layout, self.scheduler, self.job_id)
        except OSError as error:
            if self.now() - seen_at > UNSEEN_S[self.scheduler.name]:
                raise RunError(
                    f"`{self.layout.root}` can no longer be read ({error}); look with `ftslurm "
                    "status` when its file system is back"
                ) from None
            return None

    def _believed(self, end: Optional[Ending], view: View) -> Optional[Ending]:
        """`end` once it can be believed: a bad one when it is seen twice (Slurm may requeue a
        moment after PREEMPTED); COMPLETED without DONE when files have had time to show."""
        if end is not None and end.finished:
            return end
        if end is None and view.job.is_known:
            self.bad_end = None
        doubtful = view.job.word == "COMPLETED" and not _has_stopped(view)
        patience_s = LATE_FILES_S[self.scheduler.name] if doubtful else 0.0
        if self.bad_end is None:
            self.bad_end, self.bad_since = end, self.now()
            if end is not None and patience_s:
                self.say(f"nothing says yet how the run ended; looking on for {patience_s:g} s")
            return None
        # A job that Slurm has forgotten meanwhile has ended all the same.
        self.bad_end = end or self.bad_end
        return self.bad_end if self.now() - self.bad_since >= patience_s else None

    def _with_last_word(self, end: Ending, view: View) -> Ending:
        """Wait a moment for the last attempt's decision, so that `status` tells the whole story."""
        deadline = self.now() + LAST_WORD_S
        while end.finished and _is_undecided(view) and self.now() < deadline:
            self.sleep(LAST_WORD_PAUSE_S)
            before, view = view, self._look(self.now()) or view
            self._say_news(before, view)
        return end

    def _hasten(self, view: View) -> None:
        """Once for each wait: asking again would put the start off again."""
        if not (view.job.word == "PENDING" and view.job.reason == "BeginTime" and view.attempts):
            self.hastened = False
        elif not self.hastened and self._is_hastened():
            self.hastened = True
            self.say("asked Slurm to start the requeued job in seconds, not after its 2 minutes")

    def _is_hastened(self) -> bool:
        try:
            return self.scheduler.hasten(self.job_id)
        except SchedulerError:
            return False  # the job starts all the same, only later; the next look asks again

    def _drill(self, view: View) -> None:
        if self.drill_signal is None or not is_ripe_for_drill(view):
            return
        try:
            self.scheduler.signal_ranks(self.job_id, self.drill_signal)
        except SchedulerError:
            return  # the ranks ended this moment; the next look shows how
        assert view.latest is not None and view.latest.progress is not None
        self.say(
            f"DRILL: sent {self.drill_signal} to all ranks near step {view.latest.progress.step}, "
            "as a preemption would; they stop together, save, and the job is queued again"
        )
        self.drill_signal = None


def _has_stopped(view: View) -> bool:
    decision = view.latest.decision if view.latest else None
    return decision is not None and decision["action"] in (STOP, ENDED)


def _is_undecided(view: View) -> bool:
    return view.latest is not None and view.latest.decision is None


def _is_further(old: Optional[Progress], new: Progress) -> bool:
    if old is None:
        return True
    shown = ("step", "phase", "committed_step", "failed_saves")
    return any(getattr(old, name) != getattr(new, name) for name in shown)


def _is_turn(before: View, after: View) -> bool:
    """Something of another kind than a further step: look again soon."""
    turns = [
        (view.job, [(item.number, item.decision is None) for item in view.attempts])
        for view in (before, after)
    ]
    return turns[0] != turns[1]


def _progress_line(attempt: int, progress: Progress) -> str:
    parts = [f"attempt {attempt}", f"step {progress.step}/{progress.steps}"]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if progress.tokens_per_s is not None:
        parts.append(f"{progress.tokens_per_s:,.0f} tokens/s")
    if progress.committed_step is not None:
        parts.append(f"committed {progress.committed_step}")
    if progress.failed_saves:
        parts.append(f"{progress.failed_saves} failed saves")
    if progress.phase != "training":
        parts.append(progress.phase)
    return "  ".join(parts)


def _attempts(count: int) -> str:
    return "1 attempt" if count == 1 else f"{count} attempts"


def _lost(view: View) -> str:
    return (
        f"is out of sight: the scheduler knows no such job ({view.job.reason or 'no word'}); see "
        "submit/ in the run directory"
    )
