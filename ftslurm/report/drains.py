"""Nodes out of service in a window: drained by us, lost, or for what others have written. Pure.

A drain of ours is a judgement of the probe, whose rule its reason names, and ends no job; a lost
node is one that Slurm has no answer from. What an administrator or another program has set is told
by its own reason and taken for neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Optional

from ftslurm.health.reason import parse_reason
from ftslurm.scheduler.node_events import NodeEvent

OURS, LOST, OTHERS = "ours", "lost", "others"
_REASONS_TOLD = 3
_LOST = ("Not responding", "Node unexpectedly rebooted")
"""slurmctld's words: the first was seen (22.05, 24.11), the second is in its node_mgr.c."""
_SAME_S = 1.0
"""A node whose reason changes has one event end and the next one begin."""


@dataclass
class Kind:
    """Events of one kind."""

    events: int = 0
    """One of which the reason changed counts once."""
    nodes: list[str] = field(default_factory=list)
    hours: float = 0.0
    """Of nodes, within the window."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Of ours the rule, of others the reason."""

    def most(self) -> list[tuple[str, int]]:
        """The reasons that came most often."""
        return sorted(self.reasons.items(), key=lambda item: -item[1])[:_REASONS_TOLD]


@dataclass
class Drains:
    kinds: dict[str, Kind] = field(
        default_factory=lambda: {name: Kind() for name in (OURS, LOST, OTHERS)}
    )


def drains(
    events: Iterable[NodeEvent], *, since: Optional[float], until: Optional[float], now: float
) -> Drains:
    """`since`, `until`: the window, None where it has no bound."""
    found = Drains()
    before: dict[tuple[str, str], tuple[float, str]] = {}
    for event in sorted(events, key=lambda one: (one.begin_at, one.node)):
        name, reason = _kind(event)
        kind = found.kinds[name]
        is_first = (name, event.node) not in before
        before_at, reason_before = before.get((name, event.node), (0.0, ""))
        is_new = is_first or event.begin_at - before_at > _SAME_S
        before[name, event.node] = event.end_at or now, reason
        kind.events += is_new
        kind.nodes += [event.node] if is_first else []
        begin_at = event.begin_at if since is None else max(since, event.begin_at)
        end_at = min(event.end_at or now, now if until is None else until)
        kind.hours += max(0.0, end_at - begin_at) / 3600.0
        if is_new or reason != reason_before:
            kind.reasons[reason] = kind.reasons.get(reason, 0) + 1
    return found


def _kind(event: NodeEvent) -> tuple[str, str]:
    ours = parse_reason(event.reason)
    if ours is not None:
        return OURS, ours.code
    if event.reason.startswith(_LOST):
        return LOST, event.reason
    return OTHERS, event.reason or "no reason"
