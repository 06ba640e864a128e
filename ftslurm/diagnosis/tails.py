"""The end of a log, read and cut into clues: tracebacks folded, times read, the rest left out.

Reads bytes from the end only, never more than it is told to. Nothing here knows a cause: which
lines are telling is the table's to say.
"""

from __future__ import annotations

import calendar
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional, TypeVar

from ftslurm.diagnosis.classify import is_telling
from ftslurm.diagnosis.finding import Clue
from ftslurm.diagnosis.signatures import LOG

_Item = TypeVar("_Item")

MOST_CLUES = 60
MOST_LOOKED_AT = 400
"""Of one log; of more the first fifth and the last ones."""
TEXT_CHARACTERS = 2000
CONTEXT_CHARACTERS = 8000
_MESSAGE_LINES = 8
"""Of an exception whose message goes on: NCCL's last error is some lines below its type."""

_RANK_PREFIX = re.compile(r"^(?:\[rank\d+\]:\s?)+")
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")
_ISO = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(Z)?")
_GLOG = re.compile(r"\[?[IWEF](\d\d)(\d\d) (\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?")
# Cheap, and true of every line that a row of the table knows: most lines are none.
_PERHAPS = re.compile(
    r"(?i)err|exception|fail|fault|kill|memory|abort|time[d ]?.?out|watchdog|nan\b|\binf\b|"
    r"finite|corrupt|truncat|lost|reset|closed|broken|stale|space|quota|denied|cancel|signal|"
    r"ecc\b|nccl|net/ib|mismatch|evict|transport|peer|spike|"
    r"zip|crc|eof|unpickl|invalid load|checksum|digest|free\(|malloc\(|refused|"
    r"unreachable|no route|already in use|rendezvous"
)


@dataclass(frozen=True)
class Tail:
    lines: list[str]
    first: Optional[int]
    """Number of the first of them in the file, from 1; None: what comes before was not read."""
    written_at: float


def read_tail(path: Path, most_bytes: int) -> Optional[Tail]:
    """None when there is no such file, or it cannot be read."""
    try:
        with path.open("rb", buffering=0) as stream:
            status = os.fstat(stream.fileno())
            skipped = max(0, status.st_size - most_bytes)
            stream.seek(skipped)
            data = b""
            while len(data) < most_bytes:
                more = stream.read(most_bytes - len(data))
                if not more:
                    break
                data += more
    except OSError:
        return None
    lines = data.decode(errors="replace").splitlines()
    # The first line may be the rest of one.
    return Tail(lines[1:] if skipped else lines, None if skipped else 1, status.st_mtime)


def log_clues(tail: Tail, *, rank: Optional[int], node: Optional[str], file: str) -> list[Clue]:
    """The telling lines of a rank's log, in order. A line without a time of its own is as old as
    the log: no younger than that, at least."""
    clues = []
    for index, text, context in _some(list(_pieces(tail.lines)), MOST_LOOKED_AT):
        if not (context or is_telling(LOG, text)):
            continue
        stamp = time_in(text, year_of=tail.written_at)
        line = None if tail.first is None else tail.first + index
        at = tail.written_at if stamp is None else stamp
        clues.append(Clue(LOG, text, at, rank, node, file, line, context))
    return _some(clues, MOST_CLUES)


def _some(items: list[_Item], most: int) -> list[_Item]:
    if len(items) <= most:
        return items
    return [*items[: most // 5], *items[-(most - most // 5) :]]


def _pieces(lines: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """(index, text, traceback that it ends) of exceptions and of lines worth a look."""
    index = 0
    while index < len(lines):
        line = _RANK_PREFIX.sub("", lines[index])
        if _TRACEBACK.match(line):
            end = _end_of_traceback(lines, index)
            if end is not None:
                message = _message(lines, end)
                context = "\n".join(lines[index : end + 1])
                yield end, "\n".join(message)[:TEXT_CHARACTERS], context[-CONTEXT_CHARACTERS:]
                index = end + len(message)
                continue
        elif line.strip() and _PERHAPS.search(line):
            yield index, line[:TEXT_CHARACTERS], ""
        index += 1


def _end_of_traceback(lines: Sequence[str], start: int) -> Optional[int]:
    """Index of the exception's own line; None when the log ends before it."""
    for index in range(start + 1, len(lines)):
        line = _RANK_PREFIX.sub("", lines[index])
        if not line.strip() or line[0] in " \t":
            continue
        return index if _EXCEPTION.match(line) else None
    return None


def _message(lines: Sequence[str], start: int) -> list[str]:
    kept = [_RANK_PREFIX.sub("", lines[start])]
    for line in lines[start + 1 : start + _MESSAGE_LINES]:
        text = _RANK_PREFIX.sub("", line)
        if not text.strip() or _TRACEBACK.match(text) or time_in(text, year_of=0) is not None:
            break
        kept.append(text)
    return kept


def time_in(text: str, *, year_of: float) -> Optional[float]:
    """UTC seconds written at the beginning of a line, ISO or glog's (which has no year)."""
    head = text[:160]
    found = _ISO.search(head)
    if found is not None:
        stamp, fraction, zulu = found[1].replace("T", " "), found[2], found[3]
    else:
        found = _GLOG.search(head)
        if found is None:
            return None
        year = time.localtime(year_of).tm_year
        stamp, fraction, zulu = f"{year}-{found[1]}-{found[2]} {found[3]}", found[4], None
    try:
        parsed = time.strptime(stamp, "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return None
    seconds = calendar.timegm(parsed) if zulu else time.mktime(parsed)
    return seconds + (float(f"0.{fraction}") if fraction else 0.0)
