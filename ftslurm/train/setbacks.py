"""What failed saves mean for the attempt: go on, try again, or leave. Pure.

A full disk, a quota, a missing right or a file system that has become read-only is the same for
every attempt on every node: to leave would lose the steps trained since the last save and mend
nothing. So such saves are told of and tried again, however many there are. All other failures may
be this node's alone, and after some in a row the attempt ends so that another one may do better.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

_SAME_EVERYWHERE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})


def is_same_everywhere(numbers: Sequence[int | None]) -> bool:
    """Whether the failures of a save, by their error numbers, are all of that kind."""
    return bool(numbers) and all(number in _SAME_EVERYWHERE for number in numbers)


class Setbacks:
    """Failed saves of one attempt; equal on all ranks, since a save's result is."""

    def __init__(self) -> None:
        self.total = 0
        self.in_a_row = 0
        """Since a save was last committed."""
        self.against_attempt = 0
        """Those of them in a row that another attempt might not have had."""
        self.is_of_disk = False
        """Whether the newest one is the same everywhere."""

    def committed(self) -> None:
        self.in_a_row = self.against_attempt = 0
        self.is_of_disk = False

    def failed(self, numbers: Sequence[int | None]) -> None:
        self.total += 1
        self.in_a_row += 1
        self.is_of_disk = is_same_everywhere(numbers)
        self.against_attempt += not self.is_of_disk
