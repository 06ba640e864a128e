"""How far the times of the kernel log may be off those of an attempt. Pure."""

from __future__ import annotations

BEFORE_S = 5.0
"""A line this much older than the attempt still counts: clocks, and the claim's own time."""
DRIFT = 20e-6
"""By which the kernel log's clock may go off the time of day, which nothing sets right there."""


def slack_s(up_s: float) -> float:
    """`up_s`: how long the node has been up."""
    return BEFORE_S + DRIFT * max(0.0, up_s)
