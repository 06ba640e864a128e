"""Watch a submitted run until it has ended: reads the run directory, asks the scheduler, says news.

A run may have one job after the other; which one is watched is decided in recovery/job_meant.py.
What is news is decided from two views, values alone; the loop looks, backs off, and does the two
things a watcher may: shorten the wait of a requeued job, and, when a drill was asked for, send the
ranks the signal that a preemption would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Optional

from ftslurm.errors import RunError, SchedulerError
from ftslurm.recovery.ending import UNSEEN_S, Belief, Ending, View, out_of_sight
from ftslurm.recovery.on_record import ask_for_jobs
from ftslurm.recovery.view import read_view
from ftslurm.run.attempts import Progress
from ftslurm.run.layout import RunLayout
from ftslurm.scheduler.hasten import hasten_once
from ftslurm.scheduler.protocol import SECOND_LOOK_S, JobState, Scheduler

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 15.0
BACK_OFF = 1.3
DRILL_PAUSE_S = 2.0
"""While a drill is due: the run must not be over before it is ripe."""

LAST_WORD_S = 5.0
"""DONE is written by the ranks, the last attempt's decision a moment later by the batch script."""
LAST_WORD_PAUSE_S = 0.5
_NO_DRILL = (
    "no DRILL: the run was never seen training on from a committed step; more steps, or a smaller"
    " checkpoint.interval_steps, leave time for one"
)


def look(layout: RunLayout, scheduler: Scheduler) -> View:
    on_record, states = ask_for_jobs(layout, scheduler)
    return read_view(layout, on_record, states)


def news(before: View, after: View) -> Iterator[str]:
    """What a person wants to hear of the change from one view to the next."""
    is_other = before.job_id and after.job_id != before.job_id and after.job.is_known
    has_begun = after.begun_last == after.job_id != before.begun_last
    if is_other and (has_begun or not after.job.is_over):
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
    say: Callable[[str], None]
    drill_signal: Optional[str] = None
    """Send it once to the ranks, as a preemption would."""
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], float] = time.monotonic
    hastened: bool = False
    job_id: str = field(default="", init=False)
    """Of the job that is watched."""

    def follow(self) -> Ending:
        """Say news until the run has ended; how it went."""
        view = View((), False, JobState("UNKNOWN"))
        belief = Belief(self.scheduler.name)
        pause_s, seen_at = FIRST_PAUSE_S, self.now()
        while True:
            seen = self._look(seen_at)
            if seen is None:
                self.sleep(pause_s)
                continue
            before, view = view, seen
            self.job_id = view.job_id
            self._say_news(before, view)
            end = self._believed(belief, view)
            if end is not None:
                return self._with_last_word(end, view)
            if view.job.is_known:
                seen_at = self.now()
            elif self.now() - seen_at > UNSEEN_S[self.scheduler.name]:
                return out_of_sight(view)
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
            return look(self.layout, self.scheduler)
        except OSError as error:
            if self.now() - seen_at > UNSEEN_S[self.scheduler.name]:
                raise RunError(
                    f"`{self.layout.root}` can no longer be read ({error}); look with `ftslurm "
                    "status` when its file system is back"
                ) from None
            return None

    def _believed(self, belief: Belief, view: View) -> Optional[Ending]:
        is_first = belief.bad_end is None
        end = belief.of(view, self.now())
        patience_s = belief.patience_s(view)
        if is_first and belief.bad_end is not None and patience_s > SECOND_LOOK_S:
            self.say(f"nothing says yet how the run ended; looking on for {patience_s:g} s")
        return end

    def _with_last_word(self, end: Ending, view: View) -> Ending:
        """Wait a moment for the last attempt's decision, so that `status` tells the whole story; a
        drill that never came is told."""
        deadline = self.now() + LAST_WORD_S
        while end.finished and _is_undecided(view) and self.now() < deadline:
            self.sleep(LAST_WORD_PAUSE_S)
            before, view = view, self._look(self.now()) or view
            self._say_news(before, view)
        if self.drill_signal is not None:
            self.say(_NO_DRILL)
        return end

    def _hasten(self, view: View) -> None:
        before = self.hastened
        self.hastened = hasten_once(
            self.scheduler,
            self.job_id,
            view.job,
            is_done=before,
            has_begun=view.begun_last == view.job_id,
        )
        if self.hastened and not before:
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
