"""Removing a folder; a crash midway never leaves half a step under the name of a whole one."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from ftslurm.files import fsync_folder

_PREFIX = ".trash-"


def remove_folder(path: Path) -> None:
    """Take the name away, durably, then the content."""
    trash = path.with_name(f"{_PREFIX}{path.name}-{uuid.uuid4().hex[:8]}")
    path.rename(trash)
    fsync_folder(path.parent)
    shutil.rmtree(trash)


def empty_trash(folder: Path) -> None:
    """Finish what a crashed `remove_folder` has begun in `folder`."""
    for path in list(folder.iterdir()):
        if path.name.startswith(_PREFIX):
            shutil.rmtree(path)
