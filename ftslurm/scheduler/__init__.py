"""The only code that runs Slurm commands and parses their output; one protocol, two schedulers.

Never decides whether a run goes on. `open_scheduler` is the door; protocol.py says what is behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Optional

from ftslurm.errors import SchedulerError, SpecError
from ftslurm.scheduler.protocol import Scheduler


def open_scheduler(name: str, *, run_dir: Optional[Path] = None) -> Scheduler:
    """`slurm` or `local`; the local one knows no job without the `run_dir` it belongs to."""
    if name == "slurm":
        from ftslurm.scheduler.slurm import SlurmScheduler

        return SlurmScheduler()
    if name == "local":
        from ftslurm.scheduler.local import LocalScheduler

        return LocalScheduler(run_dir)
    raise SpecError(f"scheduler is `{name}`; choose slurm or local")


def read_end_time(scheduler: Scheduler, environ: Mapping[str, str]) -> Optional[float]:
    """UTC seconds at which the job we run in will be ended; None when nobody can say just now."""
    try:
        if not scheduler.controller_alive():  # asked first: it answers at once
            return None
        return scheduler.end_time(scheduler.own_job_id(environ))
    except SchedulerError:
        return None
