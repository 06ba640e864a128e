"""Processes named safely and tied to their parent: for the local scheduler (Linux).

A process is its pid and its start time, so that a pid used again is never taken for the old one.
"""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass
from typing import Any, Callable, Optional

from ftslurm.run.process_stat import process_stat

_PR_SET_PDEATHSIG = 1  # prctl(2)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class ProcessName:
    pid: int
    started: int
    """Clock ticks after boot, field 22 of /proc/PID/stat."""

    @classmethod
    def of(cls, pid: int) -> Optional[ProcessName]:
        """None when there is no such process, or only its zombie."""
        found = process_stat(pid)
        return None if found is None or found.state in "ZX" else cls(pid, found.started)

    @classmethod
    def from_record(cls, record: Optional[dict[str, Any]]) -> Optional[ProcessName]:
        return cls(int(record["pid"]), int(record["started"])) if record else None

    @property
    def is_alive(self) -> bool:
        return ProcessName.of(self.pid) == self

    def send(self, number: int) -> bool:
        """True when the signal went to this very process."""
        if not self.is_alive:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def tie_to_parent() -> None:
    """From here on this process is killed when its parent ends."""
    parent = os.getppid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def die_with_parent(number: int = signal.SIGKILL) -> Callable[[], None]:
    """A preexec_fn: the child gets signal `number` when the thread that started it ends."""
    parent = os.getpid()

    def set_death_signal() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)

    return set_death_signal
