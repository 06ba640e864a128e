"""A run as an operator finds it: its directory's word and the scheduler's, looked at once.

Reads only. A run that resubmits itself may have several jobs, one that trains and some that wait
behind it; the one meant is the one that trains, whatever has become of those behind it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import FormatError, RunError
from ftslurm.files import is_listed, read_json
from ftslurm.run.attempts import (
    Outcome,
    Progress,
    numbers,
    read_attempt,
    read_outcome,
    read_progress,
)
from ftslurm.run.control import ControlFiles, control_files
from ftslurm.run.jobs import Job, read_jobs
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import RunRecord, read_record
from ftslurm.run.sweep_layout import find_sweep, places_of_run
from ftslurm.scheduler import open_scheduler
from ftslurm.scheduler.protocol import DOUBTFUL, SECOND_LOOK_S, JobState, Scheduler


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
    behind: tuple[Job, ...] = ()
    """Wait until `job` has ended, newest first."""
    is_program: bool = False
    """A program of the user's own, of whose steps nothing is known."""

    @property
    def is_over(self) -> bool:
        """No job of the run is alive, as far as the scheduler can tell."""
        return self.state.is_over

    @property
    def is_doubtful(self) -> bool:
        """It may come back all the same."""
        return self.state.word in DOUBTFUL

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
        job, state, behind = self._job()
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
            behind=behind,
            is_program=bool(self.record.spec.program),
        )

    def look_twice(self, sleep: Callable[[float], None]) -> Standing:
        """As `look`, and once more where the first look could not be believed."""
        standing = self.look()
        if standing.is_doubtful:
            sleep(SECOND_LOOK_S)
            standing = self.look()
        return standing

    def _job(self) -> tuple[Job, JobState, tuple[Job, ...]]:
        """The oldest that is not over, else the one that may come back, else the newest."""
        seen = list(self._jobs())
        alive = [(job, state) for job, state in seen if not state.is_over]
        if alive:
            return (*alive[-1], tuple(job for job, _ in alive[:-1]))
        job, state = next((one for one in seen if one[1].word in DOUBTFUL), seen[0])
        return job, state, ()

    def _jobs(self) -> Iterator[tuple[Job, JobState]]:
        """Newest first, back to the one that runs, or has claimed the newest attempt: when that one
        began, those before it had ended."""
        jobs = list({job.job_id: job for job in read_jobs(self.layout)}.values())
        sweep = None if jobs else find_sweep(str(self.layout.root.parent))
        if sweep is not None:
            raise RunError(
                f"`{self.layout.root}` is a task of a sweep and is not queued yet; `ftslurm resume "
                f"{shlex.quote(str(sweep.root))}` queues what is left"
            )
        if not jobs:
            raise RunError(
                f"no job of `{self.layout.root}` is known; look with squeue whether there is one "
                "all the same (the answer to its submission may have been lost), else submit again"
            )
        if self.record.scheduler == "local":
            jobs = jobs[-1:]  # it knows the newest only, and nothing is ever queued behind that
        claimant = _claimant(self.layout)
        for job in reversed(jobs):
            state = self.scheduler.job_state(job.job_id)
            yield job, state
            if state.is_running or state.is_ending or job.job_id == claimant:
                return


def _claimant(layout: RunLayout) -> Optional[str]:
    """Id of the job that has claimed the newest attempt."""
    for number in reversed(numbers(layout)):
        try:
            return read_attempt(layout, number).job_id
        except (FileNotFoundError, FormatError):
            continue  # its claim was cut off
    return None


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
    for root in places_of_run(name):
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
    sweep = find_sweep(name)
    if sweep is not None:
        raise RunError(
            f"`{name}` is a sweep, and this is done to one run; name a task of it, e.g. "
            f"`{sweep.task(0).root}`"
        )
    raise RunError(
        f"`{name}` is no run, neither it nor `{Path('runs') / name}` has a run.json; name the "
        "folder that `ftslurm submit` printed"
    )


def _read_decision(path: Path) -> Optional[dict[str, Any]]:
    try:
        return read_json(path)
    except (FileNotFoundError, FormatError):
        return None
