"""The breaker's latch on this node: whether it has tripped, why, and until when.

A node whose drain the breaker has taken back only reports for a day, but for Xids of the hardware:
these still drain, up to the breaker's quota. A fault that was false for all nodes trips it again
when the day is over; one that was mended leaves no node unguarded for ever because nobody came by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from ftslurm.errors import FormatError
from ftslurm.health.signals import is_number
from ftslurm.health.state_dir import StateDir

_NAME = "breaker.json"
HOLDS_S = 86400.0


@dataclass(frozen=True)
class Latch:
    because: str
    at: float

    def sentence(self, now: float) -> str:
        left_h = max(1, round((self.at + HOLDS_S - now) / 3600.0))
        return (
            f"the breaker has tripped on this node ({self.because}): for {left_h} h more it only "
            "reports all but Xids of the hardware; once that is mended, run `ftslurm health "
            "breaker --reset`"
        )


def read_latch(state: StateDir, now: float) -> Optional[Latch]:
    """None where it has not tripped, or long ago. A record that cannot be read has tripped when it
    was written: a person resets it either way."""
    try:
        record = state.read_json(_NAME)
    except (FormatError, OSError) as error:
        latch = Latch(f"its record cannot be read: {error}", state.changed_at(_NAME) or now)
    else:
        if record is None:
            return None
        told = record.get("at", now)
        at = float(told) if is_number(told) else state.changed_at(_NAME) or now
        latch = Latch(str(record.get("because") or "its record is empty"), at)
    # Either way: a clock that is set back must not hold it for longer.
    return latch if abs(now - latch.at) < HOLDS_S else None


def trip(state: StateDir, latch: Latch) -> None:
    state.write_json(_NAME, {"schema_version": 1, "because": latch.because, "at": latch.at})


def reset(state: StateDir, now: float) -> str:
    """By hand: this node may drain itself again."""
    latch = read_latch(state, now)
    state.remove(_NAME)
    if latch is None:
        return "the breaker has not tripped on this node"
    return f"the breaker is reset on this node; it had tripped because {latch.because}"
