"""What is on record of one attempt, read as it stands, and the facts its time line is drawn from.

Reads only. A record that is not there or torn counts as absent: what it would have said is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import FormatError
from ftslurm.files import list_folder, read_json, read_records
from ftslurm.run.attempts import (
    FINISHED,
    STOPPED,
    Attempt,
    Outcome,
    Progress,
    node_of,
    read_attempt,
    read_events,
    read_outcome,
    read_progress,
)
from ftslurm.run.layout import AttemptLayout, RunLayout
from ftslurm.run.timeline import Clocks, Facts

ASKED_TO_LEAVE = ("asked_to_leave", "preempted", "time_limit", "ordered")
"""Causes of a decision under which the ranks have not failed."""


@dataclass(frozen=True)
class Records:
    """What is on record of one attempt, as read."""

    paths: AttemptLayout
    claim: Optional[Attempt]
    """None: the claim was cut short."""
    outcome: Optional[Outcome]
    progress: Optional[Progress]
    events: list[dict[str, Any]]
    decision: dict[str, Any]
    agents: dict[str, Any]
    agent_events: list[dict[str, Any]]
    silent_ranks: bool = False
    """No rank left an error record."""

    @property
    def clocks(self) -> Clocks:
        """One that was not measured is not in it."""
        offsets = {
            name: float(node["offset_s"])
            for name, node in self.agents.get("nodes", {}).items()
            if node.get("offset_s") is not None
        }
        return Clocks(offsets)

    @property
    def batch_node(self) -> Optional[str]:
        return self.claim.nodes[0] if self.claim and self.claim.nodes else None

    @property
    def world_size(self) -> Optional[int]:
        """None: a record of before it was noted, and no agent counted."""
        return self.claim.world_size if self.claim else None

    def node_of(self, rank: int) -> Optional[str]:
        """None: a record of before it was noted."""
        if self.claim is None or not self.claim.tasks_per_node:
            return None
        return node_of(self.claim.nodes, rank, self.claim.tasks_per_node)

    @property
    def trained_at(self) -> Optional[float]:
        """Rank 0's latest word while it trained."""
        trains = self.progress is not None and self.progress.phase == "training"
        return self.progress.written_at if self.progress and trains else None


def read_attempt_records(layout: RunLayout, number: int) -> Records:
    paths = layout.attempt(number)
    names = set(list_folder(paths.root))

    def read(path: Path, reader: Callable[[], Any]) -> Any:
        return _or_none(reader) if path.name in names else None

    agents_json, agents_jsonl = paths.agents_json, paths.agents_jsonl
    return Records(
        paths=paths,
        claim=read(paths.attempt_json, lambda: read_attempt(layout, number)),
        outcome=read(paths.outcome_json, lambda: read_outcome(paths)),
        progress=read(paths.progress_json, lambda: read_progress(paths)),
        events=read(paths.events, lambda: read_events(paths)) or [],
        decision=read(paths.decision_json, lambda: read_json(paths.decision_json)) or {},
        agents=read(agents_json, lambda: read_json(agents_json)) or {},
        agent_events=read(agents_jsonl, lambda: list(read_records(agents_jsonl))) or [],
        silent_ranks="ranks" not in names or not list_folder(paths.ranks),
    )


def facts_of(here: Records, following: Optional[Records], errors: Iterable[Any]) -> Facts:
    """What the time line is drawn from."""
    left = here.outcome is not None and here.outcome.result in (STOPPED, FINISHED)
    return Facts(
        events=here.events,
        findings=here.agents.get("findings", []),
        agent_events=here.agent_events,
        errors=list(errors),
        clocks=here.clocks,
        last_sign_at=here.trained_at,
        asked_to_leave=left or here.decision.get("cause") in ASKED_TO_LEAVE,
        decided_at=here.decision.get("decided_at"),
        next_events=following.events if following else (),
        next_claimed_at=claimed_at(following),
        next_ahead_s=_ahead_s(here, following),
    )


def error_records(paths: AttemptLayout) -> Iterator[dict[str, Any]]:
    """Of all ranks that left one."""
    for path in sorted(paths.ranks.glob("rank-*.json")):
        record = read_error(path)
        if record is not None:
            yield record


def _or_none(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (FileNotFoundError, FormatError):
        return None


def read_error(path: Path) -> Optional[dict[str, Any]]:
    record = _or_none(lambda: read_json(path))
    return record if record and {"rank", "at"} <= record.keys() else None


def error_record(here: Records, rank: int) -> Optional[dict[str, Any]]:
    return None if here.silent_ranks else read_error(here.paths.ranks / f"rank-{rank:05d}.json")


def claimed_at(records: Optional[Records]) -> Optional[float]:
    return records.claim.claimed_at if records and records.claim else None


def _ahead_s(here: Records, following: Optional[Records]) -> float:
    """How far the clock of the next attempt's batch node is ahead of this one's: as either leader
    has measured the other's node; 0 where neither has."""
    if following is None or following.batch_node is None or here.batch_node is None:
        return 0.0
    seen = here.clocks.offsets_s.get(following.batch_node)
    if seen is not None:
        return seen
    return -following.clocks.offsets_s.get(here.batch_node, 0.0)
