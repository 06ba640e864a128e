"""Which nodes fail jobs more often than chance would have it. Pure and bounded.

Two kinds of evidence, each held against its own chance:
- Blame: faults that were said to be the node's. By chance each would have fallen on it with its
  share of all hours, or of all jobs where that is more.
- Failures of which nobody was blamed, as a sick node may break programs and nothing else. Programs
  differ, and so do partitions: a program is compared with itself, by how often it fails elsewhere.
  On one node it counts once, however often it was tried there, and not before it has ever been
  done: until then its failures are its own.

A node is a lemon where so much or more would come up on any node of the fleet less than once in a
hundred such fleets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

LEAST_FAULTS = 2
LEAST_PROGRAMS, LEAST_USERS = 3, 2
SIGNIFICANCE = 0.01
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
    """On it; programs where nobody was blamed."""
    failed: int
    """By which it stands out: faults, or programs that failed where nobody was blamed."""
    is_blamed: bool
    expected: float
    """So many chance would have given it."""
    chance: float
    """Of so many or more on any one node of the fleet."""


Program = tuple[str, str, str]
"""User, partition, name less its numbers."""


class Programs:
    """Jobs of each program on each node: how many there were, and how many failed unblamed."""

    def __init__(self) -> None:
        self._on: dict[Program, dict[str, list[int]]] = {}
        self._pairs = 0

    def add(self, program: Program, nodes: Mapping[str, bool]) -> None:
        """One job; `nodes`: whether it failed on each."""
        if program not in self._on and all(nodes.values()):
            return
        here = self._on.setdefault(program, {})
        for node, is_failed in nodes.items():
            if node not in here:
                if self._pairs >= MOST_PAIRS:
                    continue
                self._pairs += 1
                here[node] = [0, 0]
            here[node][0] += 1
            here[node][1] += is_failed

    def by_node(self) -> dict[str, list[tuple[str, bool, float]]]:
        """Each program that was on the node and elsewhere: its user, whether it failed on it, and
        how likely that was by how often it fails elsewhere."""
        found: dict[str, list[tuple[str, bool, float]]] = {}
        for (user, _, _), here in self._on.items():
            jobs = sum(count for count, _ in here.values())
            failed = sum(count for _, count in here.values())
            if not failed and len(here) == 1:
                continue
            for node, (own_jobs, own_failed) in here.items():
                others = jobs - own_jobs
                if not others:
                    continue
                # Half a failure more, or the first one of a program would be a wonder.
                rate = min(1.0, (failed - own_failed + 0.5) / (others + 1.0))
                likely = 1.0 - (1.0 - rate) ** own_jobs
                found.setdefault(node, []).append((user, own_failed > 0, likely))
        return found


def program_of(user: str, partition: str, name: str) -> Program:
    """`sweep-17` and `sweep-18` are one."""
    return user, partition, _NUMBER.sub("#", name)


def lemons(tallies: Mapping[str, NodeTally], programs: Programs) -> list[Lemon]:
    """The likeliest first; by blame where it is for that."""
    found = {one.node: one for one in _by_programs(len(tallies), programs)}
    found.update({one.node: one for one in _by_blame(tallies)})
    return sorted(found.values(), key=lambda lemon: (lemon.chance, lemon.node))


def _by_blame(tallies: Mapping[str, NodeTally]) -> Iterator[Lemon]:
    faults = sum(one.blamed for one in tallies.values())
    jobs = sum(one.jobs for one in tallies.values())
    hours = sum(one.hours for one in tallies.values())
    for node, one in tallies.items():
        if one.blamed < LEAST_FAULTS or one.jobs == jobs:
            continue
        share = max(one.jobs / jobs, one.hours / hours if hours else 0.0)
        chance = _of_fleet(tail(faults, one.blamed, share), len(tallies))
        if chance < SIGNIFICANCE:
            yield Lemon(node, one.jobs, one.blamed, True, faults * share, chance)


def _by_programs(nodes: int, programs: Programs) -> Iterator[Lemon]:
    for node, told in programs.by_node().items():
        failed = sum(is_failed for _, is_failed, _ in told)
        users = {user for user, is_failed, _ in told if is_failed}
        expected = sum(likely for _, _, likely in told)
        if failed < LEAST_PROGRAMS or len(users) < LEAST_USERS or failed <= expected:
            continue
        # Chances that differ spread less than a binomial of their mean: this errs for the node.
        chance = _of_fleet(tail(len(told), failed, expected / len(told)), nodes)
        if chance < SIGNIFICANCE:
            yield Lemon(node, len(told), failed, False, expected, chance)


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
