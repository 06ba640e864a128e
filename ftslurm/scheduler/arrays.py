"""Tasks of a sweep as Slurm arrays: asked for, and written down.

Of each call of sbatch there is a line in arrays.jsonl before and one after, so an answer that was
lost with whoever waited for it is looked for (lost_arrays.py), and no task is queued twice. At a
limit on jobs as many are queued as are taken, and the others are left; a group that asks for what
Slurm does not give is refused alone, and only after an hour where Slurm has taken of it before.
Before each call is looked whether somebody has cancelled the sweep. Whoever calls holds the sweep's
lock (run/sweep_lock.py). Nothing of a run is changed but the list of its jobs.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Callable, Optional

from ftslurm.errors import SchedulerError
from ftslurm.files import write_atomic
from ftslurm.run.jobs import BY_SUBMIT, add_job
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_lock import require_open
from ftslurm.run.sweep_record import (
    ASKED,
    FULL,
    LEFT,
    QUEUED,
    REFUSED,
    ArrayRecord,
    TaskRecord,
    add_array,
    add_event,
    format_numbers,
    read_arrays,
)
from ftslurm.scheduler.sbatch import (
    FullError,
    LimitError,
    NotReachedError,
    RefusedError,
    UnclearError,
    submit,
)
from ftslurm.scheduler.slurm import TIMEOUT_S, Runner, checked, run_command
from ftslurm.scheduler.slurm_parse import parse_array_size, parse_config

TASK_DIGITS = 4
"""Of a task's number in the name of its folder, at least."""

AT_LIMIT = "Slurm takes no more jobs of yours just now"
NO_PLACE = "Slurm has as many jobs as it holds just now (MaxJobCount)"
NO_ROOM = "what is queued may run as many tasks at once as `parallelism` allows"

IN_PASSING_S = 3600.0
"""For so long what Slurm has taken of before, and refuses now, is asked for again."""
SAME_S = 600.0
"""Refusals that are further apart say nothing of the time between them."""

Submit = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class Chunk:
    """Tasks whose folders' names begin alike, so that one pattern of sbatch names their logs."""

    offset: int
    """Task number less array index."""
    pattern: str
    """What follows the sweep's id in a folder's name, in sbatch's words: `%4a`, `-1%3a`."""
    numbers: tuple[int, ...]

    @property
    def indexes(self) -> str:
        """As sbatch --array takes them."""
        return format_numbers(number - self.offset for number in self.numbers)


