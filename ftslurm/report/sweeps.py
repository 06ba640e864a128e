"""The sweeps of a report: which task a run is, what it came to, and all tasks of one together.

Reads the tasks of a sweep once and the value of a run; what cannot be read is noted. Nobody has
written down whether a small value is good or a large one: the lowest and the highest are told.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import FtslurmError
from ftslurm.report.jobs import JobReport, SweepTask
from ftslurm.report.text import clip
from ftslurm.run.layout import RunLayout
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import TaskRecord, format_numbers, read_tasks
from ftslurm.run.value import plain, read_value

_FAILED = ("failed", "timeout")
_TOLD = 60
"""Characters of one text at most."""


@dataclass
class SweepReport:
    """What is told of its tasks, summed up."""

    sweep_dir: str
    tasks: int
    """All that were launched, also those of which nothing is told."""
    states: dict[str, int] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)
    lowest: Optional[SweepTask] = None
    """By value; None: no task has come to a number yet."""
    highest: Optional[SweepTask] = None

    @property
    def sweep_id(self) -> str:
        return Path(self.sweep_dir).name

    def add(self, task: SweepTask, state: str) -> None:
        self.states[state] = self.states.get(state, 0) + 1
        if state in _FAILED:
            self.failed.append(task.number)
        if not _is_number(task.value):
            return
        if self.lowest is None or task.value < self.lowest.value:
            self.lowest = task
        if self.highest is None or task.value > self.highest.value:
            self.highest = task


class Sweeps:
    """Those whose tasks have been met; `notes` takes what could not be read."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes
        self._tasks: dict[Path, dict[str, TaskRecord]] = {}
        self._shared: dict[Path, set[str]] = {}
        """Overrides that all tasks of a sweep have."""
        self._found: dict[str, SweepReport] = {}

    @property
    def found(self) -> list[SweepReport]:
        return list(self._found.values())

    def task_of(self, folder: Path) -> Optional[SweepTask]:
        """None: the run is none of a sweep's."""
        folder = folder.resolve()
        task = self._tasks_of(SweepLayout(folder.parent)).get(folder.name)
        if task is None:
            return None
        try:
            value = plain(read_value(RunLayout(folder)))
        except (FtslurmError, OSError, KeyError) as error:
            self._notes.append(f"the value of run `{folder}` is left out: {error}")
            value = None
        return SweepTask(str(folder.parent), task.number, self._varied(folder), value)

    def count(self, report: JobReport) -> None:
        task = report.sweep
        if task is not None:
            sweep_dir = task.sweep_dir
            if sweep_dir not in self._found:
                self._found[sweep_dir] = SweepReport(sweep_dir, len(self._tasks[Path(sweep_dir)]))
            self._found[sweep_dir].add(task, report.state)

    def _varied(self, folder: Path) -> list[str]:
        tasks, shared = self._tasks[folder.parent], self._shared[folder.parent]
        words = tasks[folder.name].overrides
        return [word for word in words if word not in shared or len(tasks) == 1]

    def _tasks_of(self, sweep: SweepLayout) -> dict[str, TaskRecord]:
        if sweep.root not in self._tasks:
            self._tasks[sweep.root] = {}
            try:
                if sweep.sweep_json.is_file():
                    tasks = read_tasks(sweep)
                    self._tasks[sweep.root] = {task.run_id: task for task in tasks}
                    words = [set(task.overrides) for task in tasks]
                    self._shared[sweep.root] = set.intersection(*words) if words else set()
            except (FtslurmError, OSError, KeyError, ValueError) as error:
                self._notes.append(f"the tasks of sweep `{sweep.root}` are not known: {error}")
        return self._tasks[sweep.root]


def sweep_record(sweep: SweepReport) -> dict[str, Any]:
    return {**asdict(sweep), "sweep_id": sweep.sweep_id}


def sweep_head(sweep_dir: str) -> str:
    """Above those of its tasks that are listed; empty: the runs below are no tasks."""
    return clip(f"sweep {Path(sweep_dir).name}:" if sweep_dir else "of no sweep:", 200)


def sweep_lines(sweep: SweepReport) -> Iterator[str]:
    """All its tasks in a few lines."""
    told = [f"{count} {state}" for state, count in sorted(sweep.states.items())]
    left = sweep.tasks - sum(sweep.states.values())
    told += [f"{left} not in this report"] if left else []
    yield clip(f"sweep {sweep.sweep_id}, {sweep.tasks} tasks: {', '.join(told)}", 200)
    if sweep.failed:
        yield f"  failed tasks   {clip(format_numbers(sweep.failed), _TOLD)}"
    for word, task in (("lowest", sweep.lowest), ("highest", sweep.highest)):
        if task is not None:
            yield f"  {word + ' value':14} {_shown(task.value)}, {task_name(task)}"


def task_name(task: SweepTask) -> str:
    return f"task {task.number} ({clip(' '.join(task.overrides), _TOLD)})"


def value_lines(task: Optional[SweepTask]) -> Iterator[str]:
    if task is not None and task.value is not None:
        yield f"    value {_shown(task.value)}"


def _shown(value: Any) -> str:
    return clip(json.dumps(value), _TOLD)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
