"""The newest lines of this node's kernel log, with the numbers that the kernel gives them.

Reads /dev/kmsg and never waits for a line that is yet to come.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Optional

KERNEL_LINES = 400
"""Newest lines of the kernel log that are kept."""

KERNEL_BYTES = 64 << 10


def read_kmsg(path: Path) -> tuple[list[dict[str, Any]], str]:
    """The newest lines of the kernel log, each with its number and UTC seconds; or why not."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return [], f"`{path}`: {error.strerror}"
    lines: deque[dict[str, Any]] = deque(maxlen=KERNEL_LINES)
    boot_at = boot_time()
    try:
        while True:
            try:
                record = os.read(fd, 8192)  # one record a read
            except BrokenPipeError:  # overwritten meanwhile; the next read goes on behind it
                continue
            if not record:
                break
            lines.extend(_kmsg_lines(record, boot_at))
    except BlockingIOError:
        pass
    except OSError as error:
        return _newest(lines), f"`{path}`: {error.strerror}"
    finally:
        os.close(fd)
    return _newest(lines), ""


def newest_kernel_line(path: Path = Path("/dev/kmsg")) -> Optional[int]:
    """Its number, by which what comes after it is told; None where the log cannot be read."""
    lines, _ = read_kmsg(path)
    return lines[-1]["seq"] if lines else None


def _newest(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    size = 0
    for line in reversed(list(lines)):
        size += len(line["text"]) + 40
        if size > KERNEL_BYTES:
            break
        kept.append(line)
    return kept[::-1]


def _kmsg_lines(data: bytes, boot_at: Optional[float]) -> list[dict[str, Any]]:
    """`priority,sequence,microseconds,flags;text` and further lines of it after a blank
    (Documentation/ABI/testing/dev-kmsg)."""
    found = []
    for line in data.decode(errors="replace").splitlines():
        head, semicolon, text = line.partition(";")
        fields = head.split(",")
        if not semicolon or len(fields) < 3 or not (fields[1] + fields[2]).isdigit():
            continue
        at = None if boot_at is None else round(boot_at + int(fields[2]) / 1e6, 3)
        found.append({"seq": int(fields[1]), "at": at, "text": text[:1000]})
    return found


def boot_time() -> Optional[float]:
    """UTC seconds of the boot. The kernel log counts from it by a clock of its own that nobody sets
    right (printk's local_clock), so that in weeks its times go off by a minute; suspended time is
    not in it, and no node of a cluster is suspended."""
    try:
        return time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    except OSError:
        return None
