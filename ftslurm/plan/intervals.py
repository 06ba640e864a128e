"""How long to train between two saves, and what failures then cost. Pure.

The model: failures come at random, `mtbf_s` apart in the mean and regardless of the past. `stall_s`
is how long training stands still for a save; `lag_s` how long after it the save is not durable yet,
so that a failure meanwhile falls back to the save before; `restart_s` from a failure to the first
new step, and a failure in that time begins it anew. Without a lag the expectation is exact (Daly,
A higher order estimate of the optimum checkpoint interval, FGCS 22 (2006)); a lag is put in as time
retrained, right while it is short beside the interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

AGAIN = "again"
"""Of what a failure costs: what is trained again."""

_MOST = 700.0
"""exp() of more is no float any more: such a run does not end."""


@dataclass(frozen=True)
class Costs:
    """All in seconds."""

    stall_s: float
    restart_s: float
    lag_s: float = 0.0


@dataclass(frozen=True)
class Waste:
    """Shares of the whole time, which add up to 1 with `goodput`."""

    stall: float
    lost: float
    """Training that is done again."""
    restart: float

    @property
    def total(self) -> float:
        return self.stall + self.lost + self.restart

    @property
    def goodput(self) -> float:
        return 1.0 - self.total


def after_failure_s(
    restart: Mapping[str, float], interval_s: float, lag_s: float
) -> dict[str, float]:
    """What one failure costs in the mean, in parts: those of the restart, and AGAIN, what is
    trained again: half an interval and what was not durable yet. While an interval is short beside
    the time between failures."""
    return {**restart, AGAIN: interval_s / 2.0 + lag_s}


def young_s(stall_s: float, mtbf_s: float) -> float:
    """Young (CACM 17, 1974): the first order, good while a save is short beside the MTBF."""
    return math.sqrt(2.0 * stall_s * mtbf_s)


def daly_s(stall_s: float, mtbf_s: float) -> float:
    """Daly (2006), equation 37."""
    if stall_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2.0 * mtbf_s)
    return young_s(stall_s, mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - stall_s


def exact_s(stall_s: float, mtbf_s: float) -> float:
    """Where the exact expectation is least: exp((t + stall) / mtbf) * (1 - t / mtbf) = 1.

    Neither restart nor lag moves it: they are paid per failure, not per interval.
    """
    if stall_s <= 0:
        return 0.0
    low, high = 0.0, 1.0  # of t / mtbf; the left side falls from exp(stall / mtbf) to 0
    stall = stall_s / mtbf_s
    while low < (middle := (low + high) / 2.0) < high:
        if middle + stall + math.log1p(-middle) > 0.0:
            low = middle
        else:
            high = middle
    return low * mtbf_s


def best_s(costs: Costs, mtbf_s: float) -> float:
    """What to plan with: a save that is not durable before the next one only makes a queue."""
    return max(exact_s(costs.stall_s, mtbf_s), costs.lag_s)


def expected_s(interval_s: float, costs: Costs, mtbf_s: float) -> float:
    """Mean time that `interval_s` of training takes; inf where it never gets done."""
    again_s = costs.restart_s + costs.lag_s
    powers = [again_s / mtbf_s, (interval_s + costs.stall_s) / mtbf_s]
    if sum(powers) > _MOST:
        return math.inf
    return mtbf_s * math.exp(powers[0]) * math.expm1(powers[1])


def waste(interval_s: float, costs: Costs, mtbf_s: float) -> Waste:
    """By the exact expectation, split into what it is spent on."""
    whole_s = expected_s(interval_s, costs, mtbf_s)
    if math.isinf(whole_s):
        return Waste(0.0, 1.0, 0.0)
    stall = costs.stall_s / whole_s
    # All else takes whole * exp(-restart / mtbf): one failure a `mtbf_s` of it, and each is
    # followed by mtbf * (exp(restart / mtbf) - 1), as failures of the restart begin it anew.
    restart = -math.expm1(-costs.restart_s / mtbf_s)
    return Waste(stall, 1.0 - interval_s / whole_s - stall - restart, restart)


def naive_share(interval_s: float, restart_s: float, mtbf_s: float) -> float:
    """The estimate on the back of an envelope: every failure loses a whole interval (the mean is
    half of one) and takes the longest restart there is; saves are free."""
    return (interval_s + restart_s) / mtbf_s
