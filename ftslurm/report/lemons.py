"""Which nodes fail jobs more often than chance would have it. Pure and bounded.

Two kinds of evidence, each held against its own chance:
- Blame: faults that were said to be the node's. By chance each would have fallen on it with its
  share of all hours, or of all jobs where that is more.
- Failures of which nobody was blamed, as a sick node may break programs and nothing else. Programs
  differ, and so do partitions: a program is compared with itself, by how often it fails elsewhere.
  A failure counts where the program's job before it was done: a script that is broken fails again
  and again until it is mended, wherever it is tried. Where programs differ more between nodes than
  chance has it, all of them or these between the other nodes, as much is allowed to this one.

A node is a lemon where so much or more would come up on any node of the fleet less than once in a
hundred such fleets; a suspect where it would in less than one of five: then there is too little to
tell. How many faults would be enough is told as well, so that no lemon is not taken for no sick
node where so few jobs could not have shown one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

LEAST_FAULTS = 2
LEAST_PROGRAMS, LEAST_USERS = 3, 2
LEAST_OF_SUSPECT = 2
SIGNIFICANCE = 0.01
SUSPICION = 0.2
MOST_PAIRS = 400_000
"""Programs and nodes that are kept; what comes later is not looked at."""

_NUMBER = re.compile(r"\d+")


@dataclass
class NodeTally:
    jobs: int = 0
    hours: float = 0.0
    """Of jobs, so that a shared node may have more than the clock."""
    blamed: int = 0
    """Faults that were said to be its own; one that has ended several jobs counts once."""


@dataclass(frozen=True)
class Lemon:
    node: str
    jobs: int
    """On it; where nobody was blamed, those that came after one of the same program was done."""
    failed: int
    """By which it stands out: faults, or such jobs that failed."""
    is_blamed: bool
    expected: float
    """So many chance would have given it."""
    chance: float
    """Of so many or more on any one node of the fleet."""
    programs: int = 0
    """Where nobody was blamed: that failed on it more than elsewhere."""
    users: int = 0
    """Whose they are."""


@dataclass(frozen=True)
class Judged:
    lemons: list[Lemon]
    """The likeliest first."""
    suspects: list[Lemon]
    """Of which it is too early to tell."""
    nodes: int
    """That were looked at."""
    faults: int
    """That were blamed on one of them."""
    enough: Optional[int]
    """Of these faults, or one fault more where they are too few: so many on one node of the usual
    share would make it a lemon. None: with a single node there is nothing to compare with."""

    @property
    def is_too_few(self) -> bool:
        """Not even all of them on one node could have told."""
        return self.enough is None or self.enough > self.faults


Program = tuple[str, str, str]
"""User, partition, name less its numbers."""


@dataclass(frozen=True)
class Held:
    """A program on a node, held against itself elsewhere."""

    user: str
    jobs: int
    failed: int
    rate: float
    """By which it fails elsewhere."""
    off: float
    """Of the other nodes, by that rate: the squares by which their failures are off, summed up, and
    what chance alone would make of them."""
    variance: float

    @property
    def expected(self) -> float:
        return self.jobs * self.rate


class Programs:
    """How often jobs of each program failed, unblamed, on each node, right after one was done."""

    def __init__(self) -> None:
        self._on: dict[Program, dict[str, list[int]]] = {}
        self._is_done: dict[Program, bool] = {}
        self._pairs = 0

    def add(self, program: Program, nodes: Mapping[str, bool]) -> None:
        """The next job of it; `nodes`: whether it failed on each."""
        is_done = not all(nodes.values())
        if self._is_done.get(program):
            here = self._on[program]
            for node, is_failed in nodes.items():
                if node not in here:
                    if self._pairs >= MOST_PAIRS:
                        continue
                    self._pairs += 1
                    here[node] = [0, 0]
                here[node][0] += 1
                here[node][1] += is_failed
        elif is_done:
            if program not in self._on:
                if self._pairs >= MOST_PAIRS:
                    return
                self._pairs += 1
                self._on[program] = {}
        else:
            return
        self._is_done[program] = is_done

    def by_node(self) -> dict[str, list[Held]]:
        """Each program that was on the node and elsewhere."""
        found: dict[str, list[Held]] = {}
        for (user, _, _), here in self._on.items():
            for node, held in _held(user, here).items():
                found.setdefault(node, []).append(held)
        return found


def _held(user: str, here: Mapping[str, list[int]]) -> dict[str, Held]:
    jobs = sum(count for count, _ in here.values())
    failed = sum(count for _, count in here.values())
    jobs_2 = sum(count * count for count, _ in here.values())
    both = sum(count * bad for count, bad in here.values())
    failed_2 = sum(bad * bad for _, bad in here.values())
    found = {}
    for node, (own, bad) in here.items():
        others, nodes = jobs - own, len(here) - 1
        if not others:
            continue
        # Half a failure more, or the first one of a program would be a wonder.
        rate = min(1.0, (failed - bad + 0.5) / (others + 1.0))
        off, variance = 0.0, 0.0
        if nodes > 1:  # their own mean is in the rate: one of them says nothing
            off = (failed_2 - bad * bad) - 2.0 * rate * (both - own * bad)
            off = (off + rate * rate * (jobs_2 - own * own)) * nodes / (nodes - 1)
            variance = others * rate * (1.0 - rate)
        found[node] = Held(user, own, bad, rate, off, variance)
    return found


def program_of(user: str, partition: str, name: str) -> Program:
    """`sweep-17` and `sweep-18` are one."""
    return user, partition, _NUMBER.sub("#", name)


def judge(tallies: Mapping[str, NodeTally], programs: Programs) -> Judged:
    """By blame where a node stands out for that, else by programs."""
    found = {one.node: one for one in _by_programs(len(tallies), programs)}
    for one in _by_blame(tallies):
        if one.node not in found or one.chance < max(SIGNIFICANCE, found[one.node].chance):
            found[one.node] = one
    ordered = sorted(found.values(), key=lambda one: (one.chance, one.node))
    faults = sum(one.blamed for one in tallies.values())
    return Judged(
        [one for one in ordered if _is_lemon(one)],
        [one for one in ordered if not _is_lemon(one)],
        len(tallies),
        faults,
        _enough(faults, len(tallies)),
    )


def _is_lemon(one: Lemon) -> bool:
    is_broad = one.is_blamed or (one.programs >= LEAST_PROGRAMS and one.users >= LEAST_USERS)
    return one.chance < SIGNIFICANCE and is_broad


def _enough(faults: int, nodes: int) -> Optional[int]:
    """Faults on a node of the usual share that make it a lemon."""
    if nodes < 2:
        return None
    share = 1.0 / nodes
    low, high = LEAST_FAULTS, faults + 1
    while low < high:
        middle = (low + high) // 2
        if _of_fleet(tail(faults, middle, share), nodes) < SIGNIFICANCE:
            high = middle
        else:
            low = middle + 1
    if low <= faults:
        return low
    while _of_fleet(share**low, nodes) >= SIGNIFICANCE:
        low += 1
    return low


def _by_blame(tallies: Mapping[str, NodeTally]) -> Iterator[Lemon]:
    faults = sum(one.blamed for one in tallies.values())
    jobs = sum(one.jobs for one in tallies.values())
    hours = sum(one.hours for one in tallies.values())
    for node, one in tallies.items():
        if one.blamed < LEAST_FAULTS or one.jobs == jobs:
            continue
        share = max(one.jobs / jobs, one.hours / hours if hours else 0.0)
        chance = _of_fleet(tail(faults, one.blamed, share), len(tallies))
        if chance < SUSPICION and one.blamed > faults * share:
            yield Lemon(node, one.jobs, one.blamed, True, faults * share, chance)


def _by_programs(nodes: int, programs: Programs) -> Iterator[Lemon]:
    by_node = programs.by_node()
    whole_off, whole_variance = _off_of([one for told in by_node.values() for one in told])
    for node, told in by_node.items():
        jobs, failed = sum(one.jobs for one in told), sum(one.failed for one in told)
        expected = sum(one.expected for one in told)
        worse = [one for one in told if one.failed > one.expected]
        if len(worse) < LEAST_OF_SUSPECT or failed <= expected:
            continue
        # Chances that differ spread less than a binomial of their mean: this errs for the node.
        own_off, own_variance = _off_of(told)
        spread = max(
            _ratio(whole_off - own_off, whole_variance - own_variance),
            _ratio(sum(one.off for one in told), sum(one.variance for one in told)),
        )
        few = int(failed / spread)
        chance = tail(max(few, round(jobs / spread)), few, expected / jobs)
        chance = _of_fleet(chance, nodes)
        if chance < SUSPICION:
            users = len({one.user for one in worse})
            yield Lemon(node, jobs, failed, False, expected, chance, len(worse), users)


def _off_of(told: Sequence[Held]) -> tuple[float, float]:
    """As `off` and `variance`, of these themselves."""
    return (
        sum((one.failed - one.expected) ** 2 for one in told),
        sum(one.expected * (1.0 - one.rate) for one in told),
    )


def _ratio(off: float, variance: float) -> float:
    """By how much failures differ between nodes, against chance alone: a program that fails every
    other time for a day does so where it happens to be."""
    return max(1.0, off / variance) if variance > 0 else 1.0


def _of_fleet(chance: float, nodes: int) -> float:
    """Each node is looked at twice."""
    return min(1.0, chance * nodes * 2)


def tail(n: int, k: int, p: float) -> float:
    """P(X >= k) of a binomial X."""
    if k <= 0 or p >= 1.0:
        return 1.0
    if p <= 0.0 or k > n:
        return 0.0
    log_p, log_q = math.log(p), math.log1p(-p)
    whole = math.lgamma(n + 1)
    found = 0.0
    for i in range(k, n + 1):
        term = math.exp(
            whole - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * log_p + (n - i) * log_q
        )
        found += term
        if i > n * p and term < 1e-18 * found:
            break  # and those behind it are smaller still
    return min(1.0, found)
