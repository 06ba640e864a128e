"""A sweep: many runs that are planned, frozen and queued together, as tasks of Slurm arrays.

All tasks are planned and checked before anything is written, and all are frozen before anything is
queued. What does not differ between them is looked at and written once: site, source, packages,
data. A sweep's folder appears whole, by a rename, or not at all. Where there is no Slurm the tasks
run here, one after the other.
"""

from __future__ import annotations

import secrets
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Optional

from ftslurm.errors import FtslurmError, RunError, SchedulerError, SpecError, UsageError, warn
from ftslurm.run.jobs import BY_SUBMIT, read_jobs
from ftslurm.run.spec import RunSpec
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_lock import queueing
from ftslurm.run.sweep_record import QUEUED, SweepRecord, TaskRecord, read_arrays, unanswered
from ftslurm.run.wording import format_count
from ftslurm.scheduler.arrays import Outcome
from ftslurm.scheduler.protocol import Scheduler, Site
from ftslurm.scheduler.sbatch import UnclearError
from ftslurm.submit.checks import Checks
from ftslurm.submit.dataset import wanted_dataset
from ftslurm.submit.freeze import Given, Plan, check_place, make_run_id, plan_alike, plan_at
from ftslurm.submit.groups import Groups
from ftslurm.submit.render import NAME
from ftslurm.submit.snapshot import Snapshot, plan_snapshot
from ftslurm.submit.sweep_files import Frozen, SweepFiles
from ftslurm.sweep.here import run_here


