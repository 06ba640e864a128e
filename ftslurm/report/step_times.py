"""What the steps of an attempt took, by its trace: trained once, trained again, stopped for saves.

Reads a trace row by row; of a million steps it keeps four bytes each. Without a trace nothing is
known, and no time is made up.
"""

from __future__ import annotations

import json
import statistics
from array import array
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StepTimes:
    """Seconds. `first`: number of the step that `seconds[0]` belongs to, 1 for the first of a run;
    0 for an attempt that has trained none."""

    first: int
    seconds: array[float]

    @property
    def total_s(self) -> float:
        return sum(self.seconds)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds) if self.seconds else 0.0

    def last_s(self, steps: int) -> float:
        """Of the newest `steps` steps."""
        return sum(self.seconds[len(self.seconds) - steps :]) if steps else 0.0

    def stall_s(self, saved_steps: Collection[int], *, until: int) -> float:
        """By how much the steps right behind a save were longer than the median; of steps up to
        `until`, as those behind it are lost whole."""
        usual_s = self.median_s
        found = 0.0
        for step in saved_steps:
            place = step + 1 - self.first
            if step < until and 0 <= place < len(self.seconds):
                found += max(0.0, self.seconds[place] - usual_s)
        return found


def read_step_times(path: Path) -> StepTimes:
    """Torn rows count as absent; a gap in the numbers is closed with nothing."""
    first, seconds = 0, array("f")
    try:
        with path.open(errors="replace") as stream:
            for line in stream:
                try:
                    row = json.loads(line)
                    step, took_s = int(row["step"]), float(row["seconds"])
                except (ValueError, KeyError, TypeError):
                    continue
                first = first or step
                seconds.extend([0.0] * min(step - first - len(seconds), 1_000_000))
                seconds.append(took_s)
    except FileNotFoundError:
        pass
    return StepTimes(first, seconds)
