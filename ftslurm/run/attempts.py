"""What happened: the journal of a run's attempts.

An attempt is one launch of all ranks. Its number is claimed by an exclusive mkdir and never used
again; its records are added to, never overwritten by a later attempt. Facts only: whether to go on
is decided in `recovery/`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, TypeVar

from ftslurm.errors import FormatError, RunError
from ftslurm.files import (
    append_record,
    best_effort,
    claim_folder,
    is_listed,
    list_folder,
    read_json,
    read_records,
    write_json,
)
from ftslurm.run.layout import AttemptLayout, RunLayout

SCHEMA_VERSION = 1

_Value = TypeVar("_Value")

# Outcome.result: how the ranks themselves say an attempt ended.
FINISHED = "finished"
STOPPED = "stopped"
FAILED = "failed"

PACED = "paced"
"""Event: the interval between saves was chosen anew, and from what."""


@dataclass(frozen=True)
class AdoptedStep:
    """A committed step that existed when an attempt was claimed (the fence of the run)."""

    step: int
    digest: str
    """Digest in its COMMITTED file; empty: that could not be read, and `by` is who published it."""
    by: int = 0


@dataclass(frozen=True)
class Attempt:
    """attempts/N/attempt.json, written once by `ftslurm claim`."""

    number: int
    job_id: str
    restart_count: int
    """Slurm's own count: 0 on the job's first run."""
    nodes: list[str]
    """Those that ranks run on, in order of rank."""
    claimed_at: float
    adopted: list[AdoptedStep] = field(default_factory=list)
    spares: list[str] = field(default_factory=list)
    """Nodes of the allocation that are held in reserve."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Nodes of the allocation that must not be used, and why."""
    tasks_per_node: Optional[int] = None
    """None: as in the spec (a record of an older ftslurm)."""
    world_size: Optional[int] = None
    """Ranks; fewer than the spec's where nodes were missing. None: as in the spec."""
    raw_job_id: str = ""
    """Slurm's number of the job, which an array task has beside its `70_1`; empty: not known."""
    cluster: str = ""
    """Name of the cluster that the job runs on; empty: not known."""
    kinds: list[dict[str, Any]] = field(default_factory=list)
    """What was known of the allocation's nodes, by which a spare is matched; only with spares.
    Nodes that are alike share a row (recovery/node_kinds.py): every rank reads this."""


def node_of(nodes: Sequence[str], rank: int, tasks_per_node: int) -> Optional[str]:
    """Where srun has put a rank: it fills one node after the other (its default distribution)."""
    place = rank // tasks_per_node
    return nodes[place] if place < len(nodes) else None


@dataclass(frozen=True)
class Outcome:
    """attempts/N/outcome.json, written once, by rank 0, after the last COMMITTED."""

    result: str
    """finished | stopped | failed"""
    step: int
    """Steps trained and applied when the attempt ended."""
    committed_step: Optional[int]
    signal: Optional[str] = None
    """Name of the signal that asked for the stop."""
    order: Optional[str] = None
    """stop | pause: the operator's order that asked for it (run/control.py)."""
    reason: str = ""
    retry: bool = True
    """False when the same start would fail the same way."""
    written_at: float = 0.0


@dataclass(frozen=True)
class Progress:
    """attempts/N/progress.json: rank 0's latest word, replaced every second or so, not durable."""

    step: int
    steps: int
    loss: Optional[float] = None
    tokens_per_s: Optional[float] = None
    restored_step: Optional[int] = None
    """Step restored at the start of this attempt; None: it began at step 0."""
    committed_step: Optional[int] = None
    failed_saves: int = 0
    interval_s: Optional[float] = None
    """Of training from one save to the next, as planned by now; None: none is due by the clock."""
    phase: str = "starting"
    """starting | restoring | training | saving | finished | stopped"""
    written_at: float = 0.0


