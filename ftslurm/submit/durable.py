"""A whole tree put on the device: one pass after all is written costs the least.

Each file is fsynced once, however many names it has, then each folder. Of many files several are
under way at once: on a file server each waits for an answer of its own, and a journal takes them
together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ftslurm.files import fsync_folder

_AT_ONCE = 8
_FEW = 1000
"""Up to so many files are not worth a thread."""


def make_durable(root: Path) -> None:
    files, folders = _below(root)
    _each(_fsync_file, files)
    _each(fsync_folder, folders)


def _below(root: Path) -> tuple[list[Path], list[Path]]:
    """(files, folders with `root`); what a link names is not ours to make durable."""
    files: dict[int, Path] = {}
    folders = [root]
    for folder in folders:  # grows as they are found
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    files.setdefault(entry.inode(), Path(entry.path))
    return list(files.values()), folders


def _fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _each(work: Callable[[Path], None], paths: Sequence[Path]) -> None:
    if len(paths) <= _FEW:
        for path in paths:
            work(path)
        return
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(work, paths):  # raises what one of them has raised
            pass
