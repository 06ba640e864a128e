"""The lines that a log file has got since a place in it, also over a rotation of the file.

Reads whole lines only, and only while there is time; the place to go on from comes back. Nothing
is written, and no link is followed to a rotated file.
"""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ftslurm.health.kernel_forged import MESSAGE_BYTES

_CHUNK_BYTES = 1 << 20
_CARRY_BYTES = 1 << 16
"""A line longer than this is no line."""
_MARK_BYTES = 256
_OLDER_FILES = 4


@dataclass(frozen=True)
class Place:
    """`mark`: check sum of the bytes before `offset`, by which the file is known again under
    another name."""

    offset: int = 0
    mark: int = 0


def read_file(
    path: Path,
    fd: int,
    begin: Place,
    recall: Callable[[Iterable[bytes]], None],
    take: Callable[[Iterable[bytes]], None],
    has_time: Callable[[], bool],
) -> tuple[Place, str]:
    """Give `take` what has been written to `path`, open as `fd`, behind `begin`, and `recall` the
    last lines of before. Where it ends is returned, and in words what may be missing."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "neither a file nor /dev/kmsg")
    text = ""
    if not _is_same(fd, begin):
        older = _rotated(path, begin)
        if older is None:
            text = "it was cut or rotated away; what was written between two looks may be missing"
        else:
            try:
                recall(_lines_before(older, begin.offset))
                end, is_behind = _read_lines(older, begin.offset, take, has_time)
            finally:
                os.close(older)
            if is_behind:
                return end, _behind(end)
        begin = Place()
    recall(_lines_before(fd, begin.offset))
    end, is_behind = _read_lines(fd, begin.offset, take, has_time)
    return end, (_behind(end) if is_behind else text)


def _behind(place: Place) -> str:
    return f"read to byte {place.offset} in the time there was; the rest comes with the next look"


def _is_same(fd: int, place: Place) -> bool:
    return os.fstat(fd).st_size >= place.offset and _mark(fd, place.offset) == place.mark


def _mark(fd: int, offset: int) -> int:
    begin = max(0, offset - _MARK_BYTES)
    return zlib.crc32(os.pread(fd, offset - begin, begin))


def _lines_before(fd: int, offset: int) -> list[bytes]:
    """As many as one message may have; a piece of a line in front of them does no harm."""
    begin = max(0, offset - MESSAGE_BYTES)
    return os.pread(fd, offset - begin, begin).split(b"\n")[:-1]


def _rotated(path: Path, place: Place) -> Optional[int]:
    """The file that the last look ended in: `kern.log.1` or, with dates, `kern.log-20260901`."""
    names = [
        entry
        for entry in os.scandir(path.parent)
        if entry.name.startswith((f"{path.name}.", f"{path.name}-"))
        and entry.is_file(follow_symlinks=False)
    ]
    names.sort(key=lambda entry: -entry.stat(follow_symlinks=False).st_mtime)
    for entry in names[:_OLDER_FILES]:
        fd = os.open(entry.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        if _is_same(fd, place):
            return fd
        os.close(fd)
    return None


def _read_lines(
    fd: int, offset: int, take: Callable[[Iterable[bytes]], None], has_time: Callable[[], bool]
) -> tuple[Place, bool]:
    """Whole lines; one still being written is left to the next look. And whether there is more."""
    carry, is_in_long_line, is_behind = b"", False, False
    os.lseek(fd, offset, os.SEEK_SET)
    while True:
        if not has_time():
            is_behind = os.fstat(fd).st_size > offset + len(carry)
            break
        chunk = os.read(fd, _CHUNK_BYTES)
        if not chunk:
            break
        data = carry + chunk
        end = data.rfind(b"\n") + 1
        if end:
            lines = data[: end - 1].split(b"\n")
            take(lines[1:] if is_in_long_line else lines)
            is_in_long_line = False
        offset, carry = offset + end, data[end:]
        if len(carry) > _CARRY_BYTES:
            offset, carry, is_in_long_line = offset + len(carry), b"", True
    return Place(offset, _mark(fd, offset)), is_behind
