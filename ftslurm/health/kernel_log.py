"""What the kernel log has said since the last look: from a file of syslog's, or from /dev/kmsg.

Bounded in time and memory, however much there is; what there was no time for comes with the next
look. A line counts once: the cursor tells where the last look ended, and after a restart of the
node, what was written before it is old. Nothing is written here, and the clock's jumps do not
matter to a cursor: it counts bytes and record numbers.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Optional

from ftslurm.health.kernel_line import LINE_BYTES, KernelEvent, parse_line, strip_prefix
from ftslurm.health.signals import (
    AER,
    KERNEL_LOST,
    MLX5,
    SXID,
    XID,
    Failure,
    Gpu,
    Signal,
    Value,
    normal_bus,
)

SOURCE = "kernel_log"

_CHUNK_BYTES = 1 << 20
_CARRY_BYTES = 1 << 16
"""A line longer than this is no line."""
_MARK_BYTES = 256
_RECORD_BYTES = 8192
"""/dev/kmsg says EINVAL to a buffer smaller than its record (CONSOLE_EXT_LOG_MAX)."""
_MESSAGES = 4096
_MESSAGES_OF_ONE = 64
_ERRORS = 1024
"""Different messages kept: in all, and of one error of one GPU; different errors counted."""
_SKEW_S = 120.0
_WRAPPED_LINES = 6

_KEY = re.compile(rb"nvidia-nvswitch\d+: |mlx5_core |pcieport |nvidia \d")
_COARSE = re.compile(rb"\S*Xid \([^)]{0,60}\): \d{1,6}|(?:mlx5_core|pcieport|nvidia) \S+")
_WRAPPED = re.compile(rb"NVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?([0-9a-fA-F:.]{7,18})")


@dataclass(frozen=True)
class Cursor:
    """Where a look ended. `mark`: check sum of the bytes before `offset`, by which the file is
    known again under another name; `seq`: newest record of /dev/kmsg."""

    boot_id: str
    offset: int = 0
    mark: int = 0
    seq: int = -1


@dataclass(frozen=True)
class NewEvents:
    """In the order of their last lines."""

    events: tuple[KernelEvent, ...]
    cursor: Cursor
    failures: tuple[Failure, ...] = ()


def parse_cursor(record: Any) -> Optional[Cursor]:
    """None for what is no cursor: the next look is then a first one."""
    try:
        cursor = Cursor(**record)
        numbers = (cursor.offset, cursor.mark, cursor.seq)
        is_whole = isinstance(cursor.boot_id, str) and all(type(one) is int for one in numbers)
    except TypeError:
        return None
    return cursor if is_whole and cursor.offset >= 0 else None


def cursor_record(cursor: Cursor) -> dict[str, Any]:
    return asdict(cursor)


def read_new(
    path: Path,
    cursor: Optional[Cursor],
    *,
    boot_id: str,
    boot_at: Optional[float] = None,
    now: Optional[float] = None,
    budget_s: float = 2.0,
    clock: Callable[[], float] = time.monotonic,
) -> NewEvents:
    """Events since `cursor`; all of this boot where there is none. `boot_at` in UTC seconds."""
    begin = cursor or Cursor(boot_id)
    tally = _Tally(boot_at, now, is_new_boot=cursor is None or cursor.boot_id != boot_id)
    deadline = clock() + budget_s
    try:
        # Not blocking: a FIFO without a writer would else hold the probe for ever (fifo(7)).
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if stat.S_ISCHR(os.fstat(fd).st_mode):
                seq = begin.seq if begin.boot_id == boot_id else -1
                seq, text = _read_kmsg(
                    lambda: os.read(fd, _RECORD_BYTES), seq, tally, lambda: clock() < deadline
                )
                end = Cursor(boot_id, seq=seq)
            else:
                end, text = _read_files(path, fd, begin, tally, lambda: clock() < deadline)
        finally:
            os.close(fd)
    except OSError as error:
        return NewEvents((), begin, (Failure(SOURCE, f"cannot read `{path}`: {error.strerror}"),))
    texts = [text, tally.complaint()]
    failures = tuple(Failure(SOURCE, f"`{path}`: {one}") for one in texts if one)
    return NewEvents(tally.events(), replace(end, boot_id=boot_id), failures)


def _read_files(
    path: Path, fd: int, begin: Cursor, tally: _Tally, has_time: Callable[[], bool]
) -> tuple[Cursor, str]:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "neither a file nor /dev/kmsg")
    text = ""
    if not _is_same(fd, begin):
        older = _rotated(path, begin)
        if older is None:
            text = "it was cut or rotated away; what was written between two looks may be missing"
        else:
            try:
                begin, is_behind = _read_file(older, begin, tally, has_time)
            finally:
                os.close(older)
            if is_behind:
                return begin, _behind(begin)
        begin = Cursor(begin.boot_id)
    end, is_behind = _read_file(fd, begin, tally, has_time)
    return end, (_behind(end) if is_behind else text)


def _behind(cursor: Cursor) -> str:
    return f"read to byte {cursor.offset} in the time there was; the rest comes with the next look"


def _is_same(fd: int, cursor: Cursor) -> bool:
    return os.fstat(fd).st_size >= cursor.offset and _mark(fd, cursor.offset) == cursor.mark


def _mark(fd: int, offset: int) -> int:
    begin = max(0, offset - _MARK_BYTES)
    return zlib.crc32(os.pread(fd, offset - begin, begin))


def _rotated(path: Path, cursor: Cursor) -> Optional[int]:
    """The file that the last look ended in: `kern.log.1` or, with dates, `kern.log-20260901`."""
    names = [
        entry
        for entry in os.scandir(path.parent)
        if entry.name.startswith((f"{path.name}.", f"{path.name}-"))
        and entry.is_file(follow_symlinks=False)
    ]
    names.sort(key=lambda entry: -entry.stat(follow_symlinks=False).st_mtime)
    for entry in names[:4]:
        fd = os.open(entry.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        if _is_same(fd, cursor):
            return fd
        os.close(fd)
    return None


def _read_file(
    fd: int, begin: Cursor, tally: _Tally, has_time: Callable[[], bool]
) -> tuple[Cursor, bool]:
    """Whole lines from `begin` on; a line still being written is left to the next look."""
    offset, carry, is_in_long_line, is_behind = begin.offset, b"", False, False
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
            tally.add_all(lines[1:] if is_in_long_line else lines)
            is_in_long_line = False
        offset, carry = offset + end, data[end:]
        if len(carry) > _CARRY_BYTES:
            offset, carry, is_in_long_line = offset + len(carry), b"", True
    return Cursor(begin.boot_id, offset, _mark(fd, offset)), is_behind


def _read_kmsg(
    read: Callable[[], bytes], seq: int, tally: _Tally, has_time: Callable[[], bool]
) -> tuple[int, str]:
    """Records after `seq`, one a read, from the oldest that the kernel still has."""
    newest, missed = seq, 0
    while has_time():
        try:
            record = read()
        except BlockingIOError:
            break
        except OSError as error:
            # Overwritten while it was read: the next read gives the oldest one that is left.
            if error.errno in (errno.EPIPE, errno.EINVAL):
                continue
            raise
        if not record:
            break
        number = _sequence(record)
        if number is None or number <= newest:
            continue
        missed += max(0, number - newest - 1) if newest >= 0 else 0
        newest = number
        tally.add_all([record.split(b"\n", 1)[0]])
    return newest, f"{missed} records were overwritten before they were read" if missed else ""


def _sequence(record: bytes) -> Optional[int]:
    parts = record[:64].split(b",", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isdigit() else None


@dataclass
class _Entry:
    event: KernelEvent
    line: int
    """The last one that said it."""
    count: int = 1


class _Tally:
    """Counts equal messages instead of keeping them."""

    def __init__(
        self, boot_at: Optional[float], now: Optional[float], *, is_new_boot: bool
    ) -> None:
        self._boot_at = boot_at
        self._now = now
        self._is_new_boot = is_new_boot
        self._line = 0
        self._wrapped: tuple[int, str] = (-_WRAPPED_LINES, "")
        self._clear()

    def _clear(self) -> None:
        self._seen: dict[bytes, _Entry] = {}
        self._of_one: dict[bytes, list[_Entry]] = {}
        self._left_out = 0

    def add_all(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self._line += 1
            # Spelt out: a log may have a million lines, and the prolog five seconds.
            if (
                b"Xid (" in line
                or b"mlx5_core" in line
                or b"rror" in line
                or b"fallen off" in line
                or b"Linux version " in line
            ):
                self._add(line)
            elif b"NVIDIA GPU" in line:
                self._begin_wrapped(line)

    def _begin_wrapped(self, line: bytes) -> None:
        """`NVRM: The NVIDIA GPU 0000:18:00.0`, two lines before what is said of it."""
        match = _WRAPPED.search(line)
        if match is not None:
            self._wrapped = (self._line, normal_bus(match.group(1).decode("ascii")))

    def _add(self, line: bytes) -> None:
        start = line.find(b"NVRM: ")
        if start < 0:
            match = _KEY.search(line)
            start = match.start() if match else 0
        key = line[start : start + LINE_BYTES]
        is_lost = b"fallen off" in key and b"Xid (" not in key
        if is_lost:
            begun, bus = self._wrapped
            bus = bus if self._line - begun < _WRAPPED_LINES else ""
            key += b" " + bus.encode()
        known = self._seen.get(key)
        if known is not None:
            known.count += 1
            known.line = self._line
            return
        if b"Linux version " in line and self._is_boot(line):
            return
        coarse = _coarse(key)
        entries = self._of_one.get(coarse, [])
        if len(entries) >= _MESSAGES_OF_ONE or (entries and len(self._seen) >= _MESSAGES):
            entries[0].count += 1
            entries[0].line = self._line
            return
        event = parse_line(line, boot_at=self._boot_at, now=self._now)
        if event is None or self._is_of_before(event):
            return
        if is_lost and not event.bus:
            event = replace(event, bus=bus)
        if not entries and len(self._of_one) >= _ERRORS:
            self._left_out += 1
            return
        self._seen[key] = _Entry(event, self._line)
        self._of_one[coarse] = [*entries, self._seen[key]]

    def _is_boot(self, line: bytes) -> bool:
        """The kernel's first words: what stands before them in the file is of another boot."""
        message, _ = strip_prefix(line[:LINE_BYTES].decode("utf-8", "replace"))
        is_boot = message is not None and message.startswith("Linux version ")
        if is_boot and self._is_new_boot:
            self._clear()
        return is_boot

    def _is_of_before(self, event: KernelEvent) -> bool:
        if not self._is_new_boot or event.at is None or self._boot_at is None:
            return False
        return event.at < self._boot_at - _SKEW_S

    def events(self) -> tuple[KernelEvent, ...]:
        entries = sorted(self._seen.values(), key=lambda entry: entry.line)
        return tuple(replace(entry.event, count=entry.count) for entry in entries)

    def complaint(self) -> str:
        if not self._left_out:
            return ""
        return f"more than {_ERRORS} different errors; {self._left_out} lines were left out"


