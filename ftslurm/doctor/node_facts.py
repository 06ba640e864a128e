"""What the nodes of a trial have told. Values only: nothing is judged here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass(frozen=True)
class Clock:
    off_s: float
    """Ahead of the clock of whoever asked."""
    within_s: float
    """So much it may be more or less."""


@dataclass
class NodeFacts:
    """An answer that never came, or was a refusal, leaves its field as it is here."""

    task: int
    hello: Mapping[str, Any] = field(default_factory=dict)
    missed: Mapping[str, Any] = field(default_factory=dict)
    claims: Mapping[str, Any] = field(default_factory=dict)
    seen: Mapping[str, Any] = field(default_factory=dict)
    clock: Optional[Clock] = None
    rates: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    rank_start: Optional[Mapping[str, Any]] = None

    @property
    def node(self) -> str:
        return str(self.hello.get("node", f"task {self.task}"))

    @property
    def sees_folder(self) -> bool:
        return bool(self.hello.get("sees_folder"))

    @property
    def waits(self) -> bool:
        """Something may still come into sight: not where the folder itself is another one."""
        return self.sees_folder and bool(self.seen.get("waits_for"))

    @property
    def looked_s(self) -> float:
        return float(self.seen.get("looked_s", 0.0))


@dataclass(frozen=True)
class Trialled:
    nodes: Sequence[NodeFacts]
    module: str
    """That a rank imports."""
    made: bool
    """The first node could make files in the folder."""


MOST_NAMES = 4


def names(of: Sequence[str], between: str = ", ") -> str:
    """For a line that a person reads, however many there are."""
    rest = f" and {len(of) - MOST_NAMES} more" if len(of) > MOST_NAMES else ""
    return between.join(of[:MOST_NAMES]) + rest
