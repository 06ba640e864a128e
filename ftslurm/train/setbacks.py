"""What failed saves mean for the attempt: go on, try again, or leave. Pure.

A full disk or a quota is the same for every attempt on every node, and so is a missing right or a
file system that takes no writes when no rank could write: to leave would lose the steps trained
since the last save and mend nothing. So such saves are told of and tried again, however many there
are. All other failures may be this node's alone (its credentials have expired, its mount has turned
read-only), and after some in a row the attempt ends so that another one may do better.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_CLOSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def is_same_everywhere(numbers: Sequence[int | None], *, of_all: bool) -> bool:
    """Whether the failures of a save, by their error numbers, are all of that kind; `of_all`: no
    rank could write."""
    kind = _FULL | _CLOSED if of_all else _FULL
    return bool(numbers) and all(number in kind for number in numbers)


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

    def failed(self, numbers: Sequence[int | None], *, of_all: bool) -> None:
        self.total += 1
        self.in_a_row += 1
        self.is_of_disk = is_same_everywhere(numbers, of_all=of_all)
        self.against_attempt += not self.is_of_disk
