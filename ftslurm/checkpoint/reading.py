"""Reading the files of a step: what cannot be read just now is told from what is damaged.

By the cause of the CheckpointError: an OSError as `__cause__` (EIO, ESTALE, EACCES, a timeout ...)
says nothing against the file: the same read may work later. A missing file, or something else in
its place, is damage, and so is all that is wrong with bytes that could be read; such an error has
no cause. Before either is said, a late or stumbling file system has had its time (`patiently`),
which those who look at all files of a step give once for all of them (`Patience`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from ftslurm import faults
from ftslurm.errors import CheckpointError
from ftslurm.files import Patience, patiently

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


class DamagedFile(CheckpointError):
    """The bytes of `name` that came are not those that were saved, by size or digest."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """OSErrors inside become a CheckpointError: "cannot read `what`: ..."."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot read {what}: {error.strerror}") from (
            None if error.errno in _NOT_THERE else error
        )


def read_small(
    path: Path, *, announced: bool = False, patience: Optional[Patience] = None
) -> bytes:
    """A small file; `announced`: another rank has seen it, so it is waited for."""

    def read() -> bytes:
        faults.point("read_step", name=path.name)
        return path.read_bytes()

    with reading(f"`{path}`"):
        return patiently(read, path, announced=announced, patience=patience)


def size_of(path: Path, *, patience: Optional[Patience] = None) -> int:
    """Bytes that can be read of a regular file.

    Opened for it: that makes NFS ask the server (close-to-open), where lstat may be answered from
    attributes that were fetched while another node was still writing.
    """

    def size() -> int:
        faults.point("read_step", name=path.name)
        if not stat.S_ISREG(path.lstat().st_mode):
            raise CheckpointError(f"`{path}` is no regular file")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    with reading(f"`{path}`"):
        return patiently(size, path, patience=patience)


class StepFile:
    """A file of a step that is read in parts. A handle that went stale is opened again."""

    def __init__(self, path: Path, *, patience: Optional[Patience] = None) -> None:
        self._path = path
        self._patience = patience
        self._fd: Optional[int] = None

    def read_at(self, into: memoryview, offset: int) -> int:
        """Fill `into` from `offset`; returns the bytes read, fewer only at the end of the file."""
        return patiently(lambda: self._read(into, offset), self._path, patience=self._patience)

    def forget_cached(self) -> None:
        """Bytes still in memory from the writing would hide what the device really holds."""
        patiently(
            lambda: os.posix_fadvise(self._opened(), 0, 0, os.POSIX_FADV_DONTNEED),
            self._path,
            patience=self._patience,
        )

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _opened(self) -> int:
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        return self._fd

    def _read(self, into: memoryview, offset: int) -> int:
        try:
            faults.point("read_shard", name=self._path.name)
            return read_at(self._opened(), into, offset)
        except OSError:
            self.close()
            raise


def read_at(fd: int, into: memoryview, offset: int) -> int:
    """Fill `into` from `offset`; returns the bytes read, fewer only at the end of the file."""
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done
