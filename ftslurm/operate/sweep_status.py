"""`ftslurm status SWEEP`: where each task stands, as a table that stays readable with a thousand.

Reads only, and asks the scheduler once. `--json` carries every task with all that is known of it.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_lock import is_closed
from ftslurm.run.sweep_record import format_numbers
from ftslurm.run.value import plain
from ftslurm.sweep.look import (
    CANCELLED,
    DONE,
    FAILED,
    HELD,
    NOBODY_KNOWS,
    NOT_QUEUED,
    ON_PAUSE,
    OVER,
    RUNNING,
    STATES,
    WAITING,
    SweepLook,
    TaskLook,
    look,
)

FEW = 40
"""Of so many tasks each has its line."""
LONGEST_OVERRIDES = 60
LONGEST_VALUE = 24
LONGEST_STATE = 40

_ALWAYS = (RUNNING, WAITING, FAILED)
"""States that are told even where there are none."""
_FOLDED = (DONE, WAITING, NOT_QUEUED, CANCELLED)
"""States of which tasks are named together, where there are many."""


def status_of_sweep(layout: SweepLayout, *, as_json: bool, show_all: bool) -> str:
    seen = look(layout)
    if as_json:
        return json.dumps(
            {
                "schema_version": 1,
                "sweep_dir": str(layout.root),
                "closed": is_closed(layout),
                **dataclasses.asdict(seen.record),
                "counts": seen.counts,
                "tasks": [_as_json(task) for task in seen.tasks],
            },
            indent=1,
            sort_keys=True,
        )
    return "\n".join(render(layout, seen, show_all=show_all))


def _as_json(task: TaskLook) -> dict[str, Any]:
    """With its value as it is in value.json: others read no NaN."""
    return {**dataclasses.asdict(task), "value": plain(task.value)}


def render(layout: SweepLayout, seen: SweepLook, *, show_all: bool) -> Iterator[str]:
    yield f"{seen.record.sweep_id}: {_headline(seen)}"
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seen.record.created_at))
    yield f"since {began}: {shlex.join(seen.record.command)}"
    if is_closed(layout):
        yield "it was cancelled or stopped, nothing more of it is queued"
    told, more, folded = _chosen(seen.tasks, show_all=show_all)
    yield from _table(told, _varied(seen.tasks))
    if more:
        yield f"and {more} more"
    yield from _folded(folded)
    yield from _failures(layout, [task for task in told if task.state in (FAILED, HELD)])
    yield from _notes(seen.of(DONE, NOT_QUEUED, NOBODY_KNOWS))
    name = shlex.quote(str(layout.root))
    if seen.of(*OVER, NOT_QUEUED, HELD, ON_PAUSE, NOBODY_KNOWS):
        yield f"`ftslurm resume {name}` lets what is not done and not alive go on"
    if folded or more:
        yield f"`ftslurm status {name} --all` shows every task"


def _chosen(
    tasks: Sequence[TaskLook], *, show_all: bool
) -> tuple[list[TaskLook], int, list[TaskLook]]:
    """(those that have a line each, how many more there are, those that are named together). Where
    not all have a line, one that runs well gives way to one that does not."""
    if show_all or len(tasks) <= FEW:
        return list(tasks), 0, []
    folded = [task for task in tasks if task.state in _FOLDED]
    single = [task for task in tasks if task.state not in _FOLDED]
    told = sorted(single, key=lambda task: task.state == RUNNING)[:FEW]
    return sorted(told, key=lambda task: task.number), len(single) - len(told), folded


def _headline(seen: SweepLook) -> str:
    counts = seen.counts
    told = [f"{counts[DONE]} of {len(seen.tasks)} done"]
    told += [
        f"{counts[state]} {state}"
        for state in STATES
        if state != DONE and (counts[state] or state in _ALWAYS)
    ]
    return ", ".join(told)


def _varied(tasks: Sequence[TaskLook]) -> dict[int, str]:
    """Task -> those of its overrides that not all have: what they share is in the command."""
    if len(tasks) < 2:
        return {task.number: " ".join(task.overrides) for task in tasks}
    shared = set(tasks[0].overrides).intersection(*(task.overrides for task in tasks))
    return {
        task.number: " ".join(word for word in task.overrides if word not in shared)
        for task in tasks
    }


def _table(tasks: Sequence[TaskLook], overrides: dict[int, str]) -> Iterator[str]:
    if not tasks:
        return
    head = ("task", "overrides", "state", "step", "attempts", "job", "value")
    rows = [head, *(_row(task, overrides[task.number]) for task in tasks)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    for row in rows:
        cells = [
            cell.rjust(width) if place in (0, 3, 4) else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths))
        ]
        yield "  ".join(cells).rstrip()


def _row(task: TaskLook, overrides: str) -> tuple[str, ...]:
    step = "" if task.step is None else f"{task.step}/{task.steps}"
    return (
        str(task.number),
        _cut(overrides, LONGEST_OVERRIDES),
        _cut(_state(task), LONGEST_STATE),
        step,
        str(task.attempts),
        task.job_id or "",
        _cut(_value(task.value), LONGEST_VALUE),
    )


def _state(task: TaskLook) -> str:
    """With the scheduler's word why it waits, or that it is being torn down; why one has failed is
    told below the table."""
    if task.reason and task.state in (RUNNING, WAITING):
        return f"{task.state} ({task.reason})"
    return task.state


def _value(value: Any) -> str:
    return "" if value is None else json.dumps(value)


def _folded(tasks: Sequence[TaskLook]) -> Iterator[str]:
    """Those that have no line of their own, a line for each state."""
    for state in _FOLDED:
        numbers = [task.number for task in tasks if task.state == state]
        if numbers:
            yield f"{state}: {len(numbers)} tasks ({_cut(format_numbers(numbers), 80)})"


def _failures(layout: SweepLayout, tasks: Sequence[TaskLook]) -> Iterator[str]:
    for task in tasks:
        yield f"task {task.number} {task.state}: {task.reason or 'nobody has said why'}"
        yield f"  see {layout.root / task.log}"


def _notes(tasks: Sequence[TaskLook]) -> Iterator[str]:
    """What there is to say of tasks that have neither failed nor run; the same of many, once."""
    numbers: dict[str, list[int]] = {}
    for task in tasks:
        if task.reason:
            numbers.setdefault(task.reason, []).append(task.number)
    for reason, same in numbers.items():
        which = "task" if len(same) == 1 else "tasks"
        yield f"{which} {_cut(format_numbers(same), 80)}: {reason}"


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
