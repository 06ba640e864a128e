"""The wait before the next attempt: bounded, and cut short when the run is to end or to leave.

Waits; decides nothing, and starts no process meanwhile: what is started then would not ignore TERM.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Callable, Optional

from ftslurm.run.rank import STOP_SIGNALS

POLL_S = 1.0


def wait(wait_s: float, *, sleep: Callable[[float], None], called_off: Callable[[], bool]) -> bool:
    """Whether a stop signal came: then the time of grace is running. Ends early for that, and when
    it is `called_off`."""
    told: list[int] = []

    def note(number: int, frame: Optional[FrameType]) -> None:
        told.append(number)

    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        left_s = wait_s
        while left_s > 0 and not told and not called_off():
            sleep(min(left_s, POLL_S))
            left_s -= POLL_S
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return bool(told)
