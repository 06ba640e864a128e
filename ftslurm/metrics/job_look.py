"""Whether runs that give no sign have a job left that could: asked of the scheduler, and seldom.

A job that was killed with its batch shell leaves no word, so its run looks quiet for ever. Changes
nothing; asks about one run at a time and never twice within ASK_APART_S, however many there are.
That all is over is believed at the second look: between the two questions, which jobs there are and
how they are, a successor may have been queued. Where nobody can say, the last word stays.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ftslurm.errors import FtslurmError, SchedulerError
from ftslurm.operate.standing import OpenRun, open_run
from ftslurm.recovery.on_record import jobs_on_record

ASK_EVERY_S = 300.0
SECOND_LOOK_S = 60.0
"""After a first look that found all jobs over."""
ASK_APART_S = 2.0
_WITHOUT_A_SIGN = ("quiet", "waiting", "never started", "paused")
"""States of a story that a run is in with its job, and stays in without."""


def ask(root: Path, *, environ: Mapping[str, str] = os.environ) -> Optional[bool]:
    """Whether all jobs of the run are over; None: the scheduler does not answer."""
    try:
        run = open_run(str(root))
        if _is_in_newest_job(run, environ):
            return False
        if not run.scheduler.controller_alive():
            return None
        standing = run.look()
    except SchedulerError:
        return None
    except (FtslurmError, OSError):
        return False
    return standing.is_over and not standing.done


def _is_in_newest_job(run: OpenRun, environ: Mapping[str, str]) -> bool:
    """This process; nobody need be asked then."""
    if "SLURM_JOB_ID" not in environ:
        return False
    newest = jobs_on_record(run.layout, run.record.scheduler).ids[:1]
    return newest == [run.scheduler.own_job_id(environ)]


@dataclass
class _Looked:
    """`state`, `newest_job`: of the run, as it was read last."""

    state: str = ""
    newest_job: str = ""
    times_over: int = 0
    """Looks one after the other that have found all its jobs over."""
    again_at: float = 0.0


class JobLooks:
    """Of all the runs that one process keeps the figures of."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        ask: Callable[[Path], Optional[bool]] = ask,
    ) -> None:
        self._clock, self._ask = clock, ask
        self._looked: dict[Path, _Looked] = {}
        self._not_before = 0.0

    def is_gone(self, root: Path, state: str, newest_job: str) -> bool:
        """By what was said of it since it is as it is; nobody is asked here."""
        one = self._looked.setdefault(root, _Looked())
        if (state, newest_job) != (one.state, one.newest_job):
            one.state, one.newest_job, one.times_over = state, newest_job, 0
        return one.times_over > 1

    def ask_next(self) -> None:
        """About the run whose turn it has been for longest, if it is anybody's."""
        now = self._clock()
        if now < self._not_before:
            return
        quiet = [root for root, one in self._looked.items() if one.state in _WITHOUT_A_SIGN]
        root = min(quiet, key=lambda root: self._looked[root].again_at, default=None)
        if root is None or now < self._looked[root].again_at:
            return
        one, is_over = self._looked[root], self._ask(root)
        now = self._clock()
        # One that hangs would hang for each of the others.
        self._not_before = now + (ASK_EVERY_S if is_over is None else ASK_APART_S)
        if is_over is not None:
            one.times_over = one.times_over + 1 if is_over else 0
        one.again_at = now + (SECOND_LOOK_S if is_over and one.times_over == 1 else ASK_EVERY_S)
