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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Optional

from ftslurm.errors import RunError, SchedulerError
from ftslurm.files import is_listed
from ftslurm.recovery.ending import UNSEEN_S, Belief, Ending, View, out_of_sight
from ftslurm.recovery.job_meant import JobsOnRecord
from ftslurm.recovery.on_record import has_begun, jobs_on_record
from ftslurm.recovery.view import read_view
from ftslurm.run.jobs import read_jobs
from ftslurm.run.layout import RunLayout
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_lock import is_closed, queueing
from ftslurm.run.sweep_record import TaskRecord, read_arrays, read_sweep, read_tasks
from ftslurm.run.wording import format_count
from ftslurm.scheduler import open_scheduler
from ftslurm.scheduler.arrays import NO_PLACE, reasons
from ftslurm.scheduler.hasten import hasten_once, waits_for_its_time
from ftslurm.scheduler.protocol import UNKNOWN, JobState
from ftslurm.sweep.look import ask, log_of
from ftslurm.sweep.queue import not_queued, queue_left, room_beside
from ftslurm.sweep.share import use_room, wider

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
    jobs: JobsOnRecord = field(default_factory=JobsOnRecord)
    job_id: Optional[str] = None
    state: JobState = JobState(UNKNOWN)
    hastened: bool = False
    end: Optional[TaskEnd] = None

    @property
    def is_plain(self) -> bool:
        """It waits or runs, as the scheduler has it: not over, whatever its files say."""
        state = self.state
        return (state.is_waiting or state.is_running or state.is_ending) and not state.is_held


def _is_queued_again(task: _Task) -> bool:
    if task.end is None or task.end.finished:
        return False
    jobs = read_jobs(task.layout)
    return bool(jobs) and jobs[-1].job_id != task.job_id


