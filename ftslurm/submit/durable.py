"""A whole tree put on the device: one pass after all is written costs the least.

Each file is fsynced once, however many names it has, then each folder; an empty one is no more than
its name, which the folder above it keeps. Of many files several are
under way at once: on a file server each waits for an answer of its own, and a journal takes them
together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_AT_ONCE = 8
_FEW = 1000
"""Up to so many files are not worth a thread."""


def make_durable(root: Path) -> None:
    files, folders = _below(os.fspath(root))
    _each(files)
    _each(folders)


def _below(root: str) -> tuple[list[str], list[str]]:
    """(files, folders with `root`); what a link names is not ours to make durable."""
    files: dict[int, str] = {}
    folders, seen = [], [root]
    for folder in seen:  # grows as they are found
        with os.scandir(folder) as entries:
            found = list(entries)
        if found or folder == root:
            folders.append(folder)
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                seen.append(entry.path)
            elif entry.is_file(follow_symlinks=False):
                files.setdefault(entry.inode(), entry.path)
    return list(files.values()), folders


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _each(paths: Sequence[str]) -> None:
    if len(paths) <= _FEW:
        _fsync_all(paths)
        return
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        shares = [pool.submit(_fsync_all, paths[first::_AT_ONCE]) for first in range(_AT_ONCE)]
        for share in shares:
            share.result()  # raises what has been raised there


def _fsync_all(paths: Sequence[str]) -> None:
    for path in paths:
        _fsync(path)
