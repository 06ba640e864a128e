"""A sweep's folder, written: what its tasks share once, then each task's own.

A task's run directory differs from any other run's in that RUN/code leads to the sweep's one
snapshot. Nothing is decided here, and nothing is queued.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ftslurm.files import fsync_folder, write_atomic, write_new
from ftslurm.run.layout import RunLayout
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import SweepRecord, TaskRecord, add_tasks, write_sweep
from ftslurm.submit.dataset import Dataset, Wanted, prepare_dataset
from ftslurm.submit.durable import make_durable
from ftslurm.submit.freeze import (
    CODE_DIFF,
    CODE_JSON,
    Known,
    Plan,
    copy_code,
    encode_record,
    record_of,
    write_run,
)
from ftslurm.submit.groups import Groups
from ftslurm.submit.packages import Interpreters
from ftslurm.submit.render import RUN_DIR
from ftslurm.submit.snapshot import PACKAGE


@dataclass(frozen=True)
class Frozen:
    """A task that is to be written."""

    plan: Plan
    record: TaskRecord
    files: Mapping[str, bytes]
    """Name -> content, for RUN/submit."""


class SweepFiles:
    """Writes one sweep, batch after batch."""

    def __init__(self, layout: SweepLayout) -> None:
        self._layout = layout
        self._code_digest: Optional[str] = None
        self._datasets: dict[tuple[Wanted, str], Dataset] = {}
        self._packages: dict[Interpreters, dict[str, str]] = {}
        self._groups_written = 0

    def write(self, record: SweepRecord, groups: Groups, tasks: Sequence[Frozen]) -> None:
        """Durable on return. After an error these tasks are absent, and so is the sweep if they are
        its first."""
        runs_dir = self._layout.root.parent
        runs_dir.mkdir(parents=True, exist_ok=True)
        # Both may refuse, and start processes: before anything is written.
        known = [(self._dataset(task.plan), self._packages_of(task.plan)) for task in tasks]
        is_first = self._code_digest is None
        folder = runs_dir if is_first else self._layout.root
        building = SweepLayout(folder / f".{self._layout.sweep_id}.tmp")
        building.root.mkdir(mode=0o700)
        try:
            if is_first:
                self._begin(building, record, tasks[0].plan)
            assert self._code_digest is not None
            shared = building if is_first else self._layout
            alike = _Alike()
            for task, (dataset, packages) in zip(tasks, known):
                place = RunLayout(building.root / task.plan.run_id)
                _write_task(task, place, Known(self._code_digest, dataset, packages), shared, alike)
            self._write_groups(groups, shared)
            if is_first:
                add_tasks(building, [task.record for task in tasks])
            make_durable(building.root)
            self._appear(building, tasks, is_first=is_first)
        except BaseException:
            shutil.rmtree(building.root, ignore_errors=True)
            if is_first:
                self._code_digest = None
            raise

    def _begin(self, building: SweepLayout, record: SweepRecord, plan: Plan) -> None:
        building.submit.mkdir(mode=0o700)
        write_sweep(building, record)
        copied = copy_code(plan.snapshot, building.code, building.submit)
        self._code_digest = copied.digest

    def _appear(self, building: SweepLayout, tasks: Sequence[Frozen], *, is_first: bool) -> None:
        root = self._layout.root
        if is_first:
            building.root.rename(root)
            fsync_folder(root.parent)
            return
        for task in tasks:
            (building.root / task.plan.run_id).rename(task.plan.layout.root)
        building.root.rmdir()
        fsync_folder(root)
        add_tasks(self._layout, [task.record for task in tasks])

    def _write_groups(self, groups: Groups, place: SweepLayout) -> None:
        texts = groups.texts(self._layout)
        for number in range(self._groups_written, len(texts)):
            script, arguments = texts[number]
            write_atomic(place.group_script(number), script.encode())
            write_atomic(place.group_arguments(number), arguments.encode())
        self._groups_written = len(texts)

    def _dataset(self, plan: Plan) -> Optional[Dataset]:
        if plan.data is None:
            return None
        key = (plan.data, plan.python)
        if key not in self._datasets:
            found = prepare_dataset(plan.data, python=plan.python, import_from=PACKAGE.parent)
            self._datasets[key] = found
        return self._datasets[key]

    def _packages_of(self, plan: Plan) -> dict[str, str]:
        key = Interpreters.of(plan.spec, plan.python)
        if key not in self._packages:
            self._packages[key] = key.packages()
        return self._packages[key]


class _Alike:
    """Files that are the same in many tasks: written for the first, a second name in others."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[bytes, Path]] = {}
        self._call: Optional[Path] = None
        self._record: Optional[tuple[Plan, Known, bytes]] = None

    def call(self, run: RunLayout) -> None:
        from ftslurm.submit.executor import write_call

        if self._call is None:
            write_call(run.submit)
            self._call = run.call
        elif not _link(str(self._call), str(run.call)):
            self._call = run.call

    def write(self, path: Path, data: bytes) -> None:
        known, first = self._first.get(path.name, (None, path))
        if known != data:
            write_new(path, data)
        elif _link(str(first), str(path)):
            return
        self._first[path.name] = (data, path)

    def record(self, plan: Plan, known: Known) -> bytes:
        """run.json, which takes longer to encode than to write. All tasks of a sweep have the same
        site, source and time."""
        if self._record is not None:
            before, as_known, data = self._record
            asked = plan.spec, plan.config_text, known
            if asked == (before.spec, before.config_text, as_known):
                return record_of(before.run_id, data, plan.run_id)
        data = encode_record(plan, known)
        self._record = (plan, known, data)
        return data


def _write_task(
    task: Frozen, place: RunLayout, known: Known, shared: SweepLayout, alike: _Alike
) -> None:
    place.root.mkdir(mode=0o700)
    place.submit.mkdir()
    if any(RUN_DIR in word for word in task.plan.spec.cluster.container):
        # What the container is told to show is the run's folder, and there a link leads nowhere.
        shutil.copytree(shared.code, place.code, symlinks=True, copy_function=_link)
    else:
        place.code.symlink_to(Path("..") / shared.code.name)
    for name in (CODE_JSON, CODE_DIFF):
        if (shared.submit / name).exists():
            _link(str(shared.submit / name), str(place.submit / name))
    alike.call(place)
    for name, data in task.files.items():
        alike.write(place.submit / name, data)
    write_run(task.plan, place, alike.record(task.plan, known), alike.write)


def _link(source: str, target: str) -> bool:
    """A second name, as nobody writes to either; False: a copy, where the file system has none, or
    this file too many (ext4: 65,000)."""
    try:
        os.link(source, target)
    except FileExistsError:
        # Of NFS, whose first answer was lost. A copy would be one of a file onto itself.
        if not os.path.samefile(source, target):  # noqa: PTH121
            raise
    except OSError:
        shutil.copy2(source, target)
        return False
    return True
