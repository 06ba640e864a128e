"""What a run's journal says of its saves and restores, and quantiles of what they took. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

QUANTILES = (0.5, 0.95, 0.99)


@dataclass
class Saves:
    """Of all attempts together; None: it never happened, or the record does not say."""

    took_s: list[float] = field(default_factory=list)
    """Of each committed save whose record says it."""
    loads_s: list[float] = field(default_factory=list)
    committed_at: Optional[float] = None
    committed_step: Optional[int] = None
    last_took_s: Optional[float] = None
    last_bytes: Optional[int] = None
    failed: int = 0
    failed_in_a_row: int = 0
    skipped: int = 0
    fallbacks: int = 0
    fell_back_at: Optional[float] = None


def read_saves(events: Iterable[Mapping[str, Any]]) -> Saves:
    """`events`: journals of all attempts, oldest first."""
    found = Saves()
    for event in events:
        kind, at = event["kind"], float(event["at"])
        if kind == "committed":
            _commit(found, event, at)
        elif kind == "save_failed":
            found.failed += 1
            found.failed_in_a_row += 1
        elif kind == "save_skipped":
            found.skipped += 1
        elif kind == "fell_back":
            found.fallbacks += 1
            found.fell_back_at = at
        elif kind == "restored" and event.get("seconds") is not None:
            found.loads_s.append(float(event["seconds"]))
    return found


def _commit(found: Saves, event: Mapping[str, Any], at: float) -> None:
    found.committed_at, found.committed_step = at, int(event["step"])
    found.failed_in_a_row = 0
    took_s, size = event.get("seconds"), event.get("bytes")
    found.last_took_s = None if took_s is None else float(took_s)
    found.last_bytes = None if size is None else int(size)
    if found.last_took_s is not None:
        found.took_s.append(found.last_took_s)


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest of `values` that at least q of them do not exceed (nearest rank): one that
    was really measured, whatever their number."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]
