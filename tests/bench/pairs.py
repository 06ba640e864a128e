"""Paired measurements: two variants run in turn, their ratio taken pair by pair.

A machine that is slow for a minute is slow for both halves of a pair, so the median of paired
ratios says something where two medians would not. Pure but for `run_in_turn`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """One line of the table: ours against theirs, pair by pair."""

    name: str
    against: str
    ours_s: list[float]
    theirs_s: list[float]

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for ours, theirs in zip(self.ours_s, self.theirs_s, strict=True)]

    @property
    def differences_s(self) -> list[float]:
        return [ours - theirs for ours, theirs in zip(self.ours_s, self.theirs_s, strict=True)]


def median_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high): the narrowest interval of order statistics that holds the true median
    with at least 90 %, whatever the distribution (binomial); fewer than 5 values give the range."""
    ordered = sorted(values)
    n = len(ordered)
    cut = 0
    while 2 * (cut + 1) < n and _coverage(n, cut + 1) >= 0.9:
        cut += 1
    return statistics.median(ordered), ordered[cut], ordered[n - 1 - cut]


def _coverage(n: int, cut: int) -> float:
    """Chance that the median lies between the (cut+1)-th smallest and largest of n values."""
    outside = sum(math.comb(n, k) for k in range(cut + 1))
    return 1 - 2 * outside / 2**n


def run_in_turn(
    variants: Mapping[str, Callable[[], dict[str, float]]],
    *,
    rounds: int,
    progress: Callable[[str], None],
) -> dict[str, dict[str, list[float]]]:
    """Each round runs every variant once, beginning with another one each time. A variant returns
    its figures by name; variant -> figure -> one value a round."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in variants}
    names = list(variants)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            for figure, value in variants[name]().items():
                found[name].setdefault(figure, []).append(value)
        progress(f"round {number + 1} of {rounds}")
    return found
