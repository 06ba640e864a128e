"""Learning rate over steps: linear warm-up, then half a cosine. A function of the step alone."""

from __future__ import annotations

import math
from collections.abc import Callable


def warm_up_cosine(*, warmup_steps: int, steps: int, min_ratio: float) -> Callable[[int], float]:
    """Factor on the base rate for torch's LambdaLR: 1/warmup_steps at step 0, 1 after warm-up,
    `min_ratio` from `steps` on."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if step >= steps:
            return min_ratio
        progress = (step - warmup_steps) / (steps - warmup_steps)
        return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def scaled(factor: Callable[[int], float], *, by: float) -> Callable[[int], float]:
    """The same shape, `by` times as high; `by=1` gives the same bits."""
    return lambda step: factor(step) * by
