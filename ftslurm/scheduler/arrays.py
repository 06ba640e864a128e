"""Tasks of a sweep as Slurm arrays: asked for, written down, and found again.

Of each call of sbatch there is a line in arrays.jsonl before and one after, so an answer that was
lost with whoever waited for it is looked for, and no task is queued twice. At a limit on jobs as
many are queued as are taken, and the others are left. Whoever calls holds the sweep's lock
(run/sweep_lock.py). No more than that is decided here, and nothing of a run is changed but the
list of its jobs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional

from ftslurm.errors import RunError
from ftslurm.run.jobs import BY_BATCH, BY_SUBMIT, add_job, read_jobs
from ftslurm.run.layout import RunLayout
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import (
    ASKED,
    QUEUED,
    REFUSED,
    ArrayRecord,
    TaskRecord,
    add_array,
    format_numbers,
    read_arrays,
    unanswered,
)
from ftslurm.scheduler.sbatch import LimitError, RefusedError, submit
from ftslurm.scheduler.slurm import TIMEOUT_S, Runner, checked, run_command
from ftslurm.scheduler.slurm_parse import parse_config

TASK_DIGITS = 4
"""Of a task's number in the name of its folder, at least."""

_DEFAULT_ARRAY_SIZE = 1001

_ROW_FORMAT = "%F|%K|%o"
"""squeue -r -o: array, index, script and its arguments; only the last may hold a `|`."""

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


def chunks(numbers: Sequence[int], array_size: int) -> Iterator[Chunk]:
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


