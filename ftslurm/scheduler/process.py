"""Processes named safely: for the local scheduler (Linux).

A process is its pid and its start time, so that a pid used again is never taken for the old one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Optional

from ftslurm.run.process_stat import process_stat


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
