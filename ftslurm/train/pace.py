"""How long to train between two saves, from what a save costs and how often such jobs fail. Pure.

Failures are those after which steps were trained again. Their rate per GPU is not known before they
come: the seeds' 50,000 h are one order of magnitude, and a cluster may be far off it. So the rate
has a lognormal prior about theirs, a factor of ten wide on either side, and k failures in T
GPU-hours are Poisson (NUREG/CR-6823, Handbook of Parameter Estimation for Probabilistic Risk
Assessment, chapter 6: Bayesian estimates of an event rate, with conjugate and lognormal priors).
With x = ln(rate * 50,000 h) and s = ln 10 the posterior is

    p(x | k, T)  ~  exp(-x^2 / 2 s^2  +  k x  -  e^x T / 50,000 h)

and the MTBF of a GPU is 50,000 h * exp(-E[x]). A gamma prior would have this in closed form, but
one of weight a needs a * 50,000 GPU-hours to give way: a small job that fails every hour would
never see it. The mean is that of the logarithm: an interval too long by a factor wastes as much
as one too short by it, so errors count by their factor.

The job's MTBF is that of a GPU divided by their number, and the interval is the one `ftslurm plan`
names for the same numbers (plan/intervals.py), within limits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Optional

from ftslurm.plan.failures import GPU_MTBF_H, mtbf_s
from ftslurm.plan.intervals import Costs, best_s
from ftslurm.run.observed import Seen

SPREAD = math.log(10.0)
"""One standard deviation of the prior, in ln(rate)."""
_REACH, _POINTS = 8.0, 2000
"""The integral, in standard deviations to either side, and its grid: as fine as 3,000 failures."""

LEAST_S = 10.0
"""Shorter is no saving: files, and what follows a commit, for seconds of training."""
MOST_S, MOST_STALLS = 3600.0, 100.0
"""An hour, for what the estimate does not foresee (a node's end without grace); unless a save is so
dear that this would cost more than a hundredth of the time."""
SPREAD_OUT = 0.01
"""A save costs at least this share of the time to its commit: writing slows the steps beside it,
and a stall that is lost in the noise of the steps would else have saves follow one another."""
ENOUGH = 1.25
"""Factor by which the best interval has to differ for a change: off by less, the waste is at most
2.5 % above its least, as it goes by (r + 1/r) / 2."""
_OF_SIGMA = 1.4826
"""Standard deviation of a normal distribution, in median absolute deviations."""
_CHANCE = 4.0
"""Standard errors of a mean; one of a median is 1.25 of them."""


@dataclass(frozen=True)
class Choice:
    interval_s: float
    gpu_mtbf_h: float
    mtbf_s: float
    """Of the job."""
    limit: Optional[str]
    """lag | least | most: what the interval is, where that is not the optimum."""


def gpu_mtbf_h(seen: Seen) -> float:
    """Posterior, as above; the seeds' where nothing was seen."""
    exposure = seen.gpu_hours / GPU_MTBF_H
    step = 2.0 * _REACH * SPREAD / _POINTS
    places = [step * (index - _POINTS / 2) for index in range(_POINTS + 1)]
    logs = [_log_weight(x, seen.failures, exposure) for x in places]
    most = max(logs)
    weights = [math.exp(value - most) for value in logs]
    mean = sum(x * weight for x, weight in zip(places, weights)) / sum(weights)
    return GPU_MTBF_H * math.exp(-mean)


def _log_weight(x: float, failures: int, exposure: float) -> float:
    return -(x**2) / (2.0 * SPREAD**2) + failures * x - exposure * math.exp(x)


def choose(costs: Costs, seen: Seen, *, gpus: int) -> Choice:
    """The best interval for a job on `gpus` GPUs."""
    of_gpu_h = gpu_mtbf_h(seen)
    of_job_s = mtbf_s(gpus, of_gpu_h)
    best = best_s(replace(costs, stall_s=max(costs.stall_s, SPREAD_OUT * costs.lag_s)), of_job_s)
    most = max(MOST_S, MOST_STALLS * costs.stall_s, costs.lag_s)
    limit = "lag" if best <= costs.lag_s else None
    if best < LEAST_S:
        best, limit = LEAST_S, "least"
    elif best > most:
        best, limit = most, "most"
    return Choice(best, of_gpu_h, of_job_s, limit)


def is_worth_a_change(now_s: float, best: float) -> bool:
    return not now_s / ENOUGH <= best <= now_s * ENOUGH


def middle(values: Sequence[float]) -> float:
    """The lower median: one odd save (a step that evaluated, a disk that stood still) moves it not
    at all."""
    return sorted(values)[(len(values) - 1) // 2]


def settled(stalls: Sequence[float], steps: Sequence[float], *, newest: int) -> int:
    """How many of the last of `stalls` belong together: all, unless the middle of the `newest` is
    off that of all by more than steps without a save make it vary."""
    usual = middle(steps)
    spread = _OF_SIGMA * middle([abs(one - usual) for one in steps])
    off = abs(middle(stalls[-newest:]) - middle(stalls))
    return newest if off > _CHANCE * spread / math.sqrt(newest) else len(stalls)
