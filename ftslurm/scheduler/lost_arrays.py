"""Jobs of a sweep that nobody has written down: those whose submitter did not live to do it.

Slurm shows jobs for MinJobAge after their end. A task that has begun is told by its own run, whose
batch script writes the job down, for as long as the run is there. Whoever calls holds the sweep's
lock (run/sweep_lock.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Optional

from ftslurm.run.jobs import BY_BATCH, BY_SUBMIT, add_job, read_jobs
from ftslurm.run.layout import RunLayout
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import LEFT, ArrayRecord, add_event, read_arrays, unanswered
from ftslurm.scheduler.arrays import clock, note_array
from ftslurm.scheduler.protocol import CLOCKS_S
from ftslurm.scheduler.sbatch import SBATCH_TIMEOUT_S
from ftslurm.scheduler.slurm import TIMEOUT_S, Runner, checked, run_command
from ftslurm.scheduler.whose import by_all_names, is_among

OPEN_S = SBATCH_TIMEOUT_S + CLOCKS_S
"""An sbatch outlives whoever started it and may be heard for so long: before that, what Slurm does
not have it may yet take."""

_ROW_FORMAT = "%F|%K|%o"
"""squeue -r -o: array, index, script; only the last may hold a `|`."""


def find_lost(
    layout: SweepLayout, *, run: Runner = run_command, now: Callable[[], float] = time.time
) -> list[ArrayRecord]:
    """The arrays, and jobs of tasks that are queued alone, that were asked for by somebody who did
    not live to write down the answer, now on record. What Slurm has not is on record as left, once
    it is older than OPEN_S; until then it stays unanswered. SchedulerError when nobody can say."""
    arrays = read_arrays(layout)
    lost = unanswered(arrays)
    if not lost:
        return []
    asked_at = now()
    argv = _squeue(layout, "--array", "--states=all", f"--format={_ROW_FORMAT}")
    rows = _rows(checked(run, argv, TIMEOUT_S))
    known = {array.array_id for array in arrays if array.array_id}
    found: list[ArrayRecord] = []
    for array in lost:
        array_id = _find(layout, array, rows, known)
        if array_id is not None:
            known.add(array_id)
            found.append(note_array(layout, array, array_id, BY_SUBMIT))
        elif asked_at - array.at >= OPEN_S:
            add_event(layout, LEFT, array)
    return found


def still_open(layout: SweepLayout) -> dict[int, str]:
    """Task -> what to say of it: of those that Slurm was asked for, and of which neither an answer
    nor a job is there yet."""
    return {
        number: f"Slurm was asked for it at {clock(array.at)}, its answer was lost, and until "
        f"{clock(array.at + OPEN_S)} nobody knows whether it has a job"
        for array in unanswered(read_arrays(layout))
        for number in array.numbers
    }


def find_singles(layout: SweepLayout, *, run: Runner = run_command) -> list[str]:
    """Waiting jobs of single tasks that nobody has written down, now on record: successors whose
    submission got no answer. SchedulerError when nobody can say."""
    argv = _squeue(layout, "--states=PENDING", "--format=%i|%o")
    rows = [line.strip().partition("|") for line in checked(run, argv, TIMEOUT_S).splitlines()]
    found, own = [], by_all_names([layout.root])
    for job_id, _, command in rows:
        task = RunLayout(Path(command).parent.parent)
        # Of a script that is none of ours nothing is looked at: its file system may be away.
        if Path(command) != task.script or not is_among(task.root.parent, own):
            continue
        if job_id not in {job.job_id for job in read_jobs(task)}:
            add_job(task, job_id, scheduler="slurm", queued_by=BY_BATCH)
            found.append(job_id)
    return found


def _squeue(layout: SweepLayout, *options: str) -> list[str]:
    """For the jobs of the sweep's owner, whoever asks: root may."""
    return ["squeue", "--noheader", f"--user={_owner(layout)}", "--all", *options]


def _owner(layout: SweepLayout) -> int:
    return layout.root.stat().st_uid


def _rows(shown: str) -> Mapping[str, dict[str, set[int]]]:
    """Command of the script -> array -> indexes that there are of it; of a job alone none."""
    found: dict[str, dict[str, set[int]]] = {}
    for line in shown.splitlines():
        array_id, index, command = [*line.strip().split("|", 2), "", ""][:3]
        indexes = found.setdefault(command, {}).setdefault(array_id, set())
        if index.isdigit():  # `N/A` is also what is left of tasks that never began
            indexes.add(int(index))
    return found


def _shown(
    rows: Mapping[str, dict[str, set[int]]], script: Path, arguments: str = ""
) -> dict[str, set[int]]:
    """Of the jobs of this script."""
    found: dict[str, set[int]] = {}
    own = by_all_names([script])
    for command, jobs in rows.items():
        for path in {command, command.removesuffix(arguments)}:
            if path.endswith(f"/{script.name}") and is_among(Path(path), own):
                found.update(jobs)
    return found


def _find(
    layout: SweepLayout,
    array: ArrayRecord,
    rows: Mapping[str, dict[str, set[int]]],
    known: set[str],
) -> Optional[str]:
    if array.alone:
        return _find_alone(layout, array, rows)
    script = layout.group_script(array.group, array.offset)
    wanted = {number - array.offset for number in array.numbers}
    # 22.05 shows the script's arguments, 24.11 and 26.05 do not (seen).
    shown = _shown(rows, script, f" {array.offset}")
    for array_id, indexes in shown.items():
        if array_id not in known and indexes and indexes <= wanted:
            return array_id
    for number in array.numbers:
        for job in read_jobs(layout.task(number)):
            array_id, _, index = job.job_id.partition("_")
            if array_id not in known and index == str(number - array.offset):
                return array_id
    return None


def _find_alone(
    layout: SweepLayout, asked: ArrayRecord, rows: Mapping[str, dict[str, set[int]]]
) -> Optional[str]:
    (number,) = asked.numbers
    task = layout.task(number)
    jobs = read_jobs(task)
    known = {job.job_id for job in jobs}
    came = [job_id for job_id in _shown(rows, task.script) if job_id not in known]
    # Its batch script writes it down when it begins.
    noted = [job.job_id for job in jobs if job.queued_at >= asked.at and "_" not in job.job_id]
    return next(iter([*sorted(came, key=int), *noted]), None)