def chunks(numbers: Iterable[int], array_size: int) -> Iterator[Chunk]:
    """Parts that fit into one array each. `array_size`: Slurm's MaxArraySize, one above the highest
    index. An index is the last digits of a task's number: %a can be padded, not added to."""
    digits = len(str(array_size)) - 1
    size = 10**digits
    by_prefix: dict[int, list[int]] = {}
    for number in sorted(set(numbers)):
        by_prefix.setdefault(number // size, []).append(number)
    for prefix, part in by_prefix.items():
        yield Chunk(prefix * size, _pattern(prefix, digits), tuple(part))


def _pattern(prefix: int, digits: int) -> str:
    index = f"%{digits}a" if digits else ""
    if prefix == 0 and digits:
        return f"%{TASK_DIGITS}a"
    return f"{prefix:0{max(TASK_DIGITS - digits, 0)}d}{index}"


def share_of_first(room: Optional[int], sizes: Sequence[int]) -> Optional[int]:
    """How many tasks of the first of these arrays may run at once, so that all of them together run
    no more than `room`: by its size, at least one, and one is kept for each of the others while
    there is room for that. None: as many as it has."""
    if room is None:
        return None
    by_size = room * sizes[0] // sum(sizes)
    return min(room, sizes[0], max(1, min(by_size, room - len(sizes) + 1)))


@dataclass
class Outcome:
    """What has become of tasks that were to be queued."""

    arrays: list[ArrayRecord] = field(default_factory=list)
    singles: list[int] = field(default_factory=list)
    """Tasks that have got a job of their own, in no array."""
    left: dict[int, str] = field(default_factory=dict)
    """Task -> why it is not queued now; later it may be."""
    refused: dict[int, str] = field(default_factory=dict)
    """Task -> why Slurm does not take it, now or later."""

    @property
    def taken(self) -> list[int]:
        """Tasks that are queued."""
        return [*(number for array in self.arrays for number in array.numbers), *self.singles]

    @property
    def is_refused(self) -> bool:
        """Nothing of it is queued, and nothing will be."""
        return bool(self.refused) and not self.taken and not self.left

    def leave(self, numbers: Iterable[int], why: str) -> None:
        self.left.update(dict.fromkeys(numbers, why))

    def refuse(self, numbers: Iterable[int], why: str) -> None:
        self.refused.update(dict.fromkeys(numbers, why))


def reasons(told: Mapping[int, str]) -> str:
    """Of all these tasks, each once."""
    return "; ".join(dict.fromkeys(told.values()))


def submit_groups(
    layout: SweepLayout,
    tasks: Sequence[TaskRecord],
    *,
    room: Optional[int],
    outcome: Outcome,
    queued_by: str = BY_SUBMIT,
    array_size: Optional[int] = None,
    sbatch: Submit = submit,
    run: Runner = run_command,
) -> None:
    """Queue tasks of whichever groups; what has become of them is added to `outcome`. RunError for
    a sweep that was cancelled. SchedulerError, which is no refusal, where nothing is queued yet;
    once something is, the rest is left.

    `room`: how many of them may run at once; None: all. An array knows nothing of the others, so
    each has its share of it, and one that there is no share for is left. `array_size`: Slurm's
    MaxArraySize; None: it is asked.
    """
    if not tasks or room == 0:
        outcome.leave([task.number for task in tasks], NO_ROOM)
        return
    try:
        array_size = _require_arrays(read_array_size(run) if array_size is None else array_size)
    except RefusedError as error:
        outcome.refuse([task.number for task in tasks], str(error))
        return
    except SchedulerError as error:
        if not outcome.taken:
            raise
        outcome.leave([task.number for task in tasks], str(error))
        return
    groups: dict[int, list[int]] = {}
    for task in tasks:
        groups.setdefault(task.group, []).append(task.number)
    parts = [
        _Part(group, chunk)
        for group, numbers in groups.items()
        for chunk in chunks(numbers, array_size)
    ]
    _Queue(layout, room, queued_by, sbatch, outcome, read_arrays(layout)).fill(parts)


def read_array_size(run: Runner = run_command) -> int:
    return parse_array_size(parse_config(checked(run, ["scontrol", "show", "config"], TIMEOUT_S)))


def _require_arrays(size: int) -> int:
    if size < 1:
        raise RefusedError(
            "MaxArraySize is 0 here, so Slurm takes no job arrays, and a sweep is one; ask an "
            "operator, or submit the runs one by one"
        )
    return size


@dataclass(frozen=True)
class _Part:
    group: int
    chunk: Chunk


@dataclass
class _Queue:
    layout: SweepLayout
    room: Optional[int]
    queued_by: str
    sbatch: Submit
    outcome: Outcome
    before: Sequence[ArrayRecord]
    """What is on record, as it was at the beginning."""

    def fill(self, parts: Sequence[_Part]) -> None:
        while parts:
            part = parts[0]
            try:
                why = self._as_many_as_fit(part, [len(one.chunk.numbers) for one in parts])
            except RefusedError as error:
                if isinstance(error, NotReachedError):
                    raise
                same = self._open(one for one in parts if one.group == part.group)
                since = self._refused_since(part.group)
                if since is None:
                    self.outcome.refuse(same, str(error))
                elif time.time() - since < IN_PASSING_S:
                    self.outcome.leave(same, f"Slurm refuses it just now: {error}")
                else:
                    self.outcome.refuse(same, f"Slurm has refused it since {clock(since)}: {error}")
                parts = [one for one in parts if one.group != part.group]
                continue
            if why:
                self.outcome.leave(self._open(parts), why)
                return
            parts = parts[1:]

    def _open(self, parts: Iterable[_Part]) -> list[int]:
        """Their tasks that are not queued."""
        taken = set(self.outcome.taken)
        return [number for part in parts for number in part.chunk.numbers if number not in taken]

    def _as_many_as_fit(self, part: _Part, sizes: Sequence[int]) -> str:
        """Slurm takes an array whole or not at all: halves of it are tried until one task alone is
        too much. Why something is left of it; empty: nothing is."""
        share = share_of_first(self.room, sizes)
        left, why = part.chunk.numbers, ""
        size, growth = self._first_size(part)
        while left:
            if share == 0:
                return why or NO_ROOM
            chunk = Chunk(part.chunk.offset, part.chunk.pattern, left[:size])
            try:
                at_once = self._queue(part.group, chunk, share)
            except FullError:
                return NO_PLACE
            except LimitError:
                why = AT_LIMIT
                if len(chunk.numbers) == 1:
                    return why
                size = len(chunk.numbers) // 2
                continue
            except (NotReachedError, UnclearError) as error:
                if not self.outcome.taken:
                    raise
                return str(error)
            left = left[size:]
            size = size if why else size * growth
            if share is not None and self.room is not None:
                share, self.room = share - at_once, self.room - at_once
        return ""

    def _first_size(self, part: _Part) -> tuple[int, int]:
        """(of the first array that is asked for, how many times larger the next is if it is taken).
        Half of what Slurm had no place for last, as an answer takes minutes then, and the lock is
        let go in between; one task where it has not taken one alone, as a limit may last."""
        whole = len(part.chunk.numbers)
        same = [one for one in self.before if one.group == part.group]
        answers = [one for one in same if one.event in (QUEUED, REFUSED, LEFT, FULL)]
        last = answers[-1] if answers else None
        if last is not None and last.event == FULL:
            return max(1, min(len(last.numbers) // 2, whole)), 2
        if last is not None and last.event == LEFT and len(last.numbers) == 1:
            return 1, whole
        return whole, 1

    def _refused_since(self, group: int) -> Optional[float]:
        """Since when a group is refused of which Slurm has taken tasks before: its partition may be
        drained, or its QOS be edited. None: Slurm has never taken one."""
        same = [one for one in read_arrays(self.layout) if one.group == group]
        taken = [place for place, one in enumerate(same) if one.event == QUEUED]
        if not taken:
            return None
        refused = [one.at for one in same[taken[-1] :] if one.event == REFUSED]
        since = refused[-1]
        for at in reversed(refused):
            since = at if since - at <= SAME_S else since
        return since

    def _queue(self, group: int, chunk: Chunk, share: Optional[int]) -> int:
        """How many of these tasks may run at once."""
        require_open(self.layout)
        at_once = len(chunk.numbers) if share is None else min(share, len(chunk.numbers))
        limit = None if share is None else at_once
        array = add_array(
            self.layout, ASKED, group, chunk.numbers, offset=chunk.offset, at_once=limit
        )
        try:
            array_id = self.sbatch(self._arguments(group, chunk, limit))
        except RefusedError as error:
            add_event(self.layout, event_of(error), array)
            raise
        self.outcome.arrays.append(note_array(self.layout, array, array_id, self.queued_by))
        return at_once

    def _arguments(self, group: int, chunk: Chunk, limit: Optional[int]) -> list[str]:
        layout = self.layout
        script = layout.group_script(group, chunk.offset)
        if chunk.offset and not script.exists():
            write_atomic(script, layout.group_script(group).read_bytes())
        at_once = f"%{limit}" if limit else ""
        log = f"{layout.root}/{layout.sweep_id}-{chunk.pattern}/submit/%A_%a.out"
        return [
            "--parsable",
            *shlex.split(layout.group_arguments(group).read_text()),
            f"--array={chunk.indexes}{at_once}",
            f"--output={log}",
            str(script),
            str(chunk.offset),
        ]


def event_of(error: RefusedError) -> str:
    """What is written down of it."""
    if isinstance(error, FullError):
        return FULL
    return LEFT if isinstance(error, (LimitError, NotReachedError)) else REFUSED


def clock(at: float) -> str:
    """A time as a person is told it."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def note_array(
    layout: SweepLayout, asked: ArrayRecord, array_id: str, queued_by: str
) -> ArrayRecord:
    """Write down the answer to what was asked."""
    # Last the answer: until it is there, the array is looked for again and all its tasks noted.
    queued = replace(asked, array_id=array_id)
    for number in asked.numbers:
        job_id = queued.job_id(number)
        add_job(layout.task(number), job_id, scheduler="slurm", queued_by=queued_by)
    return add_event(layout, QUEUED, queued)
