"""Whether a program has got anywhere: has anything under RUN/resume changed since an attempt began.

ftslurm sees no step of such a program, so names, sizes and times of its files stand for them. Two
states are compared, never a time with a clock: servers' clocks differ.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from ftslurm.errors import FormatError
from ftslurm.files import read_json, write_json
from ftslurm.run.layout import RunLayout


def note_start(layout: RunLayout, attempt: int) -> None:
    """Rank 0, before its program runs: what the attempt began with."""
    record = {"schema_version": 1, "state": state_of(layout.resume)}
    write_json(layout.attempt(attempt).resume_json, record, durable=False)


def has_progressed(layout: RunLayout, attempt: int) -> bool:
    """Since that attempt began; False when it never came so far."""
    began_with = _start_of(layout, attempt)
    return began_with is not None and state_of(layout.resume) != began_with


def progressed_between(layout: RunLayout, attempts: Sequence[int]) -> list[bool]:
    """For each attempt but the last: whether the next one began with something new. One that never
    came so far began with what the one before it did."""
    starts: list[Optional[str]] = []
    for attempt in attempts:
        began_with = _start_of(layout, attempt)
        starts.append(began_with or (starts[-1] if starts else None))
    pairs = zip(starts, starts[1:])
    return [None not in (before, after) and before != after for before, after in pairs]


def state_of(folder: Path) -> str:
    """Names, sizes and times of all files below, as one digest."""
    lines = []
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place) / name
            try:
                found = path.lstat()
            except FileNotFoundError:
                continue  # replaced while we look
            size_and_time = b" %d %d" % (found.st_size, found.st_mtime_ns)
            lines.append(os.fsencode(path.relative_to(folder)) + size_and_time)
    return f"sha256:{hashlib.sha256(b'|'.join(sorted(lines))).hexdigest()}"


def _start_of(layout: RunLayout, attempt: int) -> Optional[str]:
    try:
        return str(read_json(layout.attempt(attempt).resume_json)["state"])
    except (FileNotFoundError, FormatError):
        return None
