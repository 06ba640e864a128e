"""How long this rank's own device computes in a step, on CUDA.

There a wait for other ranks holds up the device and no host, so the host's clocks tell every rank
the same. A pair of events on the stream that computes, one where the step begins, one where all
gradients are computed and the stream has yet to wait for the others', has the device itself tell.
They are read when the device has passed them, a step or more later: nothing here ever waits for a
device, and what cannot be measured is not told.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, Optional

import torch

from ftslurm.errors import warn

MOST_PENDING = 8
"""Steps whose events the device has not passed yet; older ones are given up."""
_ERRORS = (RuntimeError, ValueError)
"""What torch's events raise: of the device, and of a misuse (c10/core/impl/InlineEvent.h)."""

_new_event = functools.partial(torch.cuda.Event, enable_timing=True)


class DeviceClock:
    """`new_event` makes a torch.cuda.Event that takes the time; into a CUDA graph that is being
    captured none is put."""

    def __init__(
        self,
        new_event: Callable[[], Any] = _new_event,
        is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing,
    ) -> None:
        self._new_event, self._is_capturing = new_event, is_capturing
        self._begin: Any = None
        self._pending: deque[tuple[Any, Any]] = deque()
        self._free: list[Any] = []
        self._own_s: Optional[float] = None
        self._untold = 0
        """Steps that have begun since one was measured."""
        self._is_broken = False

    def begins(self) -> None:
        """The step begins, on the current stream."""
        self._put_back(self._begin)
        self._begin = self._recorded()
        self._untold += 1
        if self._untold > MOST_PENDING:  # as in replays of a graph that was captured in the midst
            self._own_s = None

    def computed(self) -> None:
        """All of this rank's gradients are computed, and none has been waited for."""
        end = self._recorded()
        if self._begin is None or end is None:
            self._put_back(end)
            return
        self._pending.append((self._begin, end))
        self._begin = None
        if len(self._pending) > MOST_PENDING:
            self._put_back(*self._pending.popleft())

    def own_s(self) -> Optional[float]:
        """Of the newest step that the device is known to have computed; None: of none of late."""
        try:
            while self._pending and self._pending[0][1].query():
                begin, end = self._pending.popleft()
                self._own_s = begin.elapsed_time(end) / 1000.0  # it tells milliseconds
                self._untold = 0
                self._put_back(begin, end)
        except _ERRORS as error:
            self._break(error)
        return self._own_s

    def _recorded(self) -> Any:
        if self._is_broken:
            return None
        try:
            if self._is_capturing():
                return None
            event = self._free.pop() if self._free else self._new_event()
            event.record()
        except _ERRORS as error:
            self._break(error)
            return None
        return event

    def _put_back(self, *events: Any) -> None:
        self._free += [event for event in events if event is not None]

    def _break(self, error: Exception) -> None:
        """An error of the device's own is the step's to raise, not that of who looks on."""
        self._is_broken, self._own_s = True, None
        self._pending.clear()
        warn(f"what this rank's device computes by itself is not measured any more: {error}")


def clock_of(device: torch.device) -> Optional[DeviceClock]:
    """None: the host's clocks tell all of it."""
    return DeviceClock() if device.type == "cuda" else None


def gpu_name(device: torch.device) -> str:
    """As `nvidia-smi -L` has it; empty: not known, or none."""
    if device.type != "cuda":
        return ""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return "" if uuid is None else f"GPU-{uuid}"
