"""Orders to a running run, as files: save, stop, pause. Needs no right on the job.

An order is an empty file, RUN/control/save and the like, or RUN_ID.save in the folder that
`recovery.control_dir` names. Rank 0 looks for them every few seconds, all ranks act at the same
step boundary, and rank 0 takes the file away when the order is carried out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ftslurm.run.layout import RunLayout

SAVE = "save"
"""Save at the next boundary and go on."""
STOP = "stop"
"""Save, leave, and do not come back until somebody resumes the run."""
PAUSE = "pause"
"""Save, leave, keep the job in the queue, held."""
ORDERS = (STOP, PAUSE, SAVE)
"""Strongest first."""

LOOK_INTERVAL_S = 5.0


@dataclass(frozen=True)
class ControlFiles:
    """Where orders for one run may lie."""

    layout: RunLayout
    run_id: str
    control_dir: Optional[str] = None

    def places(self, order: str) -> Iterator[Path]:
        yield self.layout.control / order
        if self.control_dir:
            yield Path(self.control_dir) / f"{self.run_id}.{order}"

    def read(self) -> Optional[str]:
        """The strongest order there is. A folder that cannot be read gives none: an operator's
        convenience must not end a run."""
        for order in ORDERS:
            for place in self.places(order):
                try:
                    place.stat()
                except OSError:
                    continue
                return order
        return None

    def give(self, order: str) -> Path:
        """Leave an order in the run directory."""
        self.layout.control.mkdir(mode=0o700, exist_ok=True)
        place = self.layout.control / order
        place.touch()
        return place

    def take_away(self, order: str) -> None:
        """The order has been carried out."""
        for place in self.places(order):
            try:
                place.unlink()
            except FileNotFoundError:
                continue
