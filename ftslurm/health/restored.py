"""What a node had before it was drained, and whether a look has read all of that again. Pure.

After a reboot there is nothing to compare with: a port that stays down, a NIC or a GPU that is gone
raise no verdict then. So a drain keeps what was there when all was well, and a look is a healthy
one only where it has read each of these as good as that. What is absent from a reading never is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from ftslurm.health import signals as s
from ftslurm.health.decision_table import BELOW_BASELINE, DECISION_TABLE, LEFT
from ftslurm.health.signals import Reading, Signal, Value, is_number
from ftslurm.health.verdict import HARD, Verdict, as_number

BY_BASELINE = frozenset(
    {row.rule for row in DECISION_TABLE if row.test in (BELOW_BASELINE, LEFT)} | {"nic-missing"}
)
"""Rules that compare with how this very node was."""

_COUNTS = (s.GPU_COUNT_PCI, s.GPU_COUNT_NVML)
"""Each is compared with itself: NVML counts no GPU that is handed to a guest."""


@dataclass(frozen=True)
class Had:
    """`value` None: nobody knows how it was."""

    kind: str
    bus: str
    link: Optional[int]
    where: str
    value: Optional[Value]

    @property
    def place(self) -> tuple[str, str, Optional[int], str]:
        return (self.kind, self.bus, self.link, self.where)


def had_before(
    verdicts: Iterable[Verdict], reading: Optional[Reading], baseline: Optional[Reading]
) -> tuple[Had, ...]:
    """Of what the verdicts found worse than before, and how many GPUs there were."""
    looks = [look for look in (baseline, reading) if look is not None]
    before = {one.place: one.value for one in baseline.signals} if baseline else {}
    had = [
        Had(*one.signals[0].place, before.get(one.signals[0].place, one.signals[0].baseline))
        for one in verdicts
        if one.word in HARD and one.rule in BY_BASELINE and one.signals
    ]
    for kind in _COUNTS:
        counts = [as_number(one.value) for look in looks for one in look.of(kind)]
        known = [count for count in counts if count is not None]
        if known:
            had.append(Had(kind, "", None, "", max(known)))
    return tuple(had)


def with_had(known: Sequence[Had], new: Iterable[Had]) -> tuple[Had, ...]:
    """What was known first is from when all was well."""
    merged = {one.place: one for one in known}
    for one in new:
        before = merged.get(one.place)
        if before is None or before.value is None:
            merged[one.place] = one
    return tuple(merged.values())


def lacking(had: Iterable[Had], reading: Optional[Reading]) -> str:
    """What this look has not read as good as it was; empty where it has read all of it so."""
    here: dict[object, Signal] = {one.place: one for one in reading.signals} if reading else {}
    for one in had:
        name = " ".join(part for part in (one.kind, one.bus, one.where) if part)
        was = f"{one.value:g}" if isinstance(one.value, float) else one.value
        if one.value is None:
            return f"nobody knows how {name} was before; a person has to look"
        found = here.get(one.place)
        if found is None:
            return f"{name} was {was} and was not read"
        if not _is_as_good(found.value, one.value):
            return f"{name} was {was} and is {found.value}"
    return ""


def _is_as_good(now: Value, then: Value) -> bool:
    more, least = as_number(now), as_number(then)
    return now == then if more is None or least is None else more >= least


def parse_had(record: Any) -> tuple[Had, ...]:
    """ValueError or TypeError for what is no record of one."""
    had = tuple(Had(**one) for one in record)
    for one in had:
        is_text = all(isinstance(text, str) for text in (one.kind, one.bus, one.where))
        is_value = one.value is None or isinstance(one.value, (str, bool)) or is_number(one.value)
        if not is_text or not is_value or not isinstance(one.link, (int, type(None))):
            raise ValueError(f"nothing that a node had: {one!r:.80}")
    return had
