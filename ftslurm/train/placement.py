"""Which rank writes which rows of tensors that several ranks hold. Pure arithmetic.

Every holder computes the same answer from (key, shape, dtype size) alone, so nothing is exchanged.
Each row is written exactly once, and no holder writes much more than its fair share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]

GRAIN_BYTES = 64 * 1024
"""A holder takes part only from so many bytes each: one more file to open costs a reader more."""
RECORD_BYTES = 64 * 1024 * 1024
"""Longest record, so that a reader that needs a slice buffers no more than this at a time."""


@dataclass(frozen=True)
class Item:
    """A tensor, or this rank's piece of one, that is to be written."""

    key: str
    shape: Shape
    itemsize: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def rows(self) -> int:
        """Units it can be cut into along dim 0."""
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True)
class Rows:
    """Rows `start` to `stop` of an item along dim 0; a 0-dim item is one row."""

    key: str
    start: int
    stop: int
    bytes: int


def spread(
    items: Sequence[Item],
    count: int,
    *,
    grain_bytes: int = GRAIN_BYTES,
    record_bytes: int = RECORD_BYTES,
) -> list[list[Rows]]:
    """Share out `items` among `count` holders; the answer's index is the holder.

    All items are laid in one line, largest first, and the line is cut at equal distances, each cut
    moved to the nearest row. So a tensor larger than a fair share is split, most others are not.
    """
    ordered = sorted(items, key=lambda item: (-item.bytes, item.key))
    total = sum(item.bytes for item in ordered)
    holders = max(1, min(count, total // grain_bytes))
    shares: list[list[Rows]] = [[] for _ in range(count)]
    position = 0
    for item in ordered:
        if item.bytes == 0:
            continue
        for holder, start, stop in _cuts(item, position, total, holders):
            shares[holder].extend(_records(item, start, stop, record_bytes))
        position += item.bytes
    return shares


def _cuts(item: Item, position: int, total: int, holders: int) -> list[tuple[int, int, int]]:
    """(holder, first row, end row) of an item that begins at byte `position` of the line."""
    row_bytes = item.bytes // item.rows
    first = position * holders // total
    last = (position + item.bytes - 1) * holders // total
    parts = []
    start = 0
    for holder in range(first, last + 1):
        boundary = total * (holder + 1) / holders - position
        stop = item.rows if holder == last else min(item.rows, round(boundary / row_bytes))
        if stop > start:
            parts.append((holder, start, stop))
            start = stop
    return parts


def _records(item: Item, start: int, stop: int, record_bytes: int) -> list[Rows]:
    row_bytes = item.bytes // item.rows
    step = max(1, record_bytes // row_bytes)
    return [
        Rows(item.key, row, min(row + step, stop), (min(row + step, stop) - row) * row_bytes)
        for row in range(start, stop, step)
    ]
