"""Watch a submitted run until it has ended: reads the run directory, asks the scheduler, says news.

What is news is decided from two views, values alone; the loop looks, backs off, and does the two
things a watcher may: shorten the wait of a requeued job, and, when a drill was asked for, send the
ranks the signal that a preemption would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Optional

from ftslurm.errors import SchedulerError
from ftslurm.files import read_json
from ftslurm.run.attempts import Progress, numbers, read_progress
from ftslurm.run.layout import RunLayout
from ftslurm.scheduler.protocol import JobState, Scheduler

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 15.0
BACK_OFF = 1.3
DRILL_PAUSE_S = 2.0
"""While a drill is due: the run must not be over before it is ripe."""

UNSEEN_S = {"local": 60.0, "slurm": 900.0}
"""Give up on a job of which the scheduler knows nothing for so long (a controller may be away)."""


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

    @property
    def latest(self) -> Optional[AttemptView]:
        return self.attempts[-1] if self.attempts else None


@dataclass(frozen=True)
class Ending:
    """How it went."""

    finished: bool
    attempts: int
    text: str


def look(layout: RunLayout, scheduler: Scheduler, job_id: str) -> View:
    # The job is asked before the files: what it wrote last is then seen with its end.
    job = scheduler.job_state(job_id)
    attempts = []
    for number in numbers(layout):
        paths = layout.attempt(number)
        try:
            decision = read_json(paths.root / "decision.json")
        except FileNotFoundError:
            decision = None
        attempts.append(AttemptView(number, read_progress(paths), decision))
    return View(tuple(attempts), layout.done.exists(), job)


def news(before: View, after: View) -> Iterator[str]:
    """What a person wants to hear of the change from one view to the next."""
    if after.job != before.job and after.job.is_known:
        reason = f" ({after.job.reason})" if after.job.reason not in ("", "None") else ""
        yield f"job is {after.job.word}{reason}"
    known = {attempt.number: attempt for attempt in before.attempts}
    for attempt in after.attempts:
        old = known.get(attempt.number)
        if old is None:
            yield f"attempt {attempt.number} begins"
        progress = attempt.progress
        if progress is not None and _is_further(old.progress if old else None, progress):
            yield _progress_line(attempt.number, progress)
        resumed = progress.restored_step if progress else None
        if resumed is not None and not (old and old.progress and old.progress.restored_step):
            yield f"attempt {attempt.number} goes on from step {resumed}"
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
    stopped = decision is not None and decision["action"] == "stop"
    # Slurm forgets an ended job after MinJobAge; the run directory does not.
    if view.job.is_ended or (stopped and not view.job.is_known):
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
    say: Callable[[str], None]
    drill_signal: Optional[str] = None
    """Send it once to the ranks, as a preemption would."""
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.monotonic
    hastened: bool = False

    def follow(self) -> Ending:
        """Say news until the run has ended; how it went."""
        view = View((), False, JobState("UNKNOWN"))
        pause_s, seen_at, suspected = FIRST_PAUSE_S, self.now(), False
        while True:
            before, view = view, look(self.layout, self.scheduler, self.job_id)
            lines = list(news(before, view))
            for line in lines:
                self.say(line)
            end = ending(view)
            # Slurm may requeue a moment after NODE_FAIL or PREEMPTED, and files may lag on NFS:
            # a bad end is believed when it is seen twice.
            if end is not None and (end.finished or suspected):
                return end
            suspected = end is not None
            if view.job.is_known:
                seen_at = self.now()
            elif self.now() - seen_at > UNSEEN_S[self.scheduler.name]:
                return Ending(False, len(view.attempts), _lost(view))
            self._hasten(view)
            self._drill(view)
            pause_s = min(LONGEST_PAUSE_S, pause_s * BACK_OFF)
            if suspected or _is_turn(before, view):
                pause_s = FIRST_PAUSE_S
            elif self.drill_signal is not None:
                pause_s = min(DRILL_PAUSE_S, pause_s)
            self.sleep(pause_s)

    def _hasten(self, view: View) -> None:
        """Once for each wait: asking again would put the start off again."""
        if not (view.job.word == "PENDING" and view.job.reason == "BeginTime" and view.attempts):
            self.hastened = False
        elif not self.hastened and self.scheduler.hasten(self.job_id):
            self.hastened = True
            self.say("asked Slurm to start the requeued job in seconds, not after its 2 minutes")

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
