"""Removing a folder; a crash midway never leaves half a step under the name of a whole one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ftslurm.files import fsync_folder, patiently

_PREFIX = ".trash-"
_TRIES = 5


def remove_folder(path: Path) -> None:
    """Take the name away, durably, then the content."""
    trash = path.with_name(f"{_PREFIX}{path.name}-{os.urandom(4).hex()}")
    patiently(lambda: path.rename(trash), path)
    fsync_folder(path.parent)
    remove_trash(trash)


def is_trash(path: Path) -> bool:
    """What a crashed `remove_folder` has left."""
    return path.name.startswith(_PREFIX)


def remove_trash(path: Path) -> None:
    """Finish what it has begun; another thread may be at it as well."""
    for _ in range(_TRIES):
        try:
            return shutil.rmtree(path)
        except FileNotFoundError:
            if not os.path.lexists(path):
                return None
    return shutil.rmtree(path)