def claim(layout: RunLayout, attempt: Attempt) -> Attempt:
    """Take the next attempt number; returns `attempt` with it. Safe against a double start."""
    layout.attempts.mkdir(exist_ok=True)
    # Before a rank looks there for orders: a name once looked up in vain may stay away (files.py).
    with best_effort("an order to the run may be seen late"):
        layout.control.mkdir(mode=0o700, exist_ok=True)
    number = max(numbers(layout), default=0) + 1
    while not claim_folder(layout.attempt(number).root):
        number += 1
    taken = dataclasses.replace(attempt, number=number)
    paths = layout.attempt(number)
    paths.logs.mkdir()
    paths.ranks.mkdir()
    write_json(paths.attempt_json, _record(taken))
    return taken


def numbers(layout: RunLayout) -> list[int]:
    """Claimed attempt numbers in order."""
    try:
        names = list_folder(layout.attempts)
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isdigit())


def claimed_numbers(layout: RunLayout) -> list[int]:
    """Those whose claim came to its end: one that was cut off never had ranks."""
    return [number for number in numbers(layout) if is_listed(layout.attempt(number).attempt_json)]


def read_attempt(layout: RunLayout, number: int) -> Attempt:
    path = layout.attempt(number).attempt_json
    record = _known(Attempt, read_json(path))
    rows = record.get("adopted")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise FormatError(f"`{path}` does not say which steps the attempt adopted; it is not whole")
    record["adopted"] = [_make(AdoptedStep, _known(AdoptedStep, row), path) for row in rows]
    return _make(Attempt, record, path)


def write_outcome(paths: AttemptLayout, outcome: Outcome) -> None:
    """Durable on return. A second write for the same attempt is a bug of the caller."""
    if paths.outcome_json.exists():
        raise RunError(f"`{paths.outcome_json}` exists; an outcome is written once")
    write_json(paths.outcome_json, _record(outcome))


def read_outcome(paths: AttemptLayout) -> Optional[Outcome]:
    """None when the ranks ended without a word (killed, crashed before they could write)."""
    try:
        record = read_json(paths.outcome_json)
    except FileNotFoundError:
        return None
    return _make(Outcome, _known(Outcome, record), paths.outcome_json)


def read_decision(paths: AttemptLayout) -> dict[str, Any]:
    """What `ftslurm recover` decided after it: action, cause, reason; empty when its batch shell
    died before it could, or it is damaged."""
    try:
        return read_json(paths.decision_json)
    except (FileNotFoundError, FormatError):
        return {}


def write_progress(paths: AttemptLayout, progress: Progress) -> None:
    write_json(paths.progress_json, _record(progress), durable=False)


def read_progress(paths: AttemptLayout) -> Optional[Progress]:
    try:
        record = read_json(paths.progress_json)
    except FileNotFoundError:
        return None
    return _make(Progress, _known(Progress, record), paths.progress_json)


def append_event(
    paths: AttemptLayout,
    kind: str,
    *,
    now: Callable[[], float] = time.time,
    **facts: Any,
) -> None:
    """Add one event, e.g. `append_event(paths, "committed", step=40)`.

    Writers: rank 0 and the batch loop's verbs, which run on the batch node one after the other.
    Kinds so far: claimed, preflight, restored, first_step, fell_back, rejected, signal, deadline
    (of the last save: how long, by what), committed, paced, save_failed, save_skipped,
    save_abandoned, retention_failed, code_changed, ranks_ended, decided, requeue_asked, gave_way,
    told (people, of an event), asked (of a program's rank 0, to leave).
    """
    append_record(paths.events, {"at": now(), "kind": kind, **facts})


def read_events(paths: AttemptLayout) -> list[dict[str, Any]]:
    return list(read_records(paths.events))


def _record(value: Any) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(value)}


def _known(kind: Any, record: dict[str, Any]) -> dict[str, Any]:
    names = {item.name for item in dataclasses.fields(kind)}
    return {key: value for key, value in record.items() if key in names}


def _make(kind: type[_Value], record: dict[str, Any], where: Any) -> _Value:
    try:
        return kind(**record)
    except TypeError as error:
        raise FormatError(f"`{where}` lacks a field ({error}); it is not whole") from None
