"""Every path inside a sweep's folder, computed, and where a sweep or a task of one is looked for.

A sweep is a folder of run directories with a little beside them; a task of it is a run like any
other. No I/O but the look whether a folder is there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ftslurm.errors import RunError
from ftslurm.run.layout import RunLayout

RUNS = Path("runs")
"""Where a run or sweep that is named by its id alone is looked for."""

_TASK = re.compile(r"^(.+)-(\d{4,})$")


@dataclass(frozen=True)
class SweepLayout:
    """Paths of one sweep."""

    root: Path

    @property
    def sweep_id(self) -> str:
        return self.root.name

    @property
    def sweep_json(self) -> Path:
        return self.root / "sweep.json"

    @property
    def tasks_jsonl(self) -> Path:
        return self.root / "tasks.jsonl"

    @property
    def arrays_jsonl(self) -> Path:
        return self.root / "arrays.jsonl"

    @property
    def code(self) -> Path:
        """The one snapshot that all tasks share."""
        return self.root / "code"

    @property
    def submit(self) -> Path:
        return self.root / "submit"

    def group_script(self, group: int, offset: int = 0) -> Path:
        """The batch script of the tasks that ask sbatch for the same things; of an array whose
        indexes are not the tasks' numbers a copy, by whose name Slurm tells the array."""
        own = f"-{offset}" if offset else ""
        return self.submit / f"group-{group:03d}{own}.sbatch"

    def group_arguments(self, group: int) -> Path:
        """What sbatch is given with it."""
        return self.submit / f"group-{group:03d}.txt"

    @property
    def lock(self) -> Path:
        """Held by whoever queues tasks."""
        return self.submit / "queue.lock"

    @property
    def line(self) -> Path:
        """Held by the one task that has ended and waits for the lock."""
        return self.submit / "line.lock"

    @property
    def closed(self) -> Path:
        """While it is there no task is queued any more: somebody has cancelled the sweep."""
        return self.submit / "closed"

    def task_id(self, number: int) -> str:
        return task_id(self.sweep_id, number)

    def task(self, number: int) -> RunLayout:
        """The run directory of a task."""
        return RunLayout(self.root / self.task_id(number))


def task_id(sweep_id: str, number: int) -> str:
    """Run id of a task, and name of its folder."""
    return f"{sweep_id}-{number:04d}"


def parse_task_id(run_id: str) -> Optional[tuple[str, int]]:
    """(sweep id, number) of what has the form of a task's id, None for anything else."""
    match = _TASK.match(run_id)
    return (match[1], int(match[2])) if match else None


def places_of_run(name: str) -> list[Path]:
    """Where the run is that is named so: a path, a run id under ./runs, or a task's id there."""
    places = [Path(name), RUNS / name]
    task = parse_task_id(name)
    if task is not None and "/" not in name:
        places.append(RUNS / task[0] / name)
    return places


def place_of_run(name: str) -> Path:
    """The first of them that is a run; where there is none, the path as it was named: what is wrong
    with that is told by whoever reads it. RunError: it may not be read."""
    for place in places_of_run(name):
        try:
            (place / "run.json").stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            run_id = place.absolute().name
            raise RunError(
                f"`{name}` is closed to you, a run directory is its owner's alone; where its owner "
                f"has named a recovery.control_dir you may leave an empty file there, e.g. "
                f"`{run_id}.stop`, and the run obeys"
            ) from None
        return place
    return Path(name)


def find_sweep(name: str) -> Optional[SweepLayout]:
    """The sweep behind a path, or behind a sweep id under ./runs; None: there is none."""
    for root in (Path(name), RUNS / name):
        try:
            (root / "sweep.json").stat()
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        return SweepLayout(root.absolute())
    return None
