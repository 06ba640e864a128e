"""Which node may stand in for which: a spare has to match GPU model, count and network. Pure.

What is not known of a node is not held against it. Nodes are told apart by their kinds; as many as
the run needs of one kind are its crew, and a spare serves only in the place of one that is like it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Optional

Counts = tuple[tuple[str, int], ...]
"""What there is, and how many of it, by name."""

GPUS, NETWORK = "GPU model", "network"

MINOR_SHARE = 0.5
"""Of the fastest port's rate, below which one is for something else: storage, the board's own."""
_MAKER = re.compile(r"\Anvidia[ _-]", re.IGNORECASE)
"""Older drivers leave it out of a GPU's name, and so do people who name a type."""
_RATE = re.compile(r" (\d+(?:\.\d+)?) Gb/s\Z")


@dataclass(frozen=True)
class Kind:
    """What counts of a node, as far as it is known."""

    gpus: Optional[Counts] = None
    """Models as the driver names them. None: it shows none to who has looked, or is not there."""
    gres: Optional[Counts] = None
    """Types of `gres/gpu` as Slurm names them, empty for what has no type."""
    ports: Optional[Counts] = None
    """RDMA ports that are up: link layer and rate. Empty: the node has none."""
    interface_mbps: Optional[int] = None
    """Rate of cluster.interface."""

    def to_record(self) -> dict[str, Any]:
        told = {one.name: getattr(self, one.name) for one in fields(self)}
        return {
            name: dict(value) if isinstance(value, tuple) else value
            for name, value in told.items()
            if value is not None
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Kind:
        """TypeError, ValueError, AttributeError: it is none."""
        speed = record.get("interface_mbps")
        counts = {name: _counts(record.get(name)) for name in ("gpus", "gres", "ports")}
        return cls(**counts, interface_mbps=None if speed is None else int(speed))

    def or_else(self, other: Kind) -> Kind:
        """With what `other` knows where nothing is known here."""
        mine = {one.name: getattr(self, one.name) for one in fields(self)}
        return Kind(**{
            name: getattr(other, name) if value is None else value for name, value in mine.items()
        })  # fmt: skip


def _counts(record: Optional[Mapping[str, int]]) -> Optional[Counts]:
    if record is None:
        return None
    return tuple(sorted((str(name), int(count)) for name, count in record.items()))


@dataclass(frozen=True)
class Likeness:
    """Of one node to what is wanted."""

    against: str = ""
    """Why it does not match; empty: nothing is known against it."""
    alike: int = 0
    """Of how many things it is known that they match."""
    unknown: tuple[str, ...] = ()
    """Of which it is not known."""


def likeness(one: Kind, wanted: Kind, gpus: Optional[int]) -> Likeness:
    """May a node like `one` stand where a node like `wanted` is needed? `gpus`: how many of a node
    the job asks for, 0: nobody knows; None: it uses none, and they do not count."""
    found = [(NETWORK, _network(one, wanted))]
    if gpus is not None:
        found.append((GPUS, _gpus(one, wanted, gpus)))
    return Likeness(
        "; ".join(why for _, why in found if why),
        sum(why == "" for _, why in found),
        tuple(what for what, why in found if why is None),
    )


def _gpus(one: Kind, wanted: Kind, needed: int) -> Optional[str]:
    """Empty: alike; None: not known. The driver's names are compared where both are told: Slurm's
    types are what somebody has written into a file."""
    if one.gpus and wanted.gpus:
        return _same_gpus(one.gpus, wanted.gpus, needed)
    if not one.gres or not wanted.gres:
        return None
    if not (_is_named(one.gres) and _is_named(wanted.gres)):
        here, there = _total(one.gres), _total(wanted.gres)
        enough = here >= min(there, needed or there)
        return None if enough else f"it has {here} GPUs where {there} are needed"
    return _same_gpus(one.gres, wanted.gres, needed)


def _same_gpus(have: Counts, want: Counts, needed: int) -> str:
    least = min(_total(want), needed or _total(want))
    if _models(have) == _models(want) and _total(have) >= least:
        return ""
    return f"its GPUs are {_told(have)} where {_told(want)} are needed"


def _network(one: Kind, wanted: Kind) -> Optional[str]:
    if one.interface_mbps and wanted.interface_mbps and one.interface_mbps < wanted.interface_mbps:
        needed = f"{wanted.interface_mbps} are needed"
        return f"its network interface has {one.interface_mbps} Mb/s where {needed}"
    if one.ports is None or wanted.ports is None:
        return None
    have, want = dict(one.ports), _major(wanted.ports)
    if all(have.get(name, 0) >= count for name, count in want):
        return ""
    needed = f"{_told(want)} are needed"
    return f"its RDMA ports that are up are {_told(one.ports)} where {needed}"


def _models(counts: Counts) -> set[str]:
    return {_MAKER.sub("", name).casefold() for name, _ in counts}


def _major(ports: Counts) -> Counts:
    """Without those that serve something else."""
    rates = {name: float(found[1]) for name, _ in ports if (found := _RATE.search(name))}
    least = MINOR_SHARE * max(rates.values(), default=0.0)
    return tuple((name, count) for name, count in ports if rates.get(name, least) >= least)


@dataclass
class Crew:
    """What an allocation's nodes would be if all of them could be used."""

    seats: dict[str, Kind]
    """As many nodes as the run needs, the first of the allocation first, and what is needed there:
    of one that is like the most, what is known of any of these."""
    odd: dict[str, str] = field(default_factory=dict)
    """Those of `seats` that are unlike most of them, and why; there were no others."""


def crew_of(
    nodes: Sequence[str], wanted: int, kinds: Mapping[str, Kind], gpus: Optional[int]
) -> Crew:
    """The largest number of nodes that are alike; the first, which runs the batch script, is one of
    them where there are enough like it."""
    common, alike = _largest_group(nodes, wanted, kinds, gpus)
    first, *others = nodes
    in_order = [first, *(one for one in others if one in alike)]
    in_order += [one for one in others if one not in alike]
    seats, odd = {}, {}
    for node in in_order[:wanted]:
        seats[node] = common if node in alike else kinds.get(node, Kind())
        if node not in alike:
            odd[node] = likeness(seats[node], common, gpus).against
    return Crew(seats, odd)


def _largest_group(
    nodes: Sequence[str], wanted: int, kinds: Mapping[str, Kind], gpus: Optional[int]
) -> tuple[Kind, set[str]]:
    """The kind that most are of, with all that is known of it, and who is."""
    counts = Counter(kinds.get(node, Kind()) for node in nodes)  # of a thousand nodes a few kinds
    first = kinds.get(nodes[0], Kind())
    best: tuple[tuple[bool, int, bool, int], Kind, list[Kind]] = ((False, -1, False, -1), first, [])
    for kind in counts:
        found = {other: likeness(other, kind, gpus) for other in counts}
        like = [other for other, one in found.items() if not one.against]
        size = sum(counts[other] for other in like)
        # Of a node of which nothing is known all others are the like, and of one that has less than
        # most those are; it counts who is so both ways.
        same = [other for other in like if not likeness(kind, other, gpus).against]
        known = sum(counts[other] * found[other].alike for other in same)
        rank = (first in like and size >= wanted, known, first in like, size)
        if rank > best[0]:
            best = (rank, kind, like)
    _, common, like = best
    for other in like:
        common = common.or_else(other)
    # Two may be unlike of which one that is little known is the like.
    like = [other for other in like if not likeness(other, common, gpus).against]
    return common, {node for node in nodes if kinds.get(node, Kind()) in like}


@dataclass
class Filled:
    """Who serves, of those that can be used."""

    chosen: set[str]
    unlike: dict[str, str] = field(default_factory=dict)
    """Node that could be used and is like none that is needed -> why not."""
    doubts: list[str] = field(default_factory=list)
    """What is not known of those that stand in for another, in sentences."""


def fill(
    crew: Crew,
    usable: Sequence[str],
    kinds: Mapping[str, Kind],
    gpus: Optional[int],
    faults: Mapping[str, int],
) -> Filled:
    """For each place one that is like what is needed there: who has the fewest faults, who is known
    to be alike, the allocation's order. `usable`: in that order, its first node among them."""
    first, *free = usable
    filled = Filled({first})
    places = Counter(list(crew.seats.values())[1:])
    fits: set[str] = set()
    for wanted, count in places.items():
        found = {node: likeness(kinds.get(node, Kind()), wanted, gpus) for node in free}
        like = [node for node in free if not found[node].against]
        fits |= set(like)

        def rank(node: str, found: Mapping[str, Likeness] = found, here: Kind = wanted) -> Any:
            is_elsewhere = crew.seats.get(node, here) != here
            return is_elsewhere, faults.get(node, 0), len(found[node].unknown)

        best = sorted((node for node in like if node not in filled.chosen), key=rank)
        filled.chosen |= set(best[:count])
        if kinds:
            filled.doubts += _doubts([one for one in best[:count] if one not in crew.seats], found)
        for node in free:
            filled.unlike.setdefault(node, found[node].against)
    filled.unlike = {node: why for node, why in filled.unlike.items() if node not in fits}
    return filled


def _doubts(nodes: Collection[str], found: Mapping[str, Likeness]) -> list[str]:
    return [
        f"node {node} stands in for another, and whether its {' and '.join(found[node].unknown)} "
        "is the same is not known"
        for node in nodes
        if found[node].unknown
    ]


def _is_named(counts: Counts) -> bool:
    return all(name for name, _ in counts)


def _total(counts: Counts) -> int:
    return sum(count for _, count in counts)


def _told(counts: Counts) -> str:
    return ", ".join(f"{count} x {name or 'of no type'}" for name, count in counts) or "none"
