"""A run and its failures, played out event by event: what the formulas are held against.

Seeded, so that the same call gives the same answer. Shares no formula with intervals, and can do
what they cannot: failures that come in bursts (Weibull with a shape below 1), and saves that are
slower than the interval.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from ftslurm.plan.intervals import Costs, Waste

MAX_FAILURES = 2_000_000
"""A run that has not got anywhere by then does not end."""


@dataclass(frozen=True)
class Played:
    """All in seconds; `trained_s` is what is left of the training in the end."""

    wall_s: float
    trained_s: float
    stall_s: float
    lost_s: float
    restart_s: float
    failures: int
    is_done: bool = True
    """False: given up after MAX_FAILURES."""

    @property
    def waste(self) -> Waste:
        return Waste(
            self.stall_s / self.wall_s, self.lost_s / self.wall_s, self.restart_s / self.wall_s
        )


def play(
    interval_s: float,
    costs: Costs,
    mtbf_s: float,
    *,
    work_s: float,
    seed: int = 0,
    shape: float = 1.0,
) -> Played:
    """Train until `work_s` of it is durable. `shape`: of the Weibull distribution of the times
    between failures, whose mean stays `mtbf_s`; 1 is the exponential one, below it they cluster."""
    draw = _gaps(random.Random(seed), mtbf_s, shape)
    cycle_s = interval_s + costs.stall_s
    wall_s = stall_s = lost_s = restarted_s = durable_s = 0.0
    failures = 0
    fails_in_s = draw()
    while failures < MAX_FAILURES:
        needed = math.ceil((work_s - durable_s) / interval_s)
        ends_in_s = needed * cycle_s + costs.lag_s
        if fails_in_s >= ends_in_s:
            # The last lag is waited for: the work counts once it is durable.
            stall_s += needed * costs.stall_s
            return Played(
                wall_s + ends_in_s, durable_s + needed * interval_s,
                stall_s + costs.lag_s, lost_s, restarted_s, failures,
            )  # fmt: skip
        # A save counts `lag_s` after it was made, however many others are on their way.
        saved = max(0, int((fails_in_s - costs.lag_s) // cycle_s))
        wall_s += fails_in_s
        durable_s += saved * interval_s
        stall_s += saved * costs.stall_s
        lost_s += fails_in_s - saved * cycle_s
        failures += 1
        fails_in_s = draw()
        while fails_in_s < costs.restart_s and failures < MAX_FAILURES:
            wall_s += fails_in_s
            restarted_s += fails_in_s
            failures += 1
            fails_in_s = draw()
        wall_s += costs.restart_s
        restarted_s += costs.restart_s
        fails_in_s -= costs.restart_s
    return Played(wall_s, durable_s, stall_s, lost_s, restarted_s, failures, is_done=False)


def _gaps(source: random.Random, mtbf_s: float, shape: float) -> Callable[[], float]:
    scale_s = mtbf_s / math.gamma(1.0 + 1.0 / shape)
    return lambda: source.weibullvariate(scale_s, shape)
