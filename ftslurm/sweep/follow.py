"""Follow a sweep until all its tasks have ended: the scheduler is asked for all of them at once and
ever more rarely, the news are one line of counts, and a line for each task that failed.

A task ends by the rules of any run (recovery/ending.py). That it is DONE its folder says between
the questions; of one that plainly waits nothing is looked at, so a thousand tasks cost little. Does
what one who follows may: queue tasks that a limit on jobs had left, as room appears, and shorten
the wait of requeued ones.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Optional

from ftslurm.errors import RunError, SchedulerError
from ftslurm.files import is_listed
from ftslurm.recovery.ending import UNSEEN_S, Belief, Ending, View, out_of_sight
from ftslurm.recovery.view import read_view
from ftslurm.run.attempts import numbers as attempts_of
from ftslurm.run.jobs import read_jobs
from ftslurm.run.layout import RunLayout
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_lock import queueing
from ftslurm.run.sweep_record import TaskRecord, read_sweep, read_tasks
from ftslurm.scheduler import open_scheduler
from ftslurm.scheduler.protocol import UNKNOWN, JobState
from ftslurm.scheduler.sbatch import NotReachedError, RefusedError
from ftslurm.sweep.look import ask, choose_job, log_of
from ftslurm.sweep.queue import not_queued, queue_left

LOOK_S = 2.0
"""Whether a task that runs is DONE its folder says, without a question to the scheduler."""
LONGEST_LOOK_S = 10.0
LOOK_SHARE = 0.1
"""Of the time at most, where thousands of folders are looked at."""
FIRST_ASK_S = 2.0
LONGEST_ASK_S = 30.0
ASK_AGAIN_S = 5.0
"""Of an end that is believed when it is seen twice."""
BACK_OFF = 1.5
QUEUE_EVERY_S = 60.0
"""Tasks that a limit has left are tried again as soon as one has ended, and so often."""
MOST_HASTENED = 10
"""In one poll: each costs Slurm two commands."""


@dataclass(frozen=True)
class TaskEnd:
    """How a task has ended."""

    number: int
    run_id: str
    finished: bool
    text: str
    attempts: int


@dataclass
class _Task:
    """A task that is followed, as it was seen last."""

    record: TaskRecord
    layout: RunLayout
    belief: Belief
    seen_at: float
    jobs: list[str] = field(default_factory=list)
    job_id: Optional[str] = None
    state: JobState = JobState(UNKNOWN)
    hastened: bool = False
    end: Optional[TaskEnd] = None

    @property
    def is_plain(self) -> bool:
        """It waits or runs, as the scheduler has it: not over, whatever its files say."""
        state = self.state
        return (state.is_waiting or state.is_running or state.is_ending) and not state.is_held


def follow(
    layout: SweepLayout,
    *,
    say: Callable[[str], None],
    numbers: Optional[Sequence[int]] = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[TaskEnd]:
    """How the tasks, of `numbers` or all, have ended, by number. KeyboardInterrupt, once it is said
    how to look later: the sweep goes on without whoever followed it."""
    follower = Follower(layout, say, numbers, sleep=sleep, clock=clock)
    try:
        return follower.follow()
    except KeyboardInterrupt:
        for line in follower.farewell():
            say(line)
        raise


class Follower:
    def __init__(
        self,
        layout: SweepLayout,
        say: Callable[[str], None],
        numbers: Optional[Sequence[int]] = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout, self.say, self.sleep, self.clock = layout, say, sleep, clock
        self.scheduler = read_sweep(layout).scheduler
        wanted = None if numbers is None else set(numbers)
        self.tasks = [
            _Task(record, layout.task(record.number), Belief(self.scheduler), clock())
            for record in read_tasks(layout)
            if wanted is None or record.number in wanted
        ]
        self.numbers = [task.record.number for task in self.tasks]
        self.tried_at: Optional[float] = None
        self.ended_when_tried = 0
        self.said: set[str] = set()

    def follow(self) -> list[TaskEnd]:
        said, ask_s, ask_at = "", FIRST_ASK_S, self.clock()
        while True:
            self._queue_left()
            began = self.clock()
            if began >= ask_at:
                self._ask()
                self._hasten()
                ask_at, ask_s = began + ask_s, min(LONGEST_ASK_S, ask_s * BACK_OFF)
                if any(task.belief.bad_end for task in self._live()):
                    ask_at = min(ask_at, began + ASK_AGAIN_S)
            else:
                self._look_for_done()
            counts = self._counts()
            if counts != said:
                self.say(counts)
            said = counts
            ends = [task.end for task in self.tasks if task.end is not None]
            if len(ends) == len(self.tasks):
                return ends
            now = self.clock()
            pause_s = min(LONGEST_LOOK_S, max(LOOK_S, (now - began) / LOOK_SHARE))
            if not any(task.state.is_running for task in self._live()):
                pause_s = LONGEST_LOOK_S
            self.sleep(max(0.1, min(pause_s, ask_at - now)))

    def farewell(self) -> list[str]:
        name = shlex.quote(str(self.layout.root))
        lines = [f"detached, the sweep goes on: ftslurm status {name}"]
        left = len(not_queued(self.layout, self.numbers))
        if left:
            lines.append(f"{left} tasks are not queued yet; queue them with ftslurm resume {name}")
        return lines

    def _live(self) -> list[_Task]:
        return [task for task in self.tasks if task.end is None]

    def _counts(self) -> str:
        states = [task.state for task in self._live() if task.job_id is not None]
        running = sum(state.is_running or state.is_ending for state in states)
        ends = [task.end for task in self.tasks if task.end is not None]
        done = sum(end.finished for end in ends)
        waiting = len(self.tasks) - len(ends) - running
        failed = len(ends) - done
        return (
            f"{done} of {len(self.tasks)} done, {running} running, {waiting} waiting, "
            f"{failed} failed"
        )

    def _look_for_done(self) -> None:
        for task in self._live():
            if not task.is_plain or task.state.is_waiting:
                continue
            with contextlib.suppress(OSError):  # then the next question tells
                if is_listed(task.layout.done):
                    self._end_if_over(task, read_view(task.layout, "", task.state, whole=False))

    def _ask(self) -> None:
        for task in self._live():
            if not task.is_plain:
                task.jobs = [job.job_id for job in read_jobs(task.layout)]
        # A task may be over with no job that the scheduler knows, so those are looked at as well.
        states = ask(
            self.layout, self.scheduler, {task.record.number: task.jobs for task in self._live()}
        )
        for task in self._live():
            try:
                self._judge(task, states[task.record.number])
            except OSError as error:
                # Files are replaced while they are read (ESTALE on NFS).
                if self.clock() - task.seen_at > UNSEEN_S[self.scheduler]:
                    raise RunError(
                        f"`{task.layout.root}` can no longer be read ({error}); look with `ftslurm "
                        "status` when its file system is back"
                    ) from None

    def _judge(self, task: _Task, states: dict[str, JobState]) -> None:
        before = task.state
        if task.job_id in states:
            task.state = states[task.job_id]
        if not (task.is_plain and before == task.state):
            task.job_id = choose_job(task.layout, states)
            task.state = states[task.job_id] if task.job_id else JobState(UNKNOWN)
        now = self.clock()
        if task.is_plain:
            task.belief.bad_end, task.seen_at = None, now
            return
        self._end_if_over(task, read_view(task.layout, task.job_id or "", task.state, whole=False))

    def _end_if_over(self, task: _Task, view: View) -> None:
        now = self.clock()
        if view.done or task.job_id is not None:
            end = task.belief.of(view, now)
        else:
            end = self._end_of_unqueued()
        if task.state.is_known or task.job_id is None:
            task.seen_at = now
        elif end is None and now - task.seen_at > UNSEEN_S[self.scheduler]:
            end = out_of_sight(view)
        if end is not None:
            self._end(task, end, log_of(self.layout, task.record.number, view))

    def _end_of_unqueued(self) -> Optional[Ending]:
        if self.layout.closed.exists():
            return Ending(False, 0, "was not queued: the sweep was cancelled")
        return None

    def _end(self, task: _Task, end: Ending, log: str) -> None:
        record = task.record
        task.end = TaskEnd(record.number, record.run_id, end.finished, end.text, end.attempts)
        if not end.finished:
            overrides = " ".join(record.overrides)
            self.say(f"task {record.number} ({overrides}) {end.text}; see {self.layout.root / log}")

    def _queue_left(self) -> None:
        ended = sum(task.end is not None for task in self.tasks)
        now = self.clock()
        waits = [task for task in self._live() if task.job_id is None]
        if not waits or self.scheduler == "local" or self.layout.closed.exists():
            return
        room = ended - self.ended_when_tried
        is_due = self.tried_at is None or now - self.tried_at >= QUEUE_EVERY_S
        if not (is_due or room):
            return
        left = [task.record.number for task in waits if not read_jobs(task.layout)]
        # Slurm takes an array whole or not at all: to ask for what has no room costs calls.
        asked = left if is_due else left[:room]
        self.tried_at, self.ended_when_tried = now, ended
        if asked:
            self._queue(asked, alive=len(self._live()) - len(left))

    def _queue(self, asked: Sequence[int], *, alive: int) -> None:
        try:
            with queueing(self.layout):
                taken = queue_left(self.layout, asked, alive=alive)
        except (RunError, SchedulerError) as error:
            if isinstance(error, RefusedError) and not isinstance(error, NotReachedError):
                self._refuse(asked, str(error))
            else:
                self._say_once(f"{len(asked)} tasks are not queued yet: {error}")
        else:
            if taken < len(asked):
                self._say_once("some tasks are not queued yet, Slurm takes no more jobs now")

    def _say_once(self, text: str) -> None:
        if text not in self.said:
            self.say(text)
        self.said.add(text)

    def _refuse(self, left: Sequence[int], why: str) -> None:
        """Slurm does not take them at all, now or later."""
        for task in self._live():
            if task.record.number in left and not read_jobs(task.layout):
                self._end(task, Ending(False, 0, f"was not queued: {why}"), "submit")

    def _hasten(self) -> None:
        """Once for each wait: asking again would put the start off again."""
        asked = 0
        for task in self._live():
            if not (task.state.word == "PENDING" and task.state.reason == "BeginTime"):
                task.hastened = False
                continue
            if task.hastened or asked == MOST_HASTENED or not attempts_of(task.layout):
                continue
            asked += 1
            scheduler = open_scheduler(self.scheduler, run_dir=task.layout.root)
            try:
                task.hastened = scheduler.hasten(task.job_id or "")
            except SchedulerError:
                return  # they start all the same, only later; the next look asks again
