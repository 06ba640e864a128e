"""What is written down of a sweep: sweep.json, tasks.jsonl, arrays.jsonl.

sweep.json is written first and never changed; the other two are added to, a line each. A task is
in tasks.jsonl before anything of it is queued. Of an array, and of a task that is queued alone,
there is a line before Slurm is asked for it and one after: where the second is missing, Slurm may
have taken it all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Optional

from ftslurm.errors import FormatError, RunError
from ftslurm.files import append_record, append_records, read_json, read_records, write_json
from ftslurm.run.sweep_layout import SweepLayout

# SweepRecord.kind
RUN = "run"
"""The tasks are runs of our own training."""
PROGRAM = "program"
"""The tasks are calls of somebody else's program."""

# ArrayRecord.event
ASKED = "asked"
QUEUED = "queued"
REFUSED = "refused"
"""Slurm does not take such an array."""
LEFT = "left"
"""Slurm has not taken it: a limit on jobs was reached, Slurm was not, or the answer was lost and no
such array was found."""
FULL = "full"
"""The same, as there are as many jobs as Slurm holds: fewer are asked for next time."""
WIDENING = "widening"
"""Slurm is about to be told to run more of its tasks at once."""
WIDENED = "widened"
"""Slurm has been told."""


@dataclass(frozen=True)
class SweepRecord:
    """sweep.json."""

    sweep_id: str
    name: str
    created_at: float
    kind: str
    """run | program"""
    scheduler: str
    """slurm | local"""
    sweeper: str
    """Hydra's word: basic, optuna..."""
    command: tuple[str, ...]
    """What was typed."""
    folder: str
    """Where it was typed."""
    parallelism: Optional[int]
    """How many tasks may run at once; None: as many as there is room for."""
    detach: bool
    """Nobody waits for its values."""


@dataclass(frozen=True)
class TaskRecord:
    """A line of tasks.jsonl."""

    number: int
    run_id: str
    overrides: tuple[str, ...]
    group: int
    """Tasks of one group ask sbatch for the same things."""


@dataclass(frozen=True)
class ArrayRecord:
    """A line of arrays.jsonl: one call of sbatch, and what came of it."""

    event: str
    """asked | queued | refused | left | full | widening | widened"""
    group: int
    numbers: tuple[int, ...]
    """Of the tasks in it."""
    at: float
    offset: int = 0
    """Task number less array index."""
    array_id: Optional[str] = None
    """Of one that is queued."""
    at_once: Optional[int] = None
    """How many of its tasks Slurm runs at once, from then on; None: all."""
    alone: bool = False
    """No array: a job of its own for one task, and `array_id` is that job's."""

    def job_id(self, number: int) -> str:
        """Of a task in it, as Slurm's commands take it."""
        return str(self.array_id) if self.alone else f"{self.array_id}_{number - self.offset}"


def write_sweep(layout: SweepLayout, record: SweepRecord) -> None:
    write_json(layout.sweep_json, {"schema_version": 1, **asdict(record)})


def read_sweep(layout: SweepLayout) -> SweepRecord:
    """FormatError for a record that is not whole, RunError where there is none."""
    try:
        record = read_json(layout.sweep_json)
    except FileNotFoundError:
        raise RunError(
            f"`{layout.sweep_json}` is not there; name a folder made by `ftslurm submit -m`"
        ) from None
    try:
        return _sweep(record)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"`{layout.sweep_json}` lacks a field ({error})") from None


def _sweep(record: dict[str, Any]) -> SweepRecord:
    parallelism = record["parallelism"]
    return SweepRecord(
        sweep_id=str(record["sweep_id"]),
        name=str(record["name"]),
        created_at=float(record["created_at"]),
        kind=str(record["kind"]),
        scheduler=str(record["scheduler"]),
        sweeper=str(record["sweeper"]),
        command=tuple(map(str, record["command"])),
        folder=str(record["folder"]),
        parallelism=None if parallelism is None else int(parallelism),
        detach=bool(record["detach"]),
    )


def add_tasks(layout: SweepLayout, tasks: Iterable[TaskRecord]) -> None:
    """Write tasks down, all in one piece; durable on return."""
    records = [{"schema_version": 1, **asdict(task)} for task in tasks]
    append_records(layout.tasks_jsonl, records, durable=True)


def read_tasks(layout: SweepLayout) -> list[TaskRecord]:
    """All tasks by number; none where nothing was launched."""
    tasks = {
        int(record["number"]): TaskRecord(
            number=int(record["number"]),
            run_id=str(record["run_id"]),
            overrides=tuple(map(str, record["overrides"])),
            group=int(record["group"]),
        )
        for record in read_records(layout.tasks_jsonl)
    }
    return [tasks[number] for number in sorted(tasks)]


def add_array(
    layout: SweepLayout,
    event: str,
    group: int,
    numbers: Sequence[int],
    *,
    offset: int = 0,
    array_id: Optional[str] = None,
    at_once: Optional[int] = None,
    alone: bool = False,
    now: Callable[[], float] = time.time,
) -> ArrayRecord:
    """Write down that sbatch is about to be called, or what it said. The first is durable on
    return: without it the array would be queued twice, while an answer is looked for."""
    array = ArrayRecord(event, group, tuple(numbers), now(), offset, array_id, at_once, alone)
    return _append(layout, array)


def add_event(layout: SweepLayout, event: str, array: ArrayRecord) -> ArrayRecord:
    """Write down what has become of an array."""
    return _append(layout, replace(array, event=event, at=time.time()))


def _append(layout: SweepLayout, array: ArrayRecord) -> ArrayRecord:
    line = {"schema_version": 1, **asdict(array), "tasks": format_numbers(array.numbers)}
    del line["numbers"]
    append_record(layout.arrays_jsonl, line, durable=array.event == ASKED)
    return array


def read_arrays(layout: SweepLayout) -> list[ArrayRecord]:
    """All lines, oldest first; none where nothing was queued."""
    return [
        ArrayRecord(
            event=str(record["event"]),
            group=int(record["group"]),
            numbers=tuple(parse_numbers(str(record["tasks"]))),
            at=float(record["at"]),
            offset=int(record.get("offset") or 0),
            array_id=record.get("array_id"),
            at_once=record.get("at_once"),
            alone=bool(record.get("alone")),
        )
        for record in read_records(layout.arrays_jsonl)
    ]


def unanswered(arrays: Iterable[ArrayRecord]) -> list[ArrayRecord]:
    """Arrays that were asked for and of which nobody has written down what Slurm said."""
    waiting: list[ArrayRecord] = []
    for array in arrays:
        if array.event == ASKED:
            waiting.append(array)
        if array.event in (ASKED, WIDENING, WIDENED):
            continue
        same = [one for one in waiting if (one.group, one.numbers) == (array.group, array.numbers)]
        if same:
            waiting.remove(same[0])
    return waiting


def format_numbers(numbers: Iterable[int]) -> str:
    """`0-5,7`: as sbatch --array takes it."""
    parts: list[str] = []
    first = last = None
    for number in sorted(set(numbers)):
        if last is not None and number == last + 1:
            last = number
            continue
        if first is not None:
            parts.append(f"{first}" if first == last else f"{first}-{last}")
        first = last = number
    if first is not None:
        parts.append(f"{first}" if first == last else f"{first}-{last}")
    return ",".join(parts)


def parse_numbers(text: str) -> list[int]:
    """Of `0-5,7`."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers
