"""Which rank slows the others down, or that all are slow together. Pure; the clock is a parameter.

Ranks that train in step all take as long as the slowest, so only what each does itself (own
compute, the waiting left out) tells who that is. Told once, when it begins; again only when it had
been over for a minute. When all ranks are slow together, nobody is blamed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Optional

from ftslurm.run.heartbeat import TRAINING, RankView
from ftslurm.run.spec import RecoverySpec

STRAGGLER, SLOW_ALL, DRIFT = "straggler", "slow_all", "drift"

LEAST_EXCESS_S = 0.01
"""Own compute above the median by less than this a step is nobody's concern."""
PLAIN_SHARE = 1.25
"""Own compute by the clock from which more work is one that others wait for."""
WORK_SHARE = 0.5
"""Of own compute on a processor, from which it is work and no lack of something."""
LASTS_S = 15.0
SLOW_SHARE = 1.5
"""All are slow when a step takes this many times the usual: throughput to two thirds or less."""
SLOW_SAMPLES = 3
"""Windows in a row that all have to be slow."""
SLOW_HOLD_S = 60.0
"""How long at least: other work on the nodes comes and goes."""
APART_SHARE = 1.3
"""One rank's own compute against the median from which it, not all of them, is slow."""
BLIND_SHARE = 0.99
"""Own compute of all ranks in a step from which their waiting is not seen: on CUDA it is the
devices that wait, and only under DDP they tell (train/device_clock.py)."""
USUAL_SAMPLES = 200
DRIFT_SAMPLES = 16
"""Windows over which a slow growth has to show."""
DRIFT_SHARE = 1.25
"""Growth of own compute against the others' over DRIFT_SAMPLES windows."""
DRIFT_ORDER = 0.8
"""Rank correlation with time (Kendall's tau) from which a growth is one and no noise."""
FEW_RANKS = 16
"""Up to here a rank is held against the median of the others, beyond against that of all, which is
the same and found once: of two ranks, one is the other's measure."""
AGAIN_S = 60.0
"""How long a finding has to be over before it is a new one."""


@dataclass(frozen=True)
class StragglerLimits:
    factor: float = 3.0
    """0: never."""
    window_steps: int = 10
    lag_steps: int = 3
    """0: never."""

    @classmethod
    def of(cls, spec: RecoverySpec) -> StragglerLimits:
        return cls(spec.straggler_factor, spec.straggler_window_steps, spec.straggler_lag_steps)


@dataclass(frozen=True)
class SlowFinding:
    kind: str
    """straggler | slow_all | drift (a warning)"""
    ranks: tuple[int, ...]
    """Empty for slow_all: nobody is blamed."""
    nodes: tuple[str, ...]
    why: str


class Watcher:
    """Of one attempt; looks at its ranks as often as it is shown them."""

    def __init__(self, limits: StragglerLimits) -> None:
        self._limits = limits
        self._told: dict[tuple[str, Optional[int]], float] = {}
        """When each was last there."""
        self._courses: dict[int, deque[float]] = {}
        """By rank: own compute against the others', a value a window."""
        self._long_since: dict[int, tuple[int, float]] = {}
        """By rank: step and time from which its own compute has been long by the clock."""
        self._sampled_step = 0
        self._walls: deque[float] = deque(maxlen=USUAL_SAMPLES)
        """Seconds a step, a value a window."""
        self._owns: deque[float] = deque(maxlen=USUAL_SAMPLES)
        self._slow_since: Optional[float] = None
        self._foremost_step = 0
        """At the look before."""

    def observe(self, views: Sequence[RankView], *, at: float) -> list[SlowFinding]:
        """What has begun since the look before. `views`: of one moment, see agent/report.py; `at`:
        seconds of the looker's steady clock."""
        if self._limits.factor <= 0:
            return []
        training = [view for view in views if view.phase == TRAINING and view.window_wall_s > 0]
        if len(training) < 2:
            return []
        # Of a device that does not tell it, it is held against nobody's.
        measured = [view for view in training if view.window_own_s > 0]
        slow = {**self._lagging(training), **self._working(measured, at)}
        findings = self._news(STRAGGLER, training, slow, at)
        if self._takes_sample(training, measured):
            # Of one that is named already nobody is warned, nor are all slow because of it.
            drifting = self._drifting(measured)
            why = None if slow else self._all_slow(measured, at)
            culprit = _apart(measured)
            if why is not None and culprit is not None:
                drifting.setdefault(culprit.rank, f"is slow, though no straggler yet: {why}")
            elif why is not None and self._is_new((SLOW_ALL, None), at):
                findings.append(SlowFinding(SLOW_ALL, (), (), why))
            drifting = {rank: text for rank, text in drifting.items() if rank not in slow}
            findings += self._news(DRIFT, training, drifting, at)
        return findings

    def _working(self, views: Sequence[RankView], at: float) -> dict[int, str]:
        """Own compute far above the median, as the rank itself measures over its last steps.

        By the processor where it can also be seen by the clock: on one that others use as well, all
        ranks take longer, and the share by the clock grows smaller. By the clock alone only when
        that lasts: a rank may lack its processor, or its data, for some steps.
        """
        if not views:
            return {}
        usual_s = _middle([view.window_own_s for view in views])
        usual_cpu_s = _middle([view.window_cpu_s for view in views])
        factor = self._limits.factor
        found = {}
        for view in views:
            own_s, cpu_s = view.window_own_s, view.window_cpu_s
            is_plain = own_s > PLAIN_SHARE * usual_s and own_s - usual_s >= LEAST_EXCESS_S
            is_work = is_plain and (
                cpu_s > factor * usual_cpu_s and cpu_s - usual_cpu_s >= LEAST_EXCESS_S
            )
            is_long = is_plain and own_s > factor * usual_s
            lasts = self._lasts(view, at, is_there=is_long)
            if is_work or (is_long and (cpu_s >= WORK_SHARE * own_s or lasts)):
                by_clock = f"computes {own_s:.3g} s a step of its own, {_times(own_s, usual_s)}"
                if is_long and view.devices_wait:
                    found[view.rank] = f"{by_clock}, as its device tells"
                elif is_long:
                    found[view.rank] = by_clock + _on_processor(cpu_s, own_s, usual_cpu_s)
                else:
                    found[view.rank] = (
                        f"works {cpu_s:.3g} s a step on a processor, {_times(cpu_s, usual_cpu_s)}; "
                        f"by the clock it {by_clock}"
                    )
        return found

    def _lasts(self, view: RankView, at: float, *, is_there: bool) -> bool:
        """Whether it has been there for two windows and LASTS_S."""
        if not is_there:
            self._long_since.pop(view.rank, None)
            return False
        since_step, since = self._long_since.setdefault(view.rank, (view.step, at))
        return view.step - since_step >= 2 * self._limits.window_steps and at - since >= LASTS_S

    def _lagging(self, views: Sequence[RankView]) -> dict[int, str]:
        """Steps behind the foremost, what the rank may have done since it was seen allowed for."""
        if self._limits.lag_steps <= 0:
            return {}
        # Of the look before: views are read one after the other, and a looker that loses its
        # processor in between sees ranks that train in step some steps apart.
        foremost = self._foremost_step
        self._foremost_step = max(view.step for view in views)
        found = {}
        for view in views:
            if view.usual_step_s <= 0:
                continue
            lag = foremost - view.step - int(view.step_age_s / view.usual_step_s)
            if lag >= self._limits.lag_steps:
                found[view.rank] = f"is {foremost - view.step} steps behind the foremost"
        return found

    def _takes_sample(self, views: Sequence[RankView], measured: Sequence[RankView]) -> bool:
        """Once for each window of steps: then no step is in two samples."""
        step = min(view.step for view in views)
        if step < self._sampled_step + self._limits.window_steps:
            return False
        if self._sampled_step == 0:
            # The first window began with the attempt: caches fill, memory is found.
            self._sampled_step = step
            return False
        self._sampled_step = step
        self._walls.append(_middle([view.window_wall_s for view in views]))
        owns = [view.window_own_s for view in measured]
        self._owns.append(_middle(owns) if owns else self._walls[-1])
        usual_s = median(owns) if owns else 0.0
        for number, view in enumerate(measured):
            others = usual_s
            if 1 < len(measured) <= FEW_RANKS:
                others = median(owns[:number] + owns[number + 1 :])
            course = self._courses.setdefault(view.rank, deque(maxlen=DRIFT_SAMPLES))
            course.append(view.window_own_s / others if others > 0 else 1.0)
        return True

    def _drifting(self, views: Sequence[RankView]) -> dict[int, str]:
        found = {}
        for view in views:
            ratios = list(self._courses[view.rank])
            if len(ratios) < DRIFT_SAMPLES:
                continue
            early, late = median(ratios[:3]), median(ratios[-3:])
            is_growth = (
                late >= DRIFT_SHARE * early
                and late >= DRIFT_SHARE
                and min(ratios[-3:]) > max(ratios[: DRIFT_SAMPLES // 2])
            )
            is_excess = view.window_own_s * (1 - 1 / max(late, 1.0)) >= LEAST_EXCESS_S
            if is_growth and is_excess and _tau(ratios) >= DRIFT_ORDER:
                found[view.rank] = (
                    f"has come from {early:.2f} to {late:.2f} times the other ranks' own compute "
                    f"over {DRIFT_SAMPLES * self._limits.window_steps} steps"
                )
        return found

    def _all_slow(self, measured: Sequence[RankView], at: float) -> Optional[str]:
        """Why all are said to be slow, or None."""
        walls, owns = list(self._walls), list(self._owns)
        if len(walls) < 2 * SLOW_SAMPLES:
            return None
        usual_s = median(walls[:-SLOW_SAMPLES])
        if walls[-1] < SLOW_SHARE * usual_s:
            self._slow_since = None
            return None
        self._slow_since = at if self._slow_since is None else self._slow_since
        recent = walls[-SLOW_SAMPLES:]
        if min(recent) < SLOW_SHARE * usual_s or at - self._slow_since < SLOW_HOLD_S:
            return None
        own_share = median(owns[-SLOW_SAMPLES:]) / max(median(owns[:-SLOW_SAMPLES]), 1e-9)
        if all(view.window_own_s >= BLIND_SHARE * view.window_wall_s for view in measured):
            cause = "no rank is seen to wait for another, so whether one is to blame is not known"
        elif own_share >= SLOW_SHARE:
            cause = (
                "all compute slower (clocks, cooling, other work on the nodes), and no rank is to "
                "blame"
            )
        else:
            cause = (
                "their own compute is as before, they wait (network, file system), and no rank is "
                "to blame"
            )
        return (
            f"a step takes {median(recent):.3g} s where {usual_s:.3g} s are usual, throughput is "
            f"at {100 * usual_s / median(recent):.0f} %; {cause}"
        )

    def _news(
        self, kind: str, views: Sequence[RankView], found: dict[int, str], at: float
    ) -> list[SlowFinding]:
        """One finding for all ranks of which it had not been said."""
        there = [view for view in views if view.rank in found]
        new = [view for view in there if self._is_new((kind, view.rank), at)]
        if not new:
            return []
        why = "; ".join(f"{_who(view)} {found[view.rank]}" for view in new)
        nodes = sorted({view.node for view in new})
        return [SlowFinding(kind, tuple(view.rank for view in new), tuple(nodes), why)]

    def _is_new(self, what: tuple[str, Optional[int]], at: float) -> bool:
        """It is there; whether it was not of late."""
        before = self._told.get(what)
        self._told[what] = at
        return before is None or at - before > AGAIN_S


def _who(view: RankView) -> str:
    return f"rank {view.rank} on {view.node}{f' ({view.gpu})' if view.gpu else ''}"


def _apart(views: Sequence[RankView]) -> Optional[RankView]:
    """The one rank that computes clearly longer than the others."""
    if not views:
        return None
    worst = max(views, key=lambda view: view.window_own_s)
    usual_s = _middle([view.window_own_s for view in views])
    is_apart = worst.window_own_s >= max(APART_SHARE * usual_s, usual_s + LEAST_EXCESS_S)
    return worst if is_apart else None


def _on_processor(cpu_s: float, own_s: float, usual_cpu_s: float) -> str:
    """Whether it is more work, or the lack of something to work with."""
    share = cpu_s / own_s
    if share < WORK_SHARE:
        return f", {100 * share:.0f} % of it on a processor: starved of one, or waiting for data"
    if usual_cpu_s <= 0:
        return ""
    return f", on a processor {cpu_s / usual_cpu_s:.1f} times the median"


def _times(value_s: float, usual_s: float) -> str:
    times = f"{value_s / usual_s:.1f} times " if usual_s > 0 else "against "
    return f"{times}the ranks' median of {usual_s:.3g} s"


def _middle(values: Sequence[float]) -> float:
    """The lower median: of two ranks the faster is the measure."""
    return sorted(values)[(len(values) - 1) // 2]


def _tau(values: Sequence[float]) -> float:
    """Kendall's tau of the values with their order."""
    size = len(values)
    signs = [
        (values[later] > values[earlier]) - (values[later] < values[earlier])
        for earlier in range(size)
        for later in range(earlier + 1, size)
    ]
    return sum(signs) / len(signs)
