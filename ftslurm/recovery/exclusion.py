"""Which nodes a run keeps away from, and which of an allocation an attempt runs on.

Pure: events and node names in, values out. A node is kept out after recovery.max_node_faults faults
of its own, or when a decision has said so, until that is recovery.node_fault_days old or somebody
readmits it; never so many that the job cannot start. The ranks keep to the order of the allocation,
whose first node runs the batch script and hosts rank 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

from ftslurm.recovery.likeness import Kind, crew_of, fill
from ftslurm.run.node_memory import BY_PERSON, EXCLUDED, FAULT, READMITTED, RETURNED, NodeEvent
from ftslurm.run.spec import ClusterSpec, RecoverySpec

REFUSE = "refuse"
"""recovery.elastic_lr: never fewer nodes."""

DAY_S = 86_400.0


@dataclass(frozen=True)
class Exclusion:
    """A node that is kept out."""

    node: str
    since: float
    attempt: int
    why: str


@dataclass(frozen=True)
class Placement:
    """What becomes of the nodes of an allocation."""

    ranks_on: list[str]
    """In the allocation's order; empty: it cannot serve."""
    spares: list[str] = field(default_factory=list)
    """Usable, and not needed."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Node -> why no rank runs on it."""
    why_not: str = ""
    """Why the allocation cannot serve."""
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    """What is known of its nodes, where spares are to match."""
    doubts: list[str] = field(default_factory=list)
    """In sentences: nodes that are unlike the others and serve, as there are no other ones, and
    spares that do and of which it is not known."""

    @property
    def serves(self) -> bool:
        return bool(self.ranks_on)


def still_counting(
    events: Sequence[NodeEvent], *, fault_days: float, now: float
) -> list[NodeEvent]:
    """Without what was held against a node more than so many days ago: it has been repaired by now,
    or will fail once more. `fault_days` 0: nothing is forgotten."""
    since = now - fault_days * DAY_S if fault_days else 0.0
    return [event for event in events if event.at >= since or event.kind not in (FAULT, EXCLUDED)]


def fault_counts(events: Sequence[NodeEvent]) -> dict[str, int]:
    """Faults of each node since it was last readmitted."""
    counts: dict[str, int] = {}
    for event in events:
        if event.kind == FAULT:
            counts[event.node] = counts.get(event.node, 0) + 1
        elif event.kind == READMITTED:
            counts.pop(event.node, None)
    return counts


def taken_back(events: Sequence[NodeEvent]) -> frozenset[str]:
    """Nodes that were given up and are used again, as the run could not do without them."""
    newest = {event.node: event for event in events if event.kind in (EXCLUDED, READMITTED)}
    return frozenset(
        node
        for node, event in newest.items()
        if event.kind == READMITTED and event.cause != BY_PERSON
    )


def troubles(events: Sequence[NodeEvent]) -> dict[str, int]:
    """How often each node was given up or at fault, ever: it may be needed, others are better."""
    counts: dict[str, int] = {}
    for event in events:
        if event.kind in (FAULT, EXCLUDED):
            counts[event.node] = counts.get(event.node, 0) + 1
    return counts


def are_enough(faults: int, max_node_faults: int) -> bool:
    """For the node to be kept out. `max_node_faults` 0: faults exclude nobody."""
    return 0 < max_node_faults <= faults


def excluded_now(events: Sequence[NodeEvent], *, max_node_faults: int) -> list[Exclusion]:
    """Oldest first."""
    found: dict[str, Exclusion] = {}
    faults: dict[str, int] = {}
    for event in events:
        if event.kind == READMITTED:
            found.pop(event.node, None)
            faults.pop(event.node, None)
            continue
        if event.kind == FAULT:
            faults[event.node] = faults.get(event.node, 0) + 1
        enough = are_enough(faults.get(event.node, 0), max_node_faults)
        if event.node not in found and (event.kind == EXCLUDED or (event.kind == FAULT and enough)):
            found[event.node] = Exclusion(event.node, event.at, event.attempt, event.why)
    return list(found.values())


def too_many(
    exclusions: Sequence[Exclusion], *, serving: Collection[str], needed: int
) -> list[Exclusion]:
    """Those to give up, oldest first, so that `needed` of the nodes that could serve are left.

    None when nobody can say, or even that would not do: the job then waits for nodes that are away,
    not for these.
    """
    missing = needed - len(set(serving) - {one.node for one in exclusions})
    candidates = [one for one in exclusions if one.node in serving]
    return candidates[:missing] if 0 < missing <= len(candidates) else []


def least_nodes(cluster: ClusterSpec, recovery: RecoverySpec) -> int:
    """Fewest nodes that an attempt may run on."""
    if recovery.min_nodes is None or recovery.elastic_lr == REFUSE:
        return cluster.nodes
    return min(recovery.min_nodes, cluster.nodes)


def place(
    nodes: Sequence[str],
    *,
    wanted: int,
    least: int,
    unusable: Mapping[str, str],
    faults: Mapping[str, int],
    kinds: Optional[Mapping[str, Kind]] = None,
    gpus: Optional[int] = None,
) -> Placement:
    """`nodes`: of the allocation; `unusable`: node -> why; `faults`: of nodes that may be used,
    which a spare is preferred to; `kinds`, `gpus`: see likeness.py. Fewer than `wanted` only where
    there is nothing left that matches."""
    kinds = kinds or {}
    left_out = {node: unusable[node] for node in nodes if node in unusable}
    usable = [node for node in nodes if node not in unusable]
    if nodes[0] in unusable:
        why = f"{nodes[0]}, where the batch script runs, {unusable[nodes[0]]}"
        return Placement([], left_out=left_out, why_not=why, kinds=kinds)
    crew = crew_of(nodes, wanted, kinds, gpus)
    filled = fill(crew, usable, kinds, gpus, faults)
    for node, why in filled.unlike.items():
        left_out[node] = f"can stand in for none of the others: {why}"
    chosen = [node for node in usable if node in filled.chosen]
    if len(chosen) < least:
        why = f"{len(chosen)} of its nodes can be used, {least} are needed"
        told = "".join(f"; {node} {reason}" for node, reason in left_out.items())
        return Placement([], left_out=left_out, why_not=why + told, kinds=kinds)
    odd = [
        f"node {node} is unlike the others ({why}), and no other node can be used"
        for node, why in crew.odd.items()
        if node in chosen
    ]
    return Placement(
        ranks_on=chosen,
        spares=[node for node in usable if node not in chosen and node not in left_out],
        left_out=left_out,
        kinds=kinds,
        doubts=odd + filled.doubts,
    )


def hostlist_to_set(
    old: Collection[str],
    *,
    by_person: Collection[str],
    ours: Sequence[NodeEvent],
    now: Sequence[str],
) -> list[str]:
    """What a job's list of excluded nodes is to become. Setting it replaces it, so what others have
    put there stays, and so does a person's own; of ours only what holds now."""
    once_ours = {event.node for event in ours if event.kind != RETURNED}
    return sorted({*by_person, *now} | (set(old) - once_ours))


def returns_in_a_row(events: Sequence[NodeEvent], newest_attempt: int, *, since: float) -> int:
    """How often the run has given an allocation back since its newest attempt was claimed, and
    since `since`, when a person last queued it."""
    return sum(
        event.kind == RETURNED and event.attempt == newest_attempt and event.at >= since
        for event in events
    )
