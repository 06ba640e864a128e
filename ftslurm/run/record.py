"""run.json as its readers get it: what was asked for and frozen at submit. Never writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import FormatError, RunError
from ftslurm.files import read_json
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import RunSpec, from_dict
from ftslurm.run.sweep_layout import find_sweep, place_of_run

# RunRecord.continue_by
REQUEUE = "requeue"
"""The job is queued again under its id."""
RESUBMIT = "resubmit"
"""A job queues its successor when it begins."""


@dataclass(frozen=True)
class RunRecord:
    """The part of run.json that others than people read."""

    run_id: str
    spec: RunSpec
    scheduler: str
    """slurm | local"""
    continue_by: str
    """requeue | resubmit: how the run gets its next job."""
    site: Optional[dict[str, Any]]
    """The site's settings as they were at submit, for `scheduler.protocol.Site.from_dict`."""
    emergency_deadline_s: Optional[float]
    """Seconds an emergency save may take, from the site's grace."""
    data_path: Optional[str]
    dataset_snapshot: Optional[str]
    """Content digest of the token store when the run was submitted."""
    tokenizer_digest: Optional[str]
    config_digest: str
    image_digest: Optional[str]
    code_commit: str
    code_digest: str
    """Of RUN/code as it was copied."""
    code_folder: str
    """What it was copied from; with code=live, where the ranks import from."""
    code_place: str
    """Folder inside it that the run was submitted from; a program works there."""


def find_run(name: str) -> Path:
    """Absolute path of the run behind a path, or behind a run id under ./runs; RunError: there is
    none, or it may not be read."""
    root = place_of_run(name)
    if (root / "run.json").exists():
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


def read_record(layout: RunLayout) -> RunRecord:
    """FormatError for a record that is not whole, RunError where there is none."""
    try:
        record = read_json(layout.run_json)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"`{layout.run_json}` is not there; name a run directory made by `ftslurm submit`"
        ) from None
    try:
        return _make(record)
    except (KeyError, TypeError) as error:
        raise FormatError(f"`{layout.run_json}` lacks a field ({error})") from None


def _make(record: dict[str, Any]) -> RunRecord:
    deadline_s = record.get("emergency_deadline_s")
    code = record.get("code") or {}
    return RunRecord(
        run_id=record["run_id"],
        spec=from_dict(record["spec"]),
        scheduler=record["scheduler"],
        continue_by=record.get("continue_by") or REQUEUE,
        site=record.get("site"),
        emergency_deadline_s=None if deadline_s is None else float(deadline_s),
        data_path=record.get("data_path"),
        dataset_snapshot=record.get("dataset_snapshot"),
        tokenizer_digest=record.get("tokenizer_digest"),
        config_digest=record.get("config_digest") or "",
        image_digest=record.get("image_digest"),
        code_commit=code.get("commit") or "",
        code_digest=code.get("digest") or "",
        code_folder=code.get("folder") or "",
        code_place=code.get("place") or "",
    )