def _coarse(key: bytes) -> bytes:
    """What a message is about; a fatal one must not go under among those that are not."""
    match = _COARSE.search(key)
    is_milder = b"onfatal" in key or b"on-fatal" in key or b"on-Fatal" in key or b"=Corr" in key
    return (match.group() if match else key[:60]) + (b"-" if is_milder else b"+")


def signals_of(events: Sequence[KernelEvent], gpus: Sequence[Gpu]) -> list[Signal]:
    """The same as signals, with the GPU where NVML or PCI knows the bus."""
    by_bus: Mapping[str, Gpu] = {gpu.bus: gpu for gpu in gpus}
    return [_signal(event, by_bus) for event in events]


def _signal(event: KernelEvent, by_bus: Mapping[str, Gpu]) -> Signal:
    value: Value = event.number
    if event.kind == KERNEL_LOST:
        value = True
    elif event.kind in (AER, MLX5):
        value = event.severity
    gpu = by_bus.get(event.bus)
    if gpu is None and event.bus and event.kind in (XID, KERNEL_LOST):
        gpu = Gpu(None, "", event.bus)
    return Signal(
        event.kind,
        value,
        gpu=gpu,
        link=event.link,
        at=event.at,
        text=event.text,
        where=f"{event.name} {event.bus}" if event.kind in (AER, MLX5, SXID) else event.name,
        count=event.count,
    )
