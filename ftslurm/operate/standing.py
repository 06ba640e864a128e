"""A run as an operator finds it: its directory's word and the scheduler's, looked at once.

Reads only. A run that resubmits itself may have two jobs, one that trains and one that waits behind
it; the one meant is the one that trains.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import FormatError, RunError
from ftslurm.files import is_listed, read_json
from ftslurm.run.attempts import Outcome, Progress, numbers, read_outcome, read_progress
from ftslurm.run.control import ControlFiles, control_files
from ftslurm.run.jobs import Job, read_jobs
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import RunRecord, read_record
from ftslurm.scheduler import open_scheduler
from ftslurm.scheduler.protocol import JobState, Scheduler


@dataclass(frozen=True)
class Standing:
    """Where a run stands."""

    done: bool
    attempt: Optional[int]
    """Newest one; None: the run has not begun."""
    progress: Optional[Progress]
    outcome: Optional[Outcome]
    decision: Optional[dict[str, Any]]
    """What `ftslurm recover` decided after that attempt."""
    job: Job
    state: JobState
    successor: Optional[Job] = None
    """Waits until `job` has ended."""
    is_program: bool = False
    """A program of the user's own, of whose steps nothing is known."""

    @property
    def is_over(self) -> bool:
        """No job of the run is alive, as far as the scheduler can tell."""
        return self.state.is_ended or self.state.is_forgotten

    @property
    def step_words(self) -> str:
        """How far it is and what of that is committed."""
        progress = self.progress
        if self.is_program:
            return "what it has saved is its own, in RUN/resume"
        if progress is None:
            return "it has not trained yet"
        committed = progress.committed_step
        kept = "nothing is committed" if committed is None else f"committed up to step {committed}"
        return f"it is at step {progress.step} of {progress.steps}, {kept}"

    @property
    def why_over(self) -> str:
        """The last decision's reason, else the scheduler's word."""
        reason = str((self.decision or {}).get("reason", ""))
        word = self.state.word if self.state.is_known else "no longer known to the scheduler"
        job = f"job {self.job.job_id} is {word}"
        return f"{job}; {reason}" if reason else job


@dataclass(frozen=True)
class OpenRun:
    """A run and the way to its scheduler."""

    layout: RunLayout
    record: RunRecord
    scheduler: Scheduler
    control: ControlFiles

    @property
    def name(self) -> str:
        """As it is to be typed."""
        return shlex.quote(str(self.layout.root))

    def look(self) -> Standing:
        layout = self.layout
        # The job is asked before the files: what it wrote last is then seen with its end.
        job, state, successor = self._job()
        claimed = numbers(layout)
        paths = layout.attempt(claimed[-1]) if claimed else None
        return Standing(
            done=is_listed(layout.done),
            attempt=claimed[-1] if claimed else None,
            progress=read_progress(paths) if paths else None,
            outcome=read_outcome(paths) if paths else None,
            decision=_read_decision(paths.decision_json) if paths else None,
            job=job,
            state=state,
            successor=successor,
            is_program=bool(self.record.spec.program),
        )

    def _job(self) -> tuple[Job, JobState, Optional[Job]]:
        jobs = read_jobs(self.layout)
        if not jobs:
            raise RunError(
                f"no job of `{self.layout.root}` is known; look with squeue whether there is one "
                "all the same (the answer to its submission may have been lost), else submit again"
            )
        newest = jobs[-1]
        state = self.scheduler.job_state(newest.job_id)
        before = next((job for job in jobs if job.job_id == newest.after), None)
        if before is not None and (state.is_waiting or not state.is_known):
            state_before = self.scheduler.job_state(before.job_id)
            if state_before.is_known and not state_before.is_ended:
                return before, state_before, newest
        return newest, state, None


def open_run(name: str) -> OpenRun:
    """The run behind a path, or behind a run id under ./runs."""
    layout = RunLayout(_find(name))
    record = read_record(layout)
    return OpenRun(
        layout,
        record,
        open_scheduler(record.scheduler, run_dir=layout.root),
        control_files(layout, record),
    )


def _find(name: str) -> Path:
    for root in (Path(name), Path("runs") / name):
        try:
            (root / "run.json").stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            run_id = root.absolute().name
            raise RunError(
                f"`{name}` is closed to you, a run directory is its owner's alone; where its owner "
                f"has named a recovery.control_dir you may leave an empty file there, e.g. "
                f"`{run_id}.stop`, and the run obeys"
            ) from None
        return root.absolute()
    raise RunError(
        f"`{name}` is no run, neither it nor `{Path('runs') / name}` has a run.json; name the "
        "folder that `ftslurm submit` printed"
    )


def _read_decision(path: Path) -> Optional[dict[str, Any]]:
    try:
        return read_json(path)
    except (FileNotFoundError, FormatError):
        return None