def follow(
    layout: SweepLayout,
    *,
    say: Callable[[str], None],
    numbers: Optional[Sequence[int]] = None,
    refused: Mapping[int, str] = MappingProxyType({}),
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[TaskEnd]:
    """How the tasks, of `numbers` or all, have ended, by number. `refused`: task -> why Slurm has
    not taken it, now or later. KeyboardInterrupt, once it is said how to look later: the sweep goes
    on without whoever followed it."""
    follower = Follower(layout, say, numbers, sleep=sleep, clock=clock)
    try:
        return follower.follow(refused)
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
        record = read_sweep(layout)
        self.scheduler, self.parallelism = record.scheduler, record.parallelism
        wanted = None if numbers is None else set(numbers)
        self.tasks = [
            _Task(record, layout.task(record.number), Belief(self.scheduler), clock())
            for record in read_tasks(layout)
            if wanted is None or record.number in wanted
        ]
        self.numbers = [task.record.number for task in self.tasks]
        self.tried_at: Optional[float] = None
        self.ended_when_tried = 0
        self.ended_when_shared: Optional[int] = None
        self.shared_at: Optional[float] = None
        self.refused: set[int] = set()
        """Tasks that have ended without a job: they left no room."""
        self.is_full = False
        """Slurm had as many jobs as it holds: to ask then costs minutes."""
        self.is_closed = False
        """Somebody has cancelled the sweep; looked for while tasks wait to be queued."""
        self.said: set[str] = set()

    def follow(self, refused: Mapping[int, str] = MappingProxyType({})) -> list[TaskEnd]:
        said, ask_s, ask_at = "", FIRST_ASK_S, self.clock()
        self._refuse(refused)
        while True:
            self._queue_left()
            self._use_room()
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
            lines.append(f"{format_count(left, 'task')} not queued yet: ftslurm resume {name}")
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
                    self._end_if_over(task, read_view(task.layout, JobsOnRecord(), {}, whole=False))

    def _ask(self) -> None:
        for task in self._live():
            if not task.is_plain:
                task.jobs = jobs_on_record(task.layout, self.scheduler)
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
        view = None
        if not (task.is_plain and before == task.state):
            view = read_view(task.layout, task.jobs, states, whole=False)
            task.job_id, task.state = view.job_id or None, view.job
        if view is None or task.is_plain:
            task.belief.bad_end, task.seen_at = None, self.clock()
            return
        self._end_if_over(task, view)

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
        if self.is_closed:
            return Ending(False, 0, "was not queued: the sweep was cancelled")
        return None

    def _end(self, task: _Task, end: Ending, log: str) -> None:
        record = task.record
        task.end = TaskEnd(record.number, record.run_id, end.finished, end.text, end.attempts)
        if not end.finished:
            overrides = " ".join(record.overrides)
            self.say(f"task {record.number} ({overrides}) {end.text}; see {self.layout.root / log}")

    def _queue_left(self) -> None:
        waits = [task for task in self._live() if task.job_id is None]
        if not waits:
            return
        with contextlib.suppress(OSError):  # the next look tells
            self.is_closed = is_closed(self.layout)
        if self.scheduler == "local":
            return
        freed = self._ended() - len(self.refused) - self.ended_when_tried
        is_due = self._is_due(self.tried_at)
        if self.is_closed or not (is_due or freed) or not self._has_room():
            return
        if self.is_full and not is_due:
            return
        left = [task.record.number for task in waits if not read_jobs(task.layout)]
        # Slurm takes an array whole or not at all: to ask for what has no room costs calls.
        asked = left if is_due else left[:freed]
        self.ended_when_tried += freed
        if asked:
            self._queue(asked)
        if is_due:  # else what others leave is never asked for while ours end in time
            self.tried_at = self.clock()

    def _has_room(self) -> bool:
        """By what was seen of the jobs last: Slurm is asked before any is queued beside them."""
        if self.parallelism is None:
            return True
        return room_beside(self.parallelism, read_arrays(self.layout), self._jobs()) > 0

    def _jobs(self) -> list[str]:
        return [task.job_id for task in self._live() if task.job_id is not None]

    def _use_room(self) -> None:
        """Each time that tasks have ended."""
        ended = self._ended()
        if self.parallelism is None or self.scheduler == "local":
            return
        if ended == self.ended_when_shared or not self._is_due(self.shared_at):
            return
        if wider(self.parallelism, read_arrays(self.layout), self._jobs()):
            try:
                with queueing(self.layout):
                    use_room(self.layout, over=self._over())
            except (RunError, SchedulerError, OSError) as error:
                self.shared_at = self.clock()
                self._say_once(f"fewer tasks run at once than may: {error}")
                return
        self.ended_when_shared, self.shared_at = ended, None

    def _ended(self) -> int:
        return len(self.tasks) - len(self._live())

    def _over(self) -> list[int]:
        """Tasks that have ended, less those that somebody has queued again since."""
        ended = [task for task in self.tasks if task.end is not None]
        return [task.record.number for task in ended if not _is_queued_again(task)]

    def _queue(self, asked: Sequence[int]) -> None:
        try:
            with queueing(self.layout):
                outcome = queue_left(self.layout, asked, over=self._over())
        except (RunError, SchedulerError, OSError) as error:
            self._say_once(f"some tasks are not queued yet: {error}")
            return
        self._refuse(outcome.refused)
        self.is_full = NO_PLACE in outcome.left.values()
        if outcome.left:
            self._say_once(f"some tasks are not queued yet: {reasons(outcome.left)}")

    def _is_due(self, tried_at: Optional[float]) -> bool:
        return tried_at is None or self.clock() - tried_at >= QUEUE_EVERY_S

    def _say_once(self, text: str) -> None:
        if text not in self.said:
            self.say(text)
        self.said.add(text)

    def _refuse(self, refused: Mapping[int, str]) -> None:
        for task in self._live():
            if task.record.number in refused:
                self.refused.add(task.record.number)
                why = f"was not queued: {refused[task.record.number]}"
                self._end(task, Ending(False, 0, why), "submit")

    def _hasten(self) -> None:
        asked = 0
        for task in self._live():
            job_id = task.job_id or ""
            if not waits_for_its_time(task.state):
                task.hastened = False
            elif not task.hastened and asked < MOST_HASTENED and has_begun(task.layout, job_id):
                asked += 1
                scheduler = open_scheduler(self.scheduler, run_dir=task.layout.root)
                task.hastened = hasten_once(
                    scheduler, job_id, task.state, is_done=False, has_begun=True
                )