def submit_groups(
    layout: SweepLayout,
    tasks: Sequence[TaskRecord],
    *,
    parallelism: Optional[int],
    queued_by: str = BY_SUBMIT,
) -> list[ArrayRecord]:
    """Queue tasks of whichever groups, until Slurm takes no more; what is queued. Errors and
    `parallelism` as in `submit_array`: of several groups each has its share."""
    groups: dict[int, list[int]] = {}
    for task in tasks:
        groups.setdefault(task.group, []).append(task.number)
    queued: list[ArrayRecord] = []
    for group, numbers in groups.items():
        share = parallelism and max(1, parallelism * len(numbers) // len(tasks))
        taken = submit_array(layout, group, numbers, parallelism=share, queued_by=queued_by)
        queued += taken
        if sum(len(array.numbers) for array in taken) < len(numbers):
            break
    return queued


def submit_array(
    layout: SweepLayout,
    group: int,
    numbers: Sequence[int],
    *,
    parallelism: Optional[int],
    queued_by: str = BY_SUBMIT,
    sbatch: Submit = submit,
    run: Runner = run_command,
) -> list[ArrayRecord]:
    """Queue these tasks of a group; what is queued, which may be a part of them or nothing where
    there is a limit on jobs. RunError for a sweep that was cancelled, RefusedError where Slurm does
    not take the group's script at all, UnclearError when nobody can say what became of an array.

    `parallelism`: how many may run at once; of several arrays each has its share, at least one.
    """
    if layout.closed.exists():
        raise RunError(
            f"`{layout.root}` was cancelled, and nothing of it is queued any more; `ftslurm resume "
            f"{shlex.quote(str(layout.root))}` lets it go on"
        )
    if not numbers:
        return []
    array_size = read_array_size(run)
    queued: list[ArrayRecord] = []
    for chunk in chunks(numbers, array_size):
        share = parallelism and max(1, parallelism * len(chunk.numbers) // len(set(numbers)))
        ask = _Ask(layout, group, share, queued_by, sbatch)
        taken = ask.as_many_as_fit(chunk)
        queued += taken
        if sum(len(array.numbers) for array in taken) < len(chunk.numbers):
            break
    return queued


def read_array_size(run: Runner = run_command) -> int:
    """MaxArraySize; RefusedError where it forbids arrays."""
    shown = parse_config(checked(run, ["scontrol", "show", "config"], TIMEOUT_S))
    size = int(shown.get("MaxArraySize") or _DEFAULT_ARRAY_SIZE)
    if size < 1:
        raise RefusedError(
            "MaxArraySize is 0 here, so Slurm takes no job arrays, and a sweep is one; ask an "
            "operator, or submit the runs one by one"
        )
    return size


@dataclass(frozen=True)
class _Ask:
    layout: SweepLayout
    group: int
    parallelism: Optional[int]
    queued_by: str
    sbatch: Submit

    def as_many_as_fit(self, chunk: Chunk) -> list[ArrayRecord]:
        """Slurm takes an array whole or not at all: halves of it are tried until one task alone is
        too much."""
        queued: list[ArrayRecord] = []
        left, size = chunk.numbers, len(chunk.numbers)
        while left:
            part = Chunk(chunk.offset, chunk.pattern, left[:size])
            try:
                queued.append(self._queue(part))
                left = left[size:]
            except LimitError:
                if len(part.numbers) == 1:
                    break
                size = len(part.numbers) // 2
        return queued

    def _queue(self, chunk: Chunk) -> ArrayRecord:
        layout, group, numbers = self.layout, self.group, chunk.numbers
        add_array(layout, ASKED, group, numbers, offset=chunk.offset)
        try:
            array_id = self.sbatch(self._arguments(chunk))
        except RefusedError:
            add_array(layout, REFUSED, group, numbers, offset=chunk.offset)
            raise
        return _note(layout, group, numbers, chunk.offset, array_id, self.queued_by)

    def _arguments(self, chunk: Chunk) -> list[str]:
        layout = self.layout
        at_once = f"%{self.parallelism}" if self.parallelism else ""
        log = f"{layout.root}/{layout.sweep_id}-{chunk.pattern}/submit/%A_%a.out"
        return [
            "--parsable",
            *shlex.split(layout.group_arguments(self.group).read_text()),
            f"--array={chunk.indexes}{at_once}",
            f"--output={log}",
            str(layout.group_script(self.group)),
            str(chunk.offset),
        ]


def _note(
    layout: SweepLayout,
    group: int,
    numbers: Sequence[int],
    offset: int,
    array_id: str,
    queued_by: str,
) -> ArrayRecord:
    # Last the answer: until it is there, the array is looked for again and all its tasks noted.
    for number in numbers:
        job_id = f"{array_id}_{number - offset}"
        add_job(layout.task(number), job_id, scheduler="slurm", queued_by=queued_by)
    return add_array(layout, QUEUED, group, numbers, offset=offset, array_id=array_id)


def find_lost(layout: SweepLayout, *, run: Runner = run_command) -> list[ArrayRecord]:
    """The arrays that were asked for by somebody who did not live to write down the answer, now on
    record; what Slurm has not is on record as refused. SchedulerError when nobody can say.

    Slurm shows jobs for MinJobAge after their end. A task that has begun is told by its own run,
    whose batch script writes the job down, for as long as the run is there.
    """
    arrays = read_arrays(layout)
    lost = unanswered(arrays)
    if not lost:
        return []
    argv = ["squeue", "--noheader", "--me", "--all", "--array", "--states=all"]
    rows = _rows(checked(run, [*argv, f"--format={_ROW_FORMAT}"], TIMEOUT_S))
    known = {array.array_id for array in arrays if array.array_id}
    found: list[ArrayRecord] = []
    for array in lost:
        array_id = _find(layout, array, rows, known)
        if array_id is None:
            add_array(layout, REFUSED, array.group, array.numbers, offset=array.offset)
            continue
        known.add(array_id)
        found.append(_note(layout, array.group, array.numbers, array.offset, array_id, BY_SUBMIT))
    return found


def find_singles(layout: SweepLayout, *, run: Runner = run_command) -> list[str]:
    """Waiting jobs of single tasks that nobody has written down, now on record: successors whose
    submission got no answer. SchedulerError when nobody can say."""
    argv = ["squeue", "--noheader", "--me", "--all", "--states=PENDING", "--format=%i|%o"]
    rows = [line.strip().partition("|") for line in checked(run, argv, TIMEOUT_S).splitlines()]
    found = []
    for job_id, _, command in rows:
        task = RunLayout(Path(command).parent.parent)
        if task.root.parent != layout.root or Path(command) != task.script:
            continue
        if job_id not in {job.job_id for job in read_jobs(task)}:
            add_job(task, job_id, scheduler="slurm", queued_by=BY_BATCH)
            found.append(job_id)
    return found


def _rows(shown: str) -> Mapping[str, dict[str, set[int]]]:
    """Command of the script -> array -> indexes that there are of it."""
    found: dict[str, dict[str, set[int]]] = {}
    for line in shown.splitlines():
        array_id, index, command = [*line.strip().split("|", 2), "", ""][:3]
        if index.isdigit():  # `N/A` is what is left of those that never began
            found.setdefault(command, {}).setdefault(array_id, set()).add(int(index))
    return found


def _find(
    layout: SweepLayout,
    array: ArrayRecord,
    rows: Mapping[str, dict[str, set[int]]],
    known: set[str],
) -> Optional[str]:
    script: Path = layout.group_script(array.group)
    wanted = {number - array.offset for number in array.numbers}
    for array_id, indexes in rows.get(f"{script} {array.offset}", {}).items():
        if array_id not in known and indexes <= wanted:
            return array_id
    for number in array.numbers:
        for job in read_jobs(layout.task(number)):
            array_id, _, index = job.job_id.partition("_")
            if array_id not in known and index == str(number - array.offset):
                return array_id
    return None
