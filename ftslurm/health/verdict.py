"""A verdict, and what it is given by: one look at the node, the one before, and what is remembered.

Values and look-ups in them; nothing is decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Optional

from ftslurm.health import signals as s
from ftslurm.health.decision_table import SATURATION
from ftslurm.health.history import History, Past
from ftslurm.health.signals import Gpu, Reading, Signal, Value
from ftslurm.health.xid_table import AFTER, DRAIN, ENDS_OF_A_GPU, RESET, WORDS

HARD = (DRAIN, RESET, AFTER)
"""The words that keep jobs off a node."""

_COUNTER = 2.0**64
"""What an unsigned counter of NVML or sysfs holds."""


@dataclass(frozen=True)
class Verdict:
    """`code` for the node's reason, at most 12 characters; `rule` the row it comes from."""

    word: str
    code: str
    gpu: Optional[Gpu]
    sentence: str
    rule: str
    source: str
    signals: tuple[Signal, ...] = ()
    hands_to_run: bool = False
    """The program's own fault: the run is told, so that it stops trying the same again."""
    sticky: bool = False
    """Never resumed but by a person."""
    auto_resume: bool = False
    """May be resumed once its signal is gone and `needs` has happened."""
    needs: str = ""
    """reset, reboot or repair; empty where the end of the signal is enough."""
    trend: bool = False

    @property
    def key(self) -> str:
        """The same from look to look for the same thing at the same place."""
        if not self.signals:
            return self.rule
        _, bus, link, where = self.signals[0].place
        return f"{self.rule} {bus} {'' if link is None else link} {where}"


@dataclass(frozen=True)
class Thresholds:
    """What a site may set."""

    off: frozenset[str] = frozenset()
    """Rules that are not looked at: a row's `rule`, or `xid-79`."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Another bound for a row, by its rule."""
    unknown_probes: int = 3
    """Looks in a row in which NVML could not be read, on a node with GPUs, that drain it."""
    trends_drain: bool = False
    """Two kinds of trend on one GPU drain it after the job."""
    sympathetic_s: float = 10.0
    """An NVLink error this near to the loss of a peer GPU is its echo."""
    cooling_rise_c: float = 10.0


@dataclass(frozen=True)
class Risen:
    """By how much a counter has risen; None: it cannot be told, because of `why`."""

    by: Optional[float]
    why: str = ""


@dataclass(frozen=True)
class Case:
    reading: Reading
    baseline: Optional[Reading]
    """Of the same boot: counters begin anew with the driver."""
    history: History
    thresholds: Thresholds

    def state(self, kind: str, gpu: Optional[Gpu]) -> Optional[Value]:
        """What the reading says of this GPU, or of the node where `gpu` is None."""
        return self._values.get((kind, gpu.place if gpu else ""))

    def before(self, signal: Signal) -> Optional[Value]:
        if signal.baseline is not None:
            return signal.baseline
        return self._baselines.get(signal.place)

    def since(self) -> Optional[float]:
        return self.baseline.at if self.baseline else None

    def minutes(self) -> Optional[float]:
        """Since the baseline, at least one; None too where the clock was set back."""
        if self.baseline is None or self.reading.at < self.baseline.at:
            return None
        return max(1.0, (self.reading.at - self.baseline.at) / 60.0)

    def risen(self, signal: Signal) -> Risen:
        now, then = as_number(signal.value), as_number(self.before(signal))
        if now is None or then is None:
            return Risen(None, "no baseline of this boot")
        cap = SATURATION.get(signal.where.rpartition("/")[2])
        if cap is not None and now == then == cap:
            return Risen(None, f"the counter stays at {cap}")
        return Risen(now if now < then else now - then)

    def has_gpus(self) -> bool:
        """By PCI; where that was not read, by what else names GPUs."""
        for kind in (s.GPU_COUNT_PCI, s.GPU_COUNT_GRES):
            count = as_number(self.state(kind, None))
            if count is not None:
                return count > 0
        return bool(self.reading.gpus)

    def past(self, what: str, *, window_s: float) -> list[Past]:
        """What came before, not longer ago than that; asked for each of a thousand Xids."""
        if (what, window_s) not in self._past:
            found = self.history.within(what, now=self.reading.at, window_s=window_s)
            self._past[what, window_s] = found
        return self._past[what, window_s]

    @cached_property
    def xids(self) -> tuple[Signal, ...]:
        """In the order of the log; a thousand of them may be there."""
        xids = [one for one in self.reading.of(s.XID) if xid_number(one)]
        return tuple(one for one in xids if f"xid-{one.value}" not in self.thresholds.off)

    @cached_property
    def ends(self) -> tuple[Signal, ...]:
        """Those that tell of the end of a GPU, which its peers and switches complain of."""
        return tuple(one for one in self.xids if one.value in ENDS_OF_A_GPU)

    @cached_property
    def xids_by_bus(self) -> Mapping[int, Counter[str]]:
        """How often each number was said of each bus."""
        counts: dict[int, Counter[str]] = {}
        for one in self.xids:
            counts.setdefault(xid_number(one), Counter())[bus_of(one)] += 1
        return counts

    @cached_property
    def _past(self) -> dict[tuple[str, float], list[Past]]:
        return {}

    @cached_property
    def _values(self) -> Mapping[tuple[str, str], Value]:
        signals = reversed(self.reading.signals)
        return {(one.kind, one.gpu.place if one.gpu else ""): one.value for one in signals}

    @cached_property
    def _baselines(self) -> Mapping[tuple[str, str, Optional[int], str], Value]:
        signals: Sequence[Signal] = self.baseline.signals if self.baseline else ()
        return {signal.place: signal.value for signal in signals}

    def streak_key(self, key: str) -> str:
        """A streak ends with the boot."""
        return f"{self.reading.boot_id}|{key}"


def bus_of(signal: Signal) -> str:
    return signal.gpu.bus if signal.gpu else ""


def xid_number(signal: Signal) -> int:
    """Of an Xid or SXid; 0 for what is no number of one."""
    value = signal.value
    return value if type(value) is int and 0 < value < 1_000_000 else 0


def is_near(case: Case, one: Signal, other: Signal) -> bool:
    """Whether two lines of the log are of the same seconds."""
    if one.at is None or other.at is None:
        return False
    return abs(one.at - other.at) <= case.thresholds.sympathetic_s


def as_number(value: Optional[Value]) -> Optional[float]:
    """None for a text, which is never more or less than anything, and for what no counter holds."""
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, (int, float)) or not -_COUNTER < value < _COUNTER:
        return None
    return float(value)


def rank(word: str) -> int:
    """0 is the worst."""
    return WORDS.index(word)
