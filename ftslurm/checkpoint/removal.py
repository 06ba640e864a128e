"""Removing a folder; a crash midway never leaves half a step under the name of a whole one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ftslurm.files import fsync_folder, patiently

_PREFIX = ".trash-"


def remove_folder(path: Path) -> None:
    """Take the name away, durably, then the content."""
    trash = path.with_name(f"{_PREFIX}{path.name}-{os.urandom(4).hex()}")
    patiently(lambda: path.rename(trash), path)
    fsync_folder(path.parent)
    shutil.rmtree(trash)


def is_trash(path: Path) -> bool:
    """What a crashed `remove_folder` has left."""
    return path.name.startswith(_PREFIX)


def remove_trash(path: Path) -> None:
    """Finish what it has begun."""
    shutil.rmtree(path)
