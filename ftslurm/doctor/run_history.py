"""What runs have left on record that answers the checklist: read, nothing tried, nothing judged.

Of each run its records, the newest step's manifest and the traces of its attempts. What is torn or
not there is left out, and so is not known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from ftslurm.checkpoint.published import step_folders
from ftslurm.checkpoint.shard import read_index
from ftslurm.checkpoint.verification import verify_step
from ftslurm.doctor.run_facts import Past, Saves, saves_of
from ftslurm.errors import FtslurmError
from ftslurm.run.attempt_story import AttemptStory
from ftslurm.run.attempts import read_attempt, read_events
from ftslurm.run.jobs import read_jobs
from ftslurm.run.layout import RunLayout
from ftslurm.run.story import read_story
from ftslurm.run.trained_twice import Twice, read_twice


@dataclass(frozen=True)
class Restore:
    at: float
    step: int
    world_size: Optional[int]
    saved_world_size: Optional[int]
    seconds: Optional[float]


@dataclass(frozen=True)
class Step:
    """The newest that is published."""

    step: int
    problems: list[str]
    created_at: float
    ranks: int
    digest_algorithm: str
    parts: frozenset[str]
    """Words for what is in it: model, optimizer, scheduler, scaler, rng, step, cursor."""
    size_bytes: int


@dataclass
class PastRun:
    name: str
    submitted_at: float
    scheduler: str
    version: str
    entry: str
    is_program: bool
    keep_last: int
    metrics_file: Optional[str]
    metrics_at: Optional[float]
    attempts: list[AttemptStory] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    fallbacks: list[tuple[float, str]] = field(default_factory=list)
    """When a checkpoint was passed over, and why."""
    saves: Saves = field(default_factory=Saves)
    committed_at: Optional[float] = None
    wait_s: Optional[float] = None
    """From the first submit to the first attempt."""
    step: Optional[Step] = None
    twice: Optional[Twice] = None


def read_past_run(past: Past, *, now: float) -> Optional[PastRun]:
    """None where its records cannot be read as a whole."""
    layout, record = past.layout, past.record
    try:
        story = read_story(layout, now=now)
        jobs = read_jobs(layout)
        submitted_at = jobs[0].queued_at if jobs else layout.run_json.stat().st_mtime
        folder = record.spec.recovery.metrics_dir
        metrics = Path(folder, f"{record.run_id}.prom") if folder else None
        found = PastRun(
            name=layout.root.name,
            submitted_at=submitted_at,
            scheduler=record.scheduler,
            version=str((record.site or {}).get("version", "")),
            entry=" ".join(record.spec.program) or record.spec.entry,
            is_program=bool(record.spec.program),
            keep_last=record.spec.checkpoint.keep_last,
            metrics_file=str(metrics) if metrics else None,
            metrics_at=metrics.stat().st_mtime if metrics and metrics.is_file() else None,
            attempts=story.attempts,
            saves=saves_of(layout),
            step=_newest_step(layout),
            twice=read_twice(layout),
        )
        for one in story.attempts:
            _read_events(layout, one.number, found)
        first = next((one.claimed_at for one in found.attempts if one.claimed_at), None)
        found.wait_s = max(0.0, first - submitted_at) if first is not None and jobs else None
    except (OSError, FtslurmError, AttributeError, KeyError, TypeError, ValueError):
        return None
    return found


def _read_events(layout: RunLayout, number: int, found: PastRun) -> None:
    rejected: dict[int, str] = {}
    for event in read_events(layout.attempt(number)):
        kind, at = event["kind"], float(event["at"])
        if kind == "restored" and event.get("step") is not None:
            size = _world_size(layout, number)
            saved = event.get("saved_world_size")
            seconds = event.get("seconds")
            found.restores.append(Restore(at, int(event["step"]), size, saved, seconds))
        elif kind == "rejected":
            rejected[int(event["step"])] = str(event.get("reason"))
        elif kind == "fell_back":
            # What is rejected may also be a late step of an attempt that was thought dead, which
            # no restore had meant to take.
            newest = int(event["adopted"])
            why = rejected.get(newest, "it could not be used")
            found.fallbacks.append((at, f"step {newest}: {why}"))
        elif kind == "committed":
            found.committed_at = at


def _world_size(layout: RunLayout, number: int) -> Optional[int]:
    try:
        return read_attempt(layout, number).world_size
    except (OSError, FtslurmError):
        return None


def _newest_step(layout: RunLayout) -> Optional[Step]:
    """Records and sizes are checked, not every byte: `ftslurm verify` does that."""
    folders = step_folders(layout)
    if not folders:
        return None
    path = folders[0]
    found = verify_step(path, full=False)
    size_bytes = sum(one.stat().st_size for one in path.iterdir())
    if found.manifest is None:
        return Step(found.step or 0, found.problems, 0.0, 0, "", frozenset(), size_bytes)
    manifest = found.manifest
    parts = {"step"} | ({"cursor"} if manifest.samples else set())
    try:
        index = read_index(path, manifest.indexes[0], manifest.digest_algorithm)
        parts |= {record.key.partition("/")[0] for record in index.tensors}
        parts |= set(_objects_of(index.objects))
    except (FtslurmError, IndexError):
        pass
    return Step(
        manifest.step,
        found.problems,
        manifest.created_at,
        len(manifest.indexes),
        manifest.digest_algorithm,
        frozenset(parts),
        size_bytes,
    )


def _objects_of(objects: dict[str, Any]) -> Iterator[str]:
    for key in ("shared", "private"):
        part = objects.get(key)
        if isinstance(part, dict):
            yield from part
