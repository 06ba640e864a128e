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

_GONE_ON_LINES = 30
"""Of a program's own behind a telling one: what ends a process leaves fewer."""

_RANK_PREFIX = re.compile(r"^(?:\[rank\d+\]:\s?)+")
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")
_ISO = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(Z)?")
_GLOG = re.compile(r"\[?[IWEF](\d\d)(\d\d) (\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?")
# What an end itself leaves behind it: stacks, and words of those who see to the other processes.
_OF_AN_END = re.compile(
    r"\s|\[rank\d+\]|frame #|Thread 0x|.*\bNCCL (INFO|WARN)\b|.*torch/distributed/|"
    r".*ProcessGroup|wandb: |.*[Kk]illing subprocess|.*\bclosing signal\b|[-=*#~_]+$|"
    # glibc's and Open MPI's stacks, and the memory map below them
    r"/\S+\(|[0-9a-f]{6,16}-[0-9a-f]{6,16} |\[[\w.-]+:\d+\]|\*\*\*|PC: @|#\d+ |"
    # tables of what the memory holds, c10's warnings, a tracker's summary
    r"\|[ =-]|\[[WE]\d* |COMET "
)
# Cheap, and true of every line that a row of the table knows: most lines are none.
_PERHAPS = re.compile(
    r"(?i)err|exception|fail|fault|kill|memory|abort|time[d ]?.?out|watchdog|nan\b|\binf\b|"
    r"finite|corrupt|truncat|lost|reset|closed|broken|stale|space|quota|denied|cancel|signal|"
    r"ecc\b|nccl|net/ib|mismatch|evict|transport|peer|spike|"
    r"alloc|terminate called|zip|crc|eof|"
    r"unpickl|invalid load|checksum|digest|free\(|malloc\(|refused|"
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
    pieces = _some(list(_pieces(tail.lines)), MOST_LOOKED_AT)
    telling = [piece for piece in pieces if piece[2] or is_telling(LOG, piece[1])]
    past = _last_past(tail.lines, telling)
    clues = []
    for index, text, context in telling:
        stamp = time_in(text, year_of=tail.written_at)
        line = None if tail.first is None else tail.first + index
        at = tail.written_at if stamp is None else stamp
        is_past = index <= past
        clues.append(Clue(LOG, text, at, rank, node, file, line, context, is_past=is_past))
    return _some(clues, MOST_CLUES)


def _last_past(lines: Sequence[str], telling: Sequence[tuple[int, str, str]]) -> int:
    """Index of the last line behind which the program has gone on; -1: there is none."""
    told: set[int] = set()
    for index, text, context in telling:
        begin = index - context.count("\n")
        told.update(range(begin, index + text.count("\n") + 1))
    left = _GONE_ON_LINES
    for index in range(len(lines) - 1, -1, -1):
        line = lines[index]
        left -= bool(line) and index not in told and not _OF_AN_END.match(line)
        if not left:
            return index
    return -1


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
        if not text.strip() or _TRACEBACK.match(text) or _is_stamped(text):
            break
        kept.append(text)
    return kept


def _is_stamped(text: str) -> bool:
    return bool(_ISO.search(text[:160]) or _GLOG.search(text[:160]))


def time_in(text: str, *, year_of: float) -> Optional[float]:
    """UTC seconds written at the beginning of a line, ISO or glog's. That has no year: it is of the
    year of `year_of`, or of the one before where it would lie ahead of it by more than a day."""
    found = _ISO.search(text[:160])
    if found is not None:
        return _seconds(found[1].replace("T", " "), found[2], is_utc=bool(found[3]))
    found = _GLOG.search(text[:160])
    if found is None:
        return None
    year, day = time.localtime(year_of).tm_year, f"{found[1]}-{found[2]} {found[3]}"
    at = _seconds(f"{year}-{day}", found[4])
    if at is not None and at > year_of + 86400:
        at = _seconds(f"{year - 1}-{day}", found[4])
    return at


def _seconds(stamp: str, fraction: Optional[str], *, is_utc: bool = False) -> Optional[float]:
    try:
        parsed = time.strptime(stamp, "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return None
    seconds = calendar.timegm(parsed) if is_utc else time.mktime(parsed)
    return seconds + (float(f"0.{fraction}") if fraction else 0.0)
