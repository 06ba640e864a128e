"""Whether a loss can still be trained on: raises NumericError for NaN, Inf and, if asked, a spike.

A function of the losses alone, which are the same on every rank, so that all ranks end at the same
step and none waits for another. Nothing of a bad step is ever saved: it is looked at before a save
may begin. What follows (going back, passing over batches) is decided between attempts.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from ftslurm.errors import NumericError
from ftslurm.run.spec import RecoverySpec

_WINDOW = 100
_FEWEST = 20
"""Losses without which a median says little: those of a start fall fast."""


class LossWatch:
    """Of one attempt; knows the losses of its own steps only."""

    def __init__(self, rules: RecoverySpec) -> None:
        self._factor = rules.spike_factor
        self._losses: deque[float] = deque(maxlen=_WINDOW)

    def check(self, step: int, loss: float) -> None:
        """`loss` of `step`, the number of steps applied with it."""
        if not math.isfinite(loss):
            raise NumericError(
                f"the loss of step {step} is {loss}; expected a number: see recovery.on_nan",
                step=step,
                value=loss,
            )
        if self._factor and len(self._losses) >= _FEWEST:
            usual = statistics.median(self._losses)
            if loss > self._factor * usual > 0:
                raise NumericError(
                    f"the loss of step {step} is {loss:.4g}, more than {self._factor:g} times the "
                    f"median {usual:.4g} of the {len(self._losses)} steps before it: a spike, see "
                    "recovery.on_nan",
                    step=step,
                    value=loss,
                )
        if self._factor:
            self._losses.append(loss)
