"""The runs and sweeps that lie in one folder, newest first.

Reads only. A folder whose name begins with a dot is one that a submission builds, or was killed at:
it is no run. What is renamed or removed while it is looked for is passed over, and so is what may
not be looked into.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from ftslurm.files import list_folder
from ftslurm.run.layout import RunLayout


def newest_runs(runs_dir: Path, most: int, *, with_tasks: bool = False) -> list[RunLayout]:
    """`with_tasks`: those of sweeps too, of which there may be thousands."""
    found = []
    for folder in _folders(runs_dir):
        frozen_at = _changed_at(folder / "run.json")
        if frozen_at is not None:
            found.append((frozen_at, folder))
        elif with_tasks and _changed_at(folder / "sweep.json") is not None:
            tasks = ((_changed_at(task / "run.json"), task) for task in _folders(folder))
            found += [(at, task) for at, task in tasks if at is not None]
    found.sort(reverse=True)
    return [RunLayout(folder) for _, folder in found[:most]]


def newest_folders(runs_dir: Path, most: int) -> list[tuple[Path, bool]]:
    """(folder, is it a sweep's) of runs and of sweeps, a sweep's tasks left to it."""
    found = []
    for folder in _folders(runs_dir):
        frozen_at = _changed_at(folder / "run.json")
        sweep_at = None if frozen_at is not None else _changed_at(folder / "sweep.json")
        if frozen_at is not None:
            found.append((frozen_at, folder, False))
        elif sweep_at is not None:
            found.append((sweep_at, folder, True))
    found.sort(reverse=True)
    return [(folder, is_sweep) for _, folder, is_sweep in found[:most]]


def _folders(root: Path) -> Iterator[Path]:
    try:
        names = list_folder(root)
    except OSError:
        return
    for name in names:
        if not name.startswith("."):
            yield root / name


def _changed_at(path: Path) -> Optional[float]:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
