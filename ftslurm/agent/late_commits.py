"""Tells people while an attempt runs that it has not committed for two intervals.

Only where recovery.on_event or on_event_url is set; reads two small files each half minute, in a
thread, since both they and who is told may keep us waiting. Judges and ends nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Callable, Optional

from ftslurm.errors import FormatError
from ftslurm.recovery.on_event import NO_COMMIT, is_late, tell, uncommitted_s
from ftslurm.run.attempts import read_progress
from ftslurm.run.layout import RunLayout
from ftslurm.run.planned import in_force
from ftslurm.run.record import RunRecord

LOOK_S = 30.0


class LateCommits:
    """`in_thread(work, done)`: as a Loop does it."""

    def __init__(
        self,
        layout: RunLayout,
        record: RunRecord,
        in_thread: Callable[[Callable[[], bool], Callable[[bool], None]], None],
        *,
        environ: Mapping[str, str] = os.environ,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._layout, self._record = layout, record
        self._in_thread, self._environ, self._now = in_thread, environ, now
        self._is_looking = False
        self._told = 0
        """Newest attempt of which it was told."""

    def look(self, attempt: Optional[int]) -> None:
        """`attempt`: the one that runs, if one does."""
        rules = self._record.spec.recovery
        if not (rules.on_event or rules.on_event_url):
            return
        if attempt is None or attempt == self._told or self._is_looking:
            return
        self._is_looking = True

        def done(told: bool) -> None:
            self._is_looking = False
            if told:
                self._told = attempt

        self._in_thread(lambda: self._look(attempt), done)

    def _look(self, attempt: int) -> bool:
        try:
            seconds = uncommitted_s(self._layout, attempt, now_s=self._now())
            progress = read_progress(self._layout.attempt(attempt))
        except (OSError, FormatError):
            return False  # looked at again
        steps = 0
        if progress is not None:
            steps = progress.step - max(progress.committed_step or 0, progress.restored_step or 0)
        checkpoint = in_force(self._record.spec.checkpoint, progress)
        if not is_late(checkpoint, uncommitted_s=seconds, uncommitted_steps=steps):
            return False
        facts = {
            "reason": f"attempt {attempt} has trained {steps} steps since the last committed one",
            "uncommitted_s": seconds,
            "uncommitted_steps": steps,
        }
        tell(
            self._layout, self._record, attempt, [NO_COMMIT], facts,
            environ=self._environ, now=self._now,
        )  # fmt: skip
        return True
