"""One answer to a question of the checklist, and what it is drawn from. Values only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Callable, Optional, TypeVar

from ftslurm.doctor.line import FAIL, OK, SKIPPED, WARN, Line
from ftslurm.doctor.run_history import PastRun
from ftslurm.run.mounts import Mount

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Asked:
    runs: Sequence[PastRun]
    """Newest first."""
    mount: Optional[Mount]
    """Under the runs."""
    free_bytes: Optional[float]
    slurm: Optional[Mapping[str, Line]]
    """Line of doctor by its name; None: Slurm was not asked."""
    store: Sequence[Line] = ()
    """Of the bucket; empty: none was named."""
    at: float = 0.0
    """UTC seconds; now."""
    not_read: Mapping[str, str] = field(default_factory=dict)
    """Folder of a run -> why what it has on record is not among `runs`."""


@dataclass(frozen=True)
class Answer:
    question: str
    state: str
    """As of a line; skipped: not known."""
    seen: str
    at: Optional[float] = None
    """UTC seconds of the evidence; None: it has no date, or there is none."""
    todo: str = ""
    """What would show it, or better it."""
    number: int = 0

    def numbered(self, number: int) -> Answer:
        return replace(self, number=number)


def known(question: str, seen: str, at: Optional[float] = None) -> Answer:
    return Answer(question, OK, seen, at)


def unknown(question: str, seen: str, todo: str) -> Answer:
    return Answer(question, SKIPPED, seen, None, todo)


def partly(question: str, seen: str, todo: str, at: Optional[float] = None) -> Answer:
    return Answer(question, WARN, seen, at, todo)


def wrong(question: str, seen: str, todo: str, at: Optional[float] = None) -> Answer:
    return Answer(question, FAIL, seen, at, todo)


def newest(values: Iterable[_Value], at: Callable[[_Value], Optional[float]]) -> Optional[_Value]:
    """Of those that have a time."""
    dated = [(when, value) for value in values if (when := at(value)) is not None]
    return max(dated, key=lambda pair: pair[0])[1] if dated else None
