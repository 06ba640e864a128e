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

from ftslurm.errors import FtslurmError, RunError, SpecError, UsageError, warn
from ftslurm.run.jobs import BY_SUBMIT
from ftslurm.run.spec import RunSpec
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_lock import queueing
from ftslurm.run.sweep_record import QUEUED, SweepRecord, TaskRecord, read_arrays
from ftslurm.scheduler.protocol import Scheduler, Site
from ftslurm.scheduler.sbatch import RefusedError
from ftslurm.submit.checks import Checks
from ftslurm.submit.continue_by import settle_continue_by
from ftslurm.submit.dataset import wanted_dataset
from ftslurm.submit.freeze import Given, Plan, check_place, make_run_id, plan_at
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
            continue_by="",  # settled with the first task
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

    def launch(self, tasks: Sequence[Task], *, say: Callable[[str], None] = warn) -> None:
        """Plan, freeze and queue these tasks; on this machine, run them to their end."""
        numbers = [task.number for task in tasks]
        if len(set(numbers)) < len(numbers) or self._numbers & set(numbers):
            raise RunError(f"a task of `{self.layout.sweep_id}` was given twice; number them anew")
        plans = self.plan(tasks)
        groups = [self._groups.of(plan) for plan in plans]
        is_first = not self._numbers
        self._files.write(
            self._sweep_record(plans[0]),
            self._groups,
            [
                Frozen(plan, _record(task, plan, group), task.files)
                for task, plan, group in zip(tasks, plans, groups)
            ],
        )
        self._numbers.update(numbers)
        if self._scheduler.name == "local":
            self._run_here(numbers)
        else:
            self._queue(numbers, say, is_first=is_first)

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
        plan = plan_at(self.layout.task(task.number), spec, task.config_text, given)
        self._checks.plan(plan)
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

    def _sweep_record(self, plan: Plan) -> SweepRecord:
        return SweepRecord(
            **{**vars(self.record), "continue_by": settle_continue_by(plan.spec, self._site)}
        )

    def _queue(self, numbers: Sequence[int], say: Callable[[str], None], *, is_first: bool) -> None:
        from ftslurm.submit.executor import submit_tasks

        layout = self.layout
        try:
            with queueing(layout, wait_s=60):
                count = submit_tasks(layout, numbers, parallelism=self.record.parallelism)
        except RefusedError:
            # As with a run: nothing stays where there is certainly no job.
            if is_first and not any(array.event == QUEUED for array in read_arrays(layout)):
                shutil.rmtree(layout.root)
            raise
        if count < len(numbers):
            say(
                f"{count} of {len(numbers)} tasks are queued, Slurm takes no more jobs of yours "
                "just now; the others follow as room appears while this sweep is followed, or by "
                f"`ftslurm resume {shlex.quote(str(layout.root))}`"
            )

    def _run_here(self, numbers: Sequence[int]) -> None:
        from ftslurm.submit.executor import submit_run

        with queueing(self.layout):
            run_here(
                self.layout,
                numbers,
                at_once=self.record.parallelism or 1,
                start=lambda run: submit_run(run, "local"),
                queued_by=BY_SUBMIT,
            )


def _record(task: Task, plan: Plan, group: int) -> TaskRecord:
    return TaskRecord(task.number, plan.run_id, task.overrides, group)
