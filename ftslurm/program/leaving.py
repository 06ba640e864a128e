"""How a program that was asked to leave is made to, by the time that has passed. Pure.

A program that handles no signal is ended at once and loses nothing by it that waiting would save.
One that looks for the request itself has until the deadline.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Optional

from ftslurm.errors import RANK_FAILED, RANK_STOPPED

KILL_AFTER_S = 2.0
"""From the deadline to KILL. run/deadline.py leaves 5 s, and asking for the requeue takes 0.1 s."""

BY_CLOCK = "SIGALRM"
"""The warn signal is due and may have reached nobody."""


@dataclass(frozen=True)
class Request:
    """This rank was asked to leave."""

    signal_name: Optional[str]
    """BY_CLOCK: none has come."""
    order: Optional[str]
    """stop | pause, of an operator."""
    at: float
    """UTC seconds."""
    since: float
    """The same moment by the monotonic clock."""

    @property
    def words(self) -> str:
        return f"the order `{self.order}`" if self.order else str(self.signal_name)


def push_due(asked_for_s: float, *, is_aware: bool, deadline_s: float) -> Optional[signal.Signals]:
    """The signal that the program should have got by now; None: it is still left alone."""
    if asked_for_s >= deadline_s + KILL_AFTER_S:
        return signal.SIGKILL
    if asked_for_s >= deadline_s or not is_aware:
        return signal.SIGTERM
    return None


def exit_code(returncode: int, *, was_asked: bool) -> int:
    """The rank's code for its program's: below 128, where shells put signals. Whoever was asked to
    leave is started again, whatever the code: most programs die of the signal."""
    if was_asked:
        return RANK_STOPPED
    return returncode if 0 <= returncode < 128 else RANK_FAILED
