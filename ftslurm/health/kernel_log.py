"""What the kernel log has said since the last look: from a file of syslog's, or from /dev/kmsg.

Bounded in time and memory, however much there is; what there was no time for comes with the next
look. A line counts once: the cursor tells where the last look ended, and after a restart of the
node, what was written before it is old. Nothing is written here, and the clock's jumps do not
matter to a cursor: it counts bytes and record numbers.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from ftslurm.health.kernel_file import Place, read_file
from ftslurm.health.kernel_line import KernelEvent
from ftslurm.health.kernel_tally import Tally
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
)

SOURCE = "kernel_log"

_RECORD_BYTES = 8192
"""/dev/kmsg says EINVAL to a buffer smaller than its record (CONSOLE_EXT_LOG_MAX)."""


@dataclass(frozen=True)
class Cursor:
    """Where a look ended: `offset` and `mark` in a file, `seq` the newest record of /dev/kmsg."""

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
    tally = Tally(boot_at, now, is_new_boot=cursor is None or cursor.boot_id != boot_id)
    deadline = clock() + budget_s
    try:
        # Not blocking: a FIFO without a writer would else hold the probe for ever (fifo(7)).
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            end, text = _read(path, fd, begin, boot_id, tally, lambda: clock() < deadline)
        finally:
            os.close(fd)
    except OSError as error:
        return NewEvents((), begin, (Failure(SOURCE, f"cannot read `{path}`: {error.strerror}"),))
    texts = [text, tally.complaint()]
    failures = tuple(Failure(SOURCE, f"`{path}`: {one}") for one in texts if one)
    return NewEvents(tally.events(), end, failures)


def _read(
    path: Path, fd: int, begin: Cursor, boot_id: str, tally: Tally, has_time: Callable[[], bool]
) -> tuple[Cursor, str]:
    if stat.S_ISCHR(os.fstat(fd).st_mode):
        seq = begin.seq if begin.boot_id == boot_id else -1  # the records of a boot begin anew
        seq, text = read_kmsg(lambda: os.read(fd, _RECORD_BYTES), seq, tally, has_time)
        return Cursor(boot_id, seq=seq), text
    place = Place(begin.offset, begin.mark)
    place, text = read_file(path, fd, place, tally.go_on_from, tally.add_all, has_time)
    return Cursor(boot_id, place.offset, place.mark), text


def read_kmsg(
    read: Callable[[], bytes], seq: int, tally: Tally, has_time: Callable[[], bool]
) -> tuple[int, str]:
    """Records after `seq`, one a read, from the oldest that the kernel still has. The newest one's
    number comes back, and in words what is missing."""
    newest, missed, is_at_end = seq, 0, False
    while has_time():
        try:
            record = read()
        except BlockingIOError:
            is_at_end = True
            break
        except OSError as error:
            # Overwritten while it was read: the next read gives the oldest one that is left.
            if error.errno in (errno.EPIPE, errno.EINVAL):
                continue
            raise
        if not record:
            is_at_end = True
            break
        number = _sequence(record)
        if number is None or number <= newest:
            continue
        missed += max(0, number - newest - 1) if newest >= 0 else 0
        newest = number
        tally.add_all([record.split(b"\n", 1)[0]])
    texts = [f"{missed} records were overwritten before they were read"] if missed else []
    if not is_at_end:
        texts.append(f"read to record {newest} in the time there was; the rest comes later")
    return newest, "; ".join(texts)


def _sequence(record: bytes) -> Optional[int]:
    parts = record[:64].split(b",", 2)
    return int(parts[1]) if len(parts) == 3 and parts[1].isdigit() else None


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
