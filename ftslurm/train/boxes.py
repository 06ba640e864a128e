"""Axis-parallel boxes inside a global tensor. Pure arithmetic on offsets and shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Where a piece lies in the global tensor; a 0-dim tensor is a box of one element."""

    offsets: Shape
    shape: Shape

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box:
        """The common part; its volume is 0 when there is none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends(), other._ends())
        shape = tuple(max(0, end - start) for start, end in zip(offsets, ends, strict=True))
        return Box(offsets, shape)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Slices that take this box out of a tensor that holds `outer`."""
        starts = (a - b for a, b in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(s, s + n) for s, n in zip(starts, self.shape, strict=True))

    def contiguous_in(self, outer: Box) -> int | None:
        """Element at which this box begins in a contiguous `outer`; None if it is not one run."""
        if self.intersect(outer) != self or self.shape[1:] != outer.shape[1:]:
            return None
        if not self.shape:
            return 0
        return (self.offsets[0] - outer.offsets[0]) * math.prod(self.shape[1:])

    def _ends(self) -> Shape:
        return tuple(start + n for start, n in zip(self.offsets, self.shape, strict=True))
