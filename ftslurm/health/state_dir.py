"""A folder of small JSON records, written by one user and safe from all others.

Every path is taken from the descriptor of the folder, and no link is ever followed: neither on the
way to the folder, nor at a record, a temporary name or the lock. As root, a folder that anybody
else could change or exchange is refused. A record is replaced in one step and durable on return;
one that is torn or not ours is a FormatError, never a guess.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Optional

from ftslurm.errors import FormatError, SpecError, UsageError
from ftslurm.files import decode_json, encode_json
from ftslurm.health.root_only import others_may_write

RECORD_BYTES = 16 << 20
"""A larger file is none of ours."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}\Z")
_LOCK = "lock"
_TEMPORARY = ".tmp"
_LEFT_BEHIND_S = 3600.0
_TICK_S = 0.02
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class StateDir:
    """The folder at `path`, made where only its last part is missing (`mode` is for that)."""

    def __init__(self, path: Path, *, mode: int = 0o700) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100 (resolve() would follow links)
        try:
            self._fd = _open_folder(self.path, mode)
        except OSError as error:
            raise SpecError(
                f"the state folder `{self.path}` cannot be opened ({error.strerror}); name a "
                "folder by its real path, without links, whose parent is there"
            ) from None

    def __enter__(self) -> StateDir:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    def read_json(self, name: str) -> Optional[dict[str, Any]]:
        """The record; None where there is none, FormatError where there is something else."""
        where = str(self.path / _checked(name))
        try:
            # Not blocking: a FIFO without a writer would else hold the reader (fifo(7)).
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise FormatError(f"`{where}` is a link, not a file of ours; remove it") from None
            raise
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()):
                raise FormatError(f"`{where}` is not a file of ours; remove it")
            if others_may_write(status.st_mode) or status.st_size > RECORD_BYTES:
                raise FormatError(f"`{where}` can be written by others, or is too large; remove it")
            with open(fd, "rb", buffering=0, closefd=False) as stream:
                data = stream.readall()
        finally:
            os.close(fd)
        try:
            return decode_json(data, where=where)
        except RecursionError:
            raise FormatError(f"`{where}` is not a file of ours; remove it") from None

    def write_json(self, name: str, record: dict[str, Any]) -> None:
        """Replace the record; OSError (disk full) leaves the old one as it was."""
        assert "schema_version" in record, f"{name} without schema_version"
        data = encode_json(record)
        temporary = f".{_checked(name)}.{os.urandom(6).hex()}{_TEMPORARY}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=self._fd)
        try:
            with open(fd, "wb") as stream:
                os.fchmod(fd, 0o644)
                stream.write(data)
                stream.flush()
                os.fsync(fd)
            os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._fd)
            raise
        os.fsync(self._fd)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_checked(name), dir_fd=self._fd)

    def names(self) -> list[str]:
        """Of all records, the one written last first."""
        found = [name for name in self._listed() if _NAME.match(name) and name != _LOCK]
        return sorted(found, key=lambda name: -(self.changed_at(name) or 0.0))

    def changed_at(self, name: str) -> Optional[float]:
        """When what is under this name was last written, whatever it is."""
        try:
            return os.stat(_checked(name), dir_fd=self._fd, follow_symlinks=False).st_mtime
        except OSError:
            return None

    @contextlib.contextmanager
    def lock(self, wait_s: float) -> Iterator[bool]:
        """Whether it could be had within `wait_s`. It ends with its holder, also a killed one."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        # For us alone: whoever may open a file may also lock it (flock(2)).
        fd = os.open(_LOCK, flags, 0o600, dir_fd=self._fd)
        try:
            is_held = _flock(fd, time.monotonic() + wait_s)
            if is_held:
                self._sweep()
            yield is_held
        finally:
            os.close(fd)

    def _listed(self) -> list[str]:
        return os.listdir(self._fd)  # noqa: PTH208

    def _sweep(self) -> None:
        """Remove what writers that were killed have left half written."""
        for name in self._listed():
            if not name.endswith(_TEMPORARY):
                continue
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
                if time.time() - status.st_mtime > _LEFT_BEHIND_S:
                    os.unlink(name, dir_fd=self._fd)


def _flock(fd: int, until: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_TICK_S)
        else:
            return True


def _checked(name: str) -> str:
    if not _NAME.match(name):
        raise UsageError(
            f"`{name[:80]}` is no name of a record; letters, digits, `.`, `_` and `-` only"
        )
    return name


def _open_folder(path: Path, mode: int) -> int:
    if os.geteuid() != 0:
        fd = _open_or_make(str(path), mode, None)
        _refuse_foreign(fd, path, path)
        return fd
    fd = os.open("/", _FOLDER)
    here = Path("/")
    for part in path.parts[1:]:
        parent, here = fd, here / part
        try:
            _refuse_foreign(parent, here.parent, path)
            is_last = here == path
            fd = (
                _open_or_make(part, mode, parent)
                if is_last
                else os.open(part, _FOLDER, dir_fd=parent)
            )
        finally:
            os.close(parent)
    try:
        _refuse_foreign(fd, path, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_or_make(name: str, mode: int, parent: Optional[int]) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, mode, dir_fd=parent)
    return os.open(name, _FOLDER, dir_fd=parent)


def _refuse_foreign(fd: int, folder: Path, path: Path) -> None:
    """Whoever can write a folder can exchange what is in it; where it is sticky, as /tmp, only
    what is their own (rename(2))."""
    status = os.fstat(fd)
    is_safe = not others_may_write(status.st_mode, sticky_is_safe=folder != path)
    if status.st_uid in (0, os.geteuid()) and is_safe:
        return
    is_shared = others_may_write(status.st_mode)
    whose = "can be written by others" if is_shared else f"belongs to uid {status.st_uid}"
    raise SpecError(
        f"`{folder}` {whose}, so the state folder `{path}` is not used; give it to root, mode "
        "0755, or set `health.state_dir` or `health.verdict_dir` to a folder of root's alone"
    )
