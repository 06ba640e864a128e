"""What members report, as values: rows of rank views, clock offsets, agents.json. Pure.

A row is a RankView without names, so that 10,000 ranks fit into some 2 MB a second. Ages travel as
of the moment they were read; how long ago that was is added at each hop.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Optional

from ftslurm.run.heartbeat import RankView

Row = list[Any]

_FIELDS = [item.name for item in dataclasses.fields(RankView)]
_AGES = [index for index, name in enumerate(_FIELDS) if name.endswith("age_s")]
_values = attrgetter(*_FIELDS)

# State of a node in agents.json and in the leader's answers.
LIVE = "live"
LOST = "lost"
"""Neither the leader nor a second member reaches it."""
GONE = "gone"
"""The node answers, its agent does not run (any more): nothing is known of its ranks."""


def to_row(view: RankView) -> Row:
    return [round(item, 3) if isinstance(item, float) else item for item in _values(view)]


def from_row(row: Sequence[Any], older_by_s: float) -> RankView:
    """The view, as old as it is by now; TypeError for the row of another version."""
    values = list(row)
    for index in _AGES:
        values[index] += older_by_s
    return RankView(*values)


class ClockOffset:
    """How far another node's clock is ahead of ours: by the ping with the smallest round trip among
    the last ones, its answer taken to have been written half way."""

    def __init__(self, keep: int = 60) -> None:
        self._pings: deque[tuple[float, float]] = deque(maxlen=keep)

    def add(self, *, sent_at: float, answered_at: float, received_at: float) -> None:
        rtt_s = received_at - sent_at
        if rtt_s >= 0:  # else our own clock was set in between
            self._pings.append((rtt_s, answered_at - (sent_at + received_at) / 2))

    @property
    def offset_s(self) -> Optional[float]:
        return min(self._pings)[1] if self._pings else None


@dataclass
class NodeReport:
    """The newest report on one node, at whoever holds it."""

    read_at: float
    """time.monotonic() here at which it was read there, by the ages it came with."""
    offset_s: Optional[float]
    """The node's clock less that of the agent that holds this."""
    attempt: int
    rows: list[Row] = field(default_factory=list)

    def to_wire(self, now: float) -> list[Any]:
        offset = None if self.offset_s is None else round(self.offset_s, 6)
        return [round(now - self.read_at, 3), offset, self.attempt, self.rows]

    @classmethod
    def from_wire(cls, row: Sequence[Any], now: float, hop_s: Optional[float]) -> NodeReport:
        """`hop_s`: offset of the clock of the agent that sends it."""
        age_s, offset_s, attempt, rows = row
        known = offset_s is not None and hop_s is not None
        return cls(now - age_s, offset_s + hop_s if known else None, attempt, rows)

    def views(self, now: float) -> list[RankView]:
        return [from_row(row, now - self.read_at) for row in self.rows]


@dataclass(frozen=True)
class AgentFinding:
    """Something the leader has found."""

    kind: str
    """hang | blocked | straggler | slow_all | drift | node_lost | leader_lost | leftover
    | gpu_held"""
    at: float
    since: float
    why: str
    """One sentence."""
    ranks: list[int] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    acted: bool = False
    """The ranks of the attempt are ended, or asked to leave, for it."""


def findings_in(record: Mapping[str, Any]) -> list[AgentFinding]:
    """Of an agents.json; TypeError for one of another version."""
    return [AgentFinding(**row) for row in record.get("findings", [])]


def status_record(
    *,
    attempt: int,
    at: float,
    leader: str,
    nodes: Mapping[str, Mapping[str, Any]],
    views: Iterable[RankView],
    findings: Sequence[AgentFinding],
) -> dict[str, Any]:
    """agents.json."""
    return {
        "schema_version": 1,
        "attempt": attempt,
        "at": at,
        "leader": leader,
        "nodes": nodes,
        "ranks": {str(view.rank): rank_record(view) for view in views},
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def rank_record(view: RankView) -> dict[str, Any]:
    return {
        "node": view.node,
        "pid": view.pid,
        "phase": view.phase,
        "step": view.step,
        "age_s": round(view.age_s, 3),
        "step_wall_s": view.step_wall_s,
        "step_own_s": view.step_own_s,
        "collective_seq": view.collective_seq,
        "collective": view.collective,
        "in_collective": view.in_collective,
        "alive": view.alive,
        "state": view.proc_state,
    }
