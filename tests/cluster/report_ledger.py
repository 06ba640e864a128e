"""What slurmctld itself says of every job while it is there: the ledger a report is held against.

Looks twice a second at `scontrol show job`, and never at accounting: when each start of a job began
and ended, since when it might have, and what it had.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Optional

from lab import Lab

LOOK_S = 0.5
_KNOWN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\Z")
_GPUS = re.compile(r"gres/gpu=(\d+)")


@dataclass
class Start:
    """One of a job's, by slurmctld's whole seconds, UTC."""

    start_at: float
    eligible_at: float
    nodes: int
    gpus: int
    end_at: Optional[float] = None
    """None: it has not been seen to end."""
    off_s: float = 1.01
    """What comes of whole seconds, and of looks where slurmctld does not say when it ended."""
    seen_at: float = 0.0
    """When slurmctld was asked what it last answered with a job that runs: it has not ended before.
    """
    is_queued_again: bool = False

    @property
    def wait_s(self) -> float:
        return max(0.0, self.start_at - self.eligible_at)

    @property
    def spent_s(self) -> float:
        assert self.end_at is not None
        return self.end_at - self.start_at


class Ledger:
    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._starts: dict[tuple[str, int], Start] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Ledger:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._look()

    def of(self, job_id: str) -> list[Start]:
        """The job's starts, oldest first."""
        return [self._starts[key] for key in sorted(self._starts) if key[0] == job_id]

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        asked_at = time.time()
        shown = self._lab.run_as_root("scontrol", "--oneliner", "show", "job", check=False)
        for line in shown.splitlines():
            job = dict(re.findall(r"(?:^| )([A-Z]\w*)=(\S*)", line))
            if "JobId" in job:
                self._note(job, asked_at)

    def _note(self, job: dict[str, str], asked_at: float) -> None:
        job_id, restarts, state = job["JobId"], int(job.get("Restarts", "0")), job["JobState"]
        start = self._starts.get((job_id, restarts))
        before = self._starts.get((job_id, restarts - 1))
        if start is None and before is not None and not before.is_queued_again:
            # It has ended between two looks, however far apart they are on a busy machine. EndTime
            # was that of its limit, or of its grace, before it was queued again (22.05: seen).
            between_s = time.time() - before.seen_at
            before.end_at = before.seen_at + between_s / 2
            before.off_s += between_s / 2
            before.is_queued_again = True
        if state == "PENDING" or (state == "COMPLETING" and start is None):
            return
        start_at, eligible_at = _at(job["StartTime"]), _at(job["EligibleTime"])
        if start_at is None or eligible_at is None:
            return  # cancelled before it began
        if start is None:
            gpus = _GPUS.search(job.get("AllocTRES") or job.get("TRES") or "")
            nodes = int(job["NumNodes"].partition("-")[0])
            start = Start(
                start_at, eligible_at, nodes, int(gpus[1]) if gpus else 0, seen_at=start_at
            )
            self._starts[job_id, restarts] = start
        if state in ("RUNNING", "CONFIGURING", "SUSPENDED"):
            start.seen_at = asked_at
        else:
            start.end_at = _at(job["EndTime"])


def _at(stamp: str) -> Optional[float]:
    return stamp_at(stamp) if _KNOWN.match(stamp) else None


def stamp_at(stamp: str) -> float:
    """UTC seconds of slurmctld's local time."""
    return datetime.fromisoformat(stamp).timestamp()