@dataclass(frozen=True)
class Task:
    """What a task is to be."""

    number: int
    overrides: tuple[str, ...]
    spec: RunSpec
    config_text: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Name -> content, put into RUN/submit."""


class Sweep:
    """One sweep. `launch` may be called once, or batch after batch."""

    def __init__(
        self,
        layout: SweepLayout,
        *,
        record: SweepRecord,
        folder: Path,
        scheduler: Scheduler,
        site: Optional[Site],
    ) -> None:
        self.layout = layout
        self.record = record
        self._folder = folder
        self._scheduler = scheduler
        self._site = site
        self._checks = Checks(layout.root.parent)
        self._groups = Groups()
        self._files = SweepFiles(layout)
        self._snapshot: Optional[Snapshot] = None
        self._planned: Optional[Plan] = None
        self._numbers: set[int] = set()

    @classmethod
    def begin(
        cls,
        name: str,
        *,
        runs_dir: Path,
        folder: Path,
        scheduler: Scheduler,
        site: Optional[Site],
        kind: str,
        sweeper: str,
        command: Sequence[str],
        parallelism: Optional[int],
        detach: bool,
    ) -> Sweep:
        """Decide its id and place; writes nothing."""
        if not NAME.fullmatch(name):
            raise SpecError(
                f"name is `{name}`; use letters, digits, `.`, `_` and `-`, at most 64, beginning "
                "with a letter or digit"
            )
        if parallelism is not None and parallelism < 1:
            raise UsageError(f"parallelism is {parallelism}; at least one task has to run")
        if detach and scheduler.name == "local":
            raise UsageError(
                "detach means nothing to cluster=local: it is this command that starts one task "
                "after the other; leave it out"
            )
        now = time.time()
        sweep_id = make_run_id(name, now, secrets.token_hex(2))
        record = SweepRecord(
            sweep_id=sweep_id,
            name=name,
            created_at=now,
            kind=kind,
            scheduler=scheduler.name,
            sweeper=sweeper,
            command=tuple(command),
            folder=str(folder),
            parallelism=parallelism,
            detach=detach,
        )
        layout = SweepLayout((folder / runs_dir.expanduser()) / sweep_id)
        return cls(layout, record=record, folder=folder, scheduler=scheduler, site=site)

    def plan(self, tasks: Sequence[Task]) -> list[Plan]:
        """Decide all of these tasks and check them; reads only, and raises for the first that
        cannot be."""
        if not tasks:
            raise UsageError("there are no tasks; give at least one value to each key of the sweep")
        snapshot = self._snapshot or self._plan_snapshot(tasks)
        self._snapshot = snapshot
        plans = []
        for task in tasks:
            try:
                plans.append(self._plan(task, snapshot))
            except FtslurmError as error:
                what = shlex.join(task.overrides)
                raise type(error)(f"task {task.number} ({what}): {error}") from None
        return plans

    def launch(self, tasks: Sequence[Task], *, say: Callable[[str], None] = warn) -> Outcome:
        """Plan, freeze and queue these tasks; on this machine, run them to their end, which is said
        as it goes. RefusedError, and of a sweep's first tasks nothing stays, where none of them is
        queued or will be; RunError, which says how far it came, where a file of theirs could not
        be written or read."""
        numbers = [task.number for task in tasks]
        if len(set(numbers)) < len(numbers) or self._numbers & set(numbers):
            raise RunError(f"a task of `{self.layout.sweep_id}` was given twice; number them anew")
        plans = self.plan(tasks)
        groups = [self._groups.of(plan) for plan in plans]
        is_first = not self._numbers
        frozen = [
            Frozen(plan, _record(task, plan, group), task.files)
            for task, plan, group in zip(tasks, plans, groups)
        ]
        self._write(frozen)
        self._numbers.update(numbers)
        try:
            if self._scheduler.name == "local":
                say(f"sweep {self.layout.sweep_id}: {len(numbers)} tasks run on this machine")
                say(f"sweep folder:  {self.layout.root}")
                return self._run_here(numbers, say)
            return self._queue(numbers, is_first=is_first)
        except OSError as error:
            # An OSError means `try again` to whoever submits, and would run all of them twice.
            raise RunError(self._broken_off(tasks, error)) from None

    def _write(self, frozen: Sequence[Frozen]) -> None:
        try:
            self._files.write(self.record, self._groups, frozen)
        except OSError as error:
            if error.errno is None:
                raise
            place = self.layout.root
            is_left = any(one.plan.layout.root.exists() for one in frozen)
            left = f"some are left in `{place}`" if is_left else "nothing of them is left"
            raise OSError(  # that of a write names no file
                error.errno,
                f"{error.strerror}, as {format_count(len(frozen), 'task')} were written below "
                f"`{place.parent}`; {left}, and nothing is queued",
                error.filename,
            ) from None

    def _broken_off(self, tasks: Sequence[Task], error: OSError) -> str:
        name = shlex.quote(str(self.layout.root))
        try:
            return self.how_far(tasks, f"broken off by {error}")
        except OSError:
            return (
                f"broken off by {error}: tasks may be queued; do not submit them again, look with "
                f"`ftslurm status {name}`, and `ftslurm resume {name}` queues the others"
            )

    def how_far(self, tasks: Sequence[Task], why: str = "interrupted") -> str:
        """What to say of a launch of these tasks that was broken off."""
        layout, numbers = self.layout, [task.number for task in tasks]
        if not self._numbers.issuperset(numbers) or not layout.root.exists():
            return f"{why} before anything was queued; nothing is left of these tasks"
        asked = {number for array in unanswered(read_arrays(layout)) for number in array.numbers}
        jobs = [number for number in numbers if read_jobs(layout.task(number))]
        name, count = shlex.quote(str(layout.root)), f"{len(jobs)} of {len(numbers)} tasks"
        if self._scheduler.name == "local":
            told = f"{count} were started, and what still runs goes on; the others are run"
        else:
            unknown = len(asked.intersection(numbers).difference(jobs))
            maybe = f", {unknown} more may be" if unknown else ""
            told = f"{count} are queued{maybe}, and they go on; the others are queued"
        return (
            f"{why}: {told} by `ftslurm resume {name}`; look with `ftslurm status {name}`, "
            f"end all with `ftslurm cancel {name}`"
        )

    def _plan_snapshot(self, tasks: Sequence[Task]) -> Snapshot:
        asked = dict.fromkeys((task.spec.entry, tuple(task.spec.program)) for task in tasks)
        (entry, program), *further = asked
        return plan_snapshot(
            self._folder,
            entry=entry,
            program=program,
            further=further,
            exclude=[self.layout.root.parent],
        )

    def _plan(self, task: Task, snapshot: Snapshot) -> Plan:
        spec, runs_dir = task.spec, self.layout.root.parent
        before, place = self._planned, self.layout.task(task.number)
        if before is not None and _are_alike(task, place.root.name, before):
            return plan_alike(before, place)
        self._checks.spec(spec)
        self._require_own_place(spec)
        check_place(spec, self._site, runs_dir)
        self._checks.entry(spec, snapshot)
        given = Given(
            folder=self._folder,
            site=self._site,
            snapshot=snapshot,
            now=self.record.created_at,
            data=wanted_dataset(spec, runs_dir, self._folder),
            shared_code=self.layout.code,
        )
        plan = plan_at(place, spec, task.config_text, given)
        self._checks.plan(plan)
        self._planned = plan
        return plan

    def _require_own_place(self, spec: RunSpec) -> None:
        """Where its tasks are is the sweep's to say."""
        if spec.run_id is not None:
            raise SpecError("run_id names one run, and each task of a sweep has its own")
        runs_dir = self._folder / Path(spec.runs_dir).expanduser()
        if runs_dir != self.layout.root.parent:
            raise SpecError(
                f"runs_dir is `{runs_dir}`, and the sweep's is `{self.layout.root.parent}`; the "
                "tasks of a sweep lie in one folder"
            )
        if spec.cluster.scheduler != self._scheduler.name:
            raise SpecError(
                f"cluster.scheduler is `{spec.cluster.scheduler}`, and the sweep's is "
                f"`{self._scheduler.name}`; the tasks of a sweep go to one"
            )

    def _queue(self, numbers: Sequence[int], *, is_first: bool) -> Outcome:
        from ftslurm.submit.executor import submit_tasks

        layout = self.layout
        try:
            with queueing(layout, wait_s=60):
                return submit_tasks(
                    layout,
                    numbers,
                    parallelism=self.record.parallelism,
                    array_size=self._site.array_size if self._site is not None else None,
                )
        except (SchedulerError, KeyboardInterrupt) as error:
            # As with a run: nothing stays where there is certainly no job.
            if is_first and not _has_jobs(layout):
                shutil.rmtree(layout.root)
            if isinstance(error, UnclearError):
                resume = f"`ftslurm resume {shlex.quote(str(layout.root))}`"
                raise UnclearError(f"{error}; later {resume} looks for it too") from None
            raise

    def _run_here(self, numbers: Sequence[int], say: Callable[[str], None]) -> Outcome:
        from ftslurm.submit.executor import submit_run

        with queueing(self.layout):
            begun = run_here(
                self.layout,
                numbers,
                at_once=self.record.parallelism or 1,
                start=lambda run: submit_run(run, "local"),
                queued_by=BY_SUBMIT,
                say=say,
            )
        outcome = Outcome(singles=begun)
        outcome.leave(sorted({*numbers} - {*begun}), "the sweep was cancelled")
        return outcome


def _has_jobs(layout: SweepLayout) -> bool:
    """Or may have."""
    arrays = read_arrays(layout)
    return bool(unanswered(arrays)) or any(array.event == QUEUED for array in arrays)


def _are_alike(task: Task, run_id: str, plan: Plan) -> bool:
    """But for their ids, as long as which a job's name may be."""
    is_same = task.spec is plan.spec and task.config_text == plan.config_text
    return is_same and len(run_id) == len(plan.run_id)


def _record(task: Task, plan: Plan, group: int) -> TaskRecord:
    return TaskRecord(task.number, plan.run_id, task.overrides, group)
