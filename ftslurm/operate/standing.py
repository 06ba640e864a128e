"""A run as an operator finds it: its directory's word and the scheduler's, looked at once.

Reads only. Which of its jobs is meant is decided in recovery/job_meant.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

from ftslurm.errors import FormatError, RunError, SchedulerError
from ftslurm.files import is_listed
from ftslurm.recovery.job_meant import choose, is_later
from ftslurm.recovery.on_record import ask_for_jobs, newest_claim
from ftslurm.run.attempts import (
    Outcome,
    Progress,
    numbers,
    read_decision,
    read_outcome,
    read_progress,
)
from ftslurm.run.control import ControlFiles, control_files
from ftslurm.run.jobs import Job
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import RunRecord, find_run, read_record
from ftslurm.run.sweep_layout import SweepLayout, find_sweep
from ftslurm.run.sweep_record import read_tasks
from ftslurm.scheduler import open_scheduler
from ftslurm.scheduler.protocol import DOUBTFUL, SECOND_LOOK_S, UNKNOWN, JobState, Scheduler
from ftslurm.scheduler.whose import jobs_of_others, marks_of_run, name_of_cluster


@dataclass(frozen=True)
class Standing:
    """Where a run stands."""

    done: bool
    attempt: Optional[int]
    """Newest one; None: the run has not begun."""
    progress: Optional[Progress]
    outcome: Optional[Outcome]
    decision: dict[str, Any]
    """What `ftslurm recover` decided after that attempt; empty: nothing yet."""
    job: Job
    state: JobState
    behind: tuple[Job, ...] = ()
    """Wait until `job` has ended, newest first."""
    begun_last: Optional[str] = None
    """Id of the job that has claimed the newest attempt."""
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
        reason = str(self.decision.get("reason", ""))
        word = self.state.word if self.state.is_known else "no longer known to the scheduler"
        job = f"job {self.job.job_id} is {word}"
        if reason and is_later(self.job.job_id, self.begun_last):
            return f"{job}; of job {self.begun_last} before it: {reason}"
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
        # The jobs are asked before the files: what they wrote last is then seen with their end.
        on_record, states = ask_for_jobs(layout, self.scheduler)
        if not on_record.jobs:
            raise self._without_a_job()
        if all(state.is_forgotten for state in states.values()):
            states = self._unless_elsewhere(states)
        claimed = numbers(layout)
        paths = layout.attempt(claimed[-1]) if claimed else None
        decision = read_decision(paths) if paths else {}
        meant = choose(on_record, states, action=decision.get("action"))
        assert meant.job is not None
        return Standing(
            done=is_listed(layout.done),
            attempt=claimed[-1] if claimed else None,
            progress=read_progress(paths) if paths else None,
            outcome=read_outcome(paths) if paths else None,
            decision=decision,
            job=meant.job,
            state=meant.state,
            behind=meant.behind,
            begun_last=on_record.begun_last,
            is_program=bool(self.record.spec.program),
        )

    def _unless_elsewhere(self, states: dict[str, JobState]) -> dict[str, JobState]:
        """Jobs that Slurm has forgotten are over; those of another cluster may be alive."""
        try:
            why = elsewhere(self)
        except SchedulerError as error:
            why = str(error)
        return dict.fromkeys(states, JobState(UNKNOWN, why)) if why else states

    def look_twice(self, sleep: Callable[[float], None]) -> Standing:
        """As `look`, and once more where the first look could not be believed."""
        standing = self.look()
        if standing.is_doubtful:
            sleep(SECOND_LOOK_S)
            standing = self.look()
        return standing

    def _without_a_job(self) -> RunError:
        sweep = find_sweep(str(self.layout.root.parent))
        if sweep is not None:
            return RunError(
                f"`{self.layout.root}` is a task of a sweep and is not queued yet; `ftslurm resume "
                f"{shlex.quote(str(sweep.root))}` queues what is left"
            )
        return RunError(
            f"no job of `{self.layout.root}` is known; look with squeue whether there is one all "
            "the same (the answer to its submission may have been lost), else submit again"
        )


def elsewhere(run: OpenRun) -> str:
    """What to say where Slurm, as it is asked here, is not the cluster that has the run's jobs: on
    a file system that two share it would say that there are none. Empty: it is, or nobody has
    written down which. SchedulerError: nobody can say."""
    claim = newest_claim(run.layout)
    there = (claim.cluster if claim else "") or (run.record.site or {}).get("cluster")
    if run.record.scheduler == "local" or not there:
        return ""
    here = name_of_cluster()
    if here.casefold() == there.casefold():  # slurm.conf may have capitals
        return ""
    return (
        f"the run's jobs are on cluster `{there}`, and this is `{here}`, which knows none of them"
    )


def sweep_elsewhere(sweep: SweepLayout) -> str:
    """The same of a sweep, by the first of its tasks that can be read."""
    for task in read_tasks(sweep):
        try:
            return elsewhere(open_run(str(sweep.root / task.run_id)))
        except (FormatError, RunError, OSError):
            continue
    return ""


def require_its_cluster(ask: Callable[[], str], todo: str) -> None:
    """RunError where `ask`, one of the two above, has something to say. Where nobody can say it,
    nothing is refused: what cannot be done without Slurm says so."""
    try:
        why = ask()
    except SchedulerError:
        return
    if why:
        raise RunError(f"{why}: {todo}")


def require_own_jobs(run: OpenRun, standing: Standing) -> None:
    """RunError before anything is done to a job that is certainly not the run's."""
    if run.record.scheduler == "local" or standing.is_over:
        return
    try:
        marks = marks_of_run(run.layout, run.record)
    except OSError:
        return  # nothing is certain where the script cannot be read
    job_ids = [job.job_id for job in (*standing.behind, standing.job)]
    for why in jobs_of_others(job_ids, marks).values():
        raise RunError(f"{why}; nothing is done to it")


def open_run(name: str) -> OpenRun:
    """The run behind a path, or behind a run id under ./runs."""
    layout = RunLayout(find_run(name))
    record = read_record(layout)
    return OpenRun(
        layout,
        record,
        open_scheduler(record.scheduler, run_dir=layout.root),
        control_files(layout, record),
    )
