"""Whose a job is, by the script and the name that Slurm has of it. A number that a run has on
record may be another job's: where Slurm has lost its state it counts anew, and another cluster on
the same file system counts for itself.

What is not certain counts as the run's own: a script may have come over standard input, and the
`sbatch` of a site may hand over a copy of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftslurm.errors import SchedulerError
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import RunRecord, read_record
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.scheduler.again import named_by_script
from ftslurm.scheduler.slurm import TIMEOUT_S, Runner, checked, run_command
from ftslurm.scheduler.slurm_parse import parse_config

_FORMAT = "%A|%F|%j|%o"
"""squeue: number, that of its array, name, script; the last two may hold a `|`."""
_SCRIPT = re.compile(r".*/submit/(?:train|group-[\d-]+)\.sbatch(?: \d+)?")
"""Of a run or a sweep; 22.05 shows the script's argument behind it."""


@dataclass(frozen=True)
class Marks:
    """By which a job of a run or sweep is known."""

    folders: Collection[Path]
    """Whose RUN/submit has its script, by their names now and at submit."""
    names: Collection[str]
    """A run that resubmits itself has more behind it: `NAME-RUN_ID`."""


def marks_of_run(layout: RunLayout, record: RunRecord) -> Marks:
    roots = [layout.root, named_by_script(layout).root]
    # What lies above may be its sweep.
    return Marks([*roots, *(root.parent for root in roots)], [record.spec.cluster.job_name])


def marks_of_sweep(layout: SweepLayout, groups: Mapping[int, int]) -> Marks:
    """`groups`: task -> its group, of those that are meant; not empty."""
    roots = {layout.root, named_by_script(layout.task(next(iter(groups)))).root.parent}
    folders = roots | {root / layout.task_id(number) for root in roots for number in groups}
    one_each = {group: number for number, group in groups.items()}.values()
    records = [read_record(layout.task(number)) for number in one_each]
    return Marks(folders, {record.spec.cluster.job_name for record in records})


def name_of_cluster(*, run: Runner = run_command) -> str:
    """Of the one that is asked here. SchedulerError: it does not answer."""
    told = checked(run, ["scontrol", "show", "config"], TIMEOUT_S)
    return parse_config(told).get("ClusterName", "")


def jobs_of_others(
    job_ids: Sequence[str], marks: Marks, *, run: Runner = run_command
) -> dict[str, str]:
    """Of jobs that have not ended, those that are certainly others' -> what to say of it."""
    numbers = dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids)
    argv = ["squeue", "--noheader", "--all", f"--jobs={','.join(numbers)}", f"--format={_FORMAT}"]
    try:
        shown = run(argv, TIMEOUT_S).stdout
    except SchedulerError:
        return {}
    told: dict[str, str] = {}
    for line in shown.splitlines():
        number, array, named = [*line.strip().split("|", 2), "", ""][:3]
        told.setdefault(number, named)
        told.setdefault(array, named)
    folders = by_all_names(marks.folders)
    seen = {job_id: told.get(job_id.partition("_")[0], "") for job_id in job_ids}
    return {
        job_id: f"job {job_id} is another one by now (`{named}`): Slurm has given the number anew, "
        "or this is not the cluster of the run's job"
        for job_id, named in seen.items()
        if _is_of_another(named, marks.names, folders)
    }


def _is_of_another(named: str, names: Collection[str], folders: Collection[Path]) -> bool:
    """`named`: NAME|SCRIPT"""
    _, bar, rest = named.partition("|/")
    script = os.path.normpath(f"/{rest}")  # by hand it may have been `./train.sbatch`
    if not bar or is_among(Path(script.rpartition("/submit/")[0]), folders):
        return False
    is_named = named.startswith(tuple(f"{name}{end}" for name in names for end in "|-"))
    return not is_named or _SCRIPT.fullmatch(script) is not None


def by_all_names(paths: Collection[Path]) -> set[Path]:
    """As they are named, and as they are without links."""
    return {*paths, *(path.resolve() for path in paths)}


def is_among(path: Path, known: Collection[Path]) -> bool:
    """`known`: by all names. Slurm has a path as it was given, over whatever links."""
    return path in known or path.resolve() in known
