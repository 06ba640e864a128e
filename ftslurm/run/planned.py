"""How long a run means to train between two saves. Pure; the one rule for all who ask."""

from __future__ import annotations

import dataclasses
from typing import Optional

from ftslurm.run.attempts import Progress
from ftslurm.run.spec import AUTO, CheckpointSpec


def in_force(checkpoint: CheckpointSpec, progress: Optional[Progress]) -> CheckpointSpec:
    """`checkpoint` with the intervals by which an attempt saves, which it may have chosen itself;
    `progress`: its own."""
    if checkpoint.interval != AUTO:
        return checkpoint
    chosen_s = progress.interval_s if progress else None
    return dataclasses.replace(
        checkpoint, interval_s=chosen_s or checkpoint.interval_s, interval_steps=0
    )


def planned_interval_s(
    checkpoint: CheckpointSpec, progress: Optional[Progress] = None, step_s: Optional[float] = None
) -> Optional[float]:
    """Seconds; `step_s`: of a usual step. None: no save is planned, or only by steps of which
    nobody knows how long they take."""
    now = in_force(checkpoint, progress)
    spans = [now.interval_s, now.interval_steps * (step_s or 0.0)]
    return min((span for span in spans if span > 0), default=None)
