"""What Slurm says of nodes: its text as values, and whether a node is in other hands. Pure.

Only a node that is up, and that nobody else has plans with, may be touched. What is not known here,
a flag of a later version say, counts as other hands: mej/nhc#36, #41 and #82-84 are what comes of
the opposite. Read with `scontrol show node` and sinfo of 22.05, 24.11 and 26.05; TZ=UTC.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Optional

from ftslurm.errors import FormatError
from ftslurm.health.reason import Reason, parse_reason, parse_stamp

LISTING_FORMAT = "%N|%H|%u|%G|%E"
"""sinfo -N -o: name, time of the reason, who gave it, gres; the reason, which may hold a `|`."""

_DRAIN = "DRAIN"
_BASES_IN_SERVICE = frozenset({"IDLE", "ALLOCATED", "MIXED"})
# slurm_protocol_defs.c, node_state_flags, of the three versions; the rest of that table (FAIL,
# MAINTENANCE, REBOOT_*, POWER*, INVALID_REG, RESUME, EXTERNAL) is somebody's work under way, and a
# drain of a node that powers up kills its job (node_mgr.c, update_node).
_FLAGS_IN_SERVICE = frozenset({
    "BLOCKED", "CLOUD", "COMPLETING", "DYNAMIC_FUTURE", "DYNAMIC_NORM", "NOT_RESPONDING",
    "PERFCTRS", "PLANNED", "RESERVED",
})  # fmt: skip
_OUR_USERS = frozenset({"root", "slurm"})

_NAME = re.compile(r"^NodeName=(\S+)", re.MULTILINE)
# With what stands behind it: `State=IDLE` may be `State=IDLE+DRAIN`, cut off.
_STATE = re.compile(r"^ +State=(\S+)\s", re.MULTILINE)
# Slurm puts who and when behind the first line of a reason that has several.
_REASON = re.compile(r"^ +Reason=(.*)$", re.MULTILINE)
_GPU = re.compile(r"(^|,)gpu\b")
_BY = re.compile(r"(.*) \[([^\[\]@]*)@([^\[\]@]*)\]")


@dataclass(frozen=True)
class NodeState:
    base: str
    """IDLE, ALLOCATED, MIXED, DOWN, ..."""
    flags: frozenset[str]
    reason: str = ""
    reason_by: str = ""
    reason_at: Optional[float] = None
    """UTC seconds, by slurmctld's clock."""

    @property
    def is_drained(self) -> bool:
        """No new job comes to it; a running one is not disturbed."""
        return _DRAIN in self.flags

    @property
    def is_ours(self) -> bool:
        return self.reason_by in _OUR_USERS and parse_reason(self.reason) is not None


@dataclass(frozen=True)
class Drain:
    """A drain of ours that stands. `at`: since when, by slurmctld's clock."""

    node: str
    code: str
    at: float
    reason: str = ""


@dataclass(frozen=True)
class Listing:
    drains: tuple[Drain, ...]
    gpu_nodes: int


def may_drain(state: NodeState, *, is_worse: bool) -> tuple[bool, str]:
    """Whether our reason may be written to the node, and why not. `is_worse`: it is than the one of
    ours that may be there."""
    held = in_other_hands(state)
    if held:
        return False, held
    if state.is_drained and not is_worse:
        return False, f"it is drained by us already ({state.reason})"
    return True, ""


def in_other_hands(state: NodeState) -> str:
    """Why the node is not ours to change; empty where it is."""
    if state.base not in _BASES_IN_SERVICE:
        return f"the node is {state.base}"
    closed = state.flags - _FLAGS_IN_SERVICE - {_DRAIN}
    if closed:
        return f"the node is {state.base}+{'+'.join(sorted(closed))}"
    if state.reason and not state.is_ours:  # a note, or a drain
        return (
            f"it has a reason of another ({state.reason[:80]}, by {state.reason_by or 'unknown'})"
        )
    if state.is_drained and not state.reason:
        return "it is drained without a reason"
    return ""


def has_note_of_another(state: NodeState) -> bool:
    """In service, with words of somebody's as its reason, which can only be those of slurm.conf:
    scontrol drops a reason without a drain, and a job's start takes one away until slurm.conf is
    read again. We would write over it; Slurm, when it drains the node itself, keeps it (seen on
    22.05, 24.11 and 26.05)."""
    is_plain = not in_other_hands(replace(state, reason=""))
    return is_plain and not state.is_drained and bool(state.reason) and not state.is_ours


def first_drained_at(state: NodeState) -> Optional[float]:
    """When a drain of ours began, by slurmctld's clock, whatever has replaced its reason since."""
    return _first(state.reason_at, parse_reason(state.reason))


def _first(at: Optional[float], reason: Optional[Reason]) -> Optional[float]:
    if at is None or reason is None or reason.since is None:
        return at
    return min(at, reason.since)


def parse_node(text: str, node: str) -> NodeState:
    """Of `scontrol show node NODE`; FormatError where that is not about this one node."""
    names, states = _NAME.findall(text), _STATE.findall(text)
    if names != [node] or len(states) != 1:
        raise FormatError(
            f"`scontrol show node {node}` does not tell the state of that node alone, it says "
            f"{text.strip()[:120]!r}"
        )
    base, *flags = states[0].split("+")
    if base.endswith("*"):
        base, flags = base[:-1], [*flags, "NOT_RESPONDING"]
    found = _REASON.search(text)
    reason = found[1].strip() if found else ""
    by = _BY.fullmatch(reason)
    if by is None:
        return NodeState(base, frozenset(flags), reason)
    return NodeState(base, frozenset(flags), by[1], by[2], parse_stamp(by[3]))


def parse_listing(text: str) -> Listing:
    """Of `sinfo -h -N -o LISTING_FORMAT`. A node of two partitions is listed twice; the further
    lines of a reason that has several are no rows."""
    drains: dict[str, Drain] = {}
    gpu_nodes = set()
    for line in text.splitlines():
        row = line.strip().split("|", 4)
        if len(row) != 5:
            continue
        node, stamp, user, gres, text_of_reason = row
        if _GPU.search(gres):
            gpu_nodes.add(node)
        reason = parse_reason(text_of_reason)
        at = _first(parse_stamp(stamp), reason)
        if reason is not None and at is not None and user in _OUR_USERS:
            drains[node] = Drain(node, reason.code, at, text_of_reason.strip())
    return Listing(tuple(drains.values()), len(gpu_nodes))
