"""A look into an attempt's trace without reading all of it: its ends, one step, some of its steps.

A trace may have millions of rows and stand on storage that is slow, and `status` has to answer at
once: only pieces of the file are read. What is torn counts as absent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Optional

_TAIL_BYTES = 65_536
_ROW_BYTES = 4_096
"""A piece that holds a whole row, whatever a loop has added to it; longer rows are not found."""


def last_row(path: Path) -> Optional[dict[str, Any]]:
    """The last whole row."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _TAIL_BYTES))
            lines = stream.read().splitlines()
    except FileNotFoundError:
        return None
    return next(filter(None, map(_row, reversed(lines))), None)


def first_row(path: Path) -> Optional[dict[str, Any]]:
    """The first whole row."""
    try:
        with path.open("rb") as stream:
            return _row_from(stream, 0)
    except FileNotFoundError:
        return None


def rows_between(path: Path, first: int, last: int) -> Iterator[dict[str, Any]]:
    """Of steps `first` to `last`, both included. The first is found by bisection: the rows of one
    attempt are in the order of their steps."""
    try:
        with path.open("rb") as stream:
            # What cannot be told is taken to lie behind: at worst, more is read and passed over.
            low, high = 0, stream.seek(0, os.SEEK_END)
            while low < high:
                middle = (low + high) // 2
                row = _row_from(stream, middle)
                low, high = (middle + 1, high) if row and row["step"] < first else (low, middle)
            stream.seek(max(0, low - 1))
            for line in stream:
                found = _row(line)
                if found is not None and found["step"] > last:
                    return
                if found is not None and found["step"] >= first:
                    yield found
    except FileNotFoundError:
        return


def tokens_at(path: Path, step: int) -> Optional[int]:
    """Tokens that the run had consumed when `step` was applied; None: the file has no such row."""
    row = next(rows_between(path, step, step), {})
    return int(row["tokens"]) if "tokens" in row else None


def _row_from(stream: IO[bytes], offset: int) -> Optional[dict[str, Any]]:
    """The first whole row that begins at `offset` or after it."""
    stream.seek(max(0, offset - 1))
    lines = stream.read(2 * _ROW_BYTES).split(b"\n")
    # Of what was cut by `offset` nothing is left but its end.
    rows = map(_row, lines[1:] if offset else lines)
    return next(filter(None, rows), None)


def _row(line: bytes) -> Optional[dict[str, Any]]:
    try:
        row = json.loads(line)
        return row if isinstance(row["step"], int) else None
    except (ValueError, KeyError, TypeError):
        return None  # torn by a power cut, or cut by the window
