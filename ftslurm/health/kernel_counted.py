"""Which of the kernel's messages a look counts; what is left out is told, never acted upon. Pure.

A first look on a node finds a log of which nobody knows what has been dealt with since: an Xid 48
of the morning may have had its reset at noon, and drivers before R565 say nothing of that. So what
was said before ftslurm was there, or longer ago than an hour, counts only where NVML still shows
what it was about. Later looks know by their cursor what is new.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Optional

from ftslurm.health import signals as s
from ftslurm.health.kernel_line import KernelEvent
from ftslurm.health.signals import Signal
from ftslurm.health.verdict import Verdict

FIRST_LOOK_S = 3600.0
"""How far back a look goes that knows of none before it."""

_OF_MEMORY = frozenset({48, 95, 140, 171, 172})
_UNCORRECTED = (s.ECC_DRAM_VOLATILE_UNCORRECTED, s.ECC_SRAM_VOLATILE_UNCORRECTED)
_NAMED = 3
_NO_DEVICE = "no named device"


@dataclass(frozen=True)
class Begin:
    """From when on messages count, in UTC seconds; None: all do. `is_first`: there was no look
    before, so that one without a time may be of any."""

    at: Optional[float]
    is_first: bool = False


@dataclass(frozen=True)
class Counted:
    """`kept` count; `old` were said before they would."""

    kept: tuple[KernelEvent, ...]
    old: tuple[KernelEvent, ...] = ()

    @property
    def notes(self) -> list[str]:
        if not self.old:
            return []
        names = [
            f"{one.kind}{f' {one.number}' if one.number else ''} of {one.bus or _NO_DEVICE}"
            for one in self.old
        ]
        return [f"{len(names)} kernel messages are too old to count: {_few(names)}"]


def complaints_of(hard: Sequence[Verdict]) -> list[str]:
    """Of a first look; `hard`: what would have drained the node, had it not been too old."""
    if not hard:
        return []
    names = [f"{one.code} of {_place(one)}" for one in hard]
    return [
        f"before what this look knows of, the kernel told of {_few(names)}; nobody knows whether "
        "that was dealt with since, so it drains nothing: test the node, or restart it"
    ]


def first_begin(now: float, installed_at: float) -> Begin:
    """Of a first look. An installation ahead of the clock is one by another clock."""
    at = now - FIRST_LOOK_S
    return Begin(max(at, installed_at) if installed_at <= now else at, is_first=True)


def counted(
    events: Sequence[KernelEvent], begin: Begin, *, now: float, hardware: Iterable[Signal]
) -> Counted:
    """`hardware`: what the same look has read."""
    broken = {
        one.gpu.bus
        for one in hardware
        if one.gpu is not None and one.kind in _UNCORRECTED and one.value
    }
    kept: list[KernelEvent] = []
    old: list[KernelEvent] = []
    for one in events:
        is_over = _is_old(one, begin, now) and not _still_shows(one, broken)
        (old if is_over else kept).append(one)
    return Counted(tuple(kept), tuple(old))


def _is_old(event: KernelEvent, begin: Begin, now: float) -> bool:
    if begin.at is None or begin.at > now:  # a time to come is none: the clock has been set back
        return False
    return begin.is_first if event.at is None else event.at < begin.at


def _still_shows(event: KernelEvent, broken: set[str]) -> bool:
    """NVML's volatile counters begin anew with a reset (nvml.h, NVML_VOLATILE_ECC). All else that
    lasts, a lost GPU, a pending action, a dead link, has a rule of its own."""
    return event.kind == s.XID and event.number in _OF_MEMORY and event.bus in broken


def _place(verdict: Verdict) -> str:
    where = verdict.signals[0].where if verdict.signals else ""
    return verdict.gpu.bus if verdict.gpu else where or _NO_DEVICE


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
