"""Rank 0's side of an operator's orders: which one is due, and when it has been carried out.

A thread looks for the files, so that a file system that hangs holds up no step and no last save. An
ordered save's file is taken away when a step has committed that was trained when the order was
seen; a save that fails is reported and not tried again: an order must not end a run by its
failures. The file of a stop or a pause is never taken away here, but after the job has left: one
that dies before must find it again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ftslurm.run import control
from ftslurm.run.attempts import FINISHED, Outcome
from ftslurm.run.control import LEAVING, SAVE, ControlFiles, Order, strength

FIRST_LOOK_S = 1.0
"""How long the start of an attempt waits for the first look."""


class Lookout:
    """The newest look at the control files."""

    def __init__(self, files: ControlFiles) -> None:
        self.latest: Order | None = None
        self._files = files
        self._has_looked = threading.Event()
        threading.Thread(target=self._run, name="look-for-orders", daemon=True).start()
        self._has_looked.wait(FIRST_LOOK_S)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            self.latest = self._files.look()
            self._has_looked.set()
            pause.wait(control.LOOK_INTERVAL_S)


@dataclass(frozen=True)
class _Seen:
    order: Order
    step: int
    """Steps applied when it was seen."""


class Orders:
    """Owned by rank 0's session; every method is called on the thread that trains."""

    def __init__(
        self, files: ControlFiles, event: Callable[[str, Mapping[str, Any]], None]
    ) -> None:
        self._files = files
        self._event = event
        self._lookout = Lookout(files)
        self._open: dict[str, _Seen] = {}
        """By name: seen, and not carried out yet."""
        self._closed: dict[str, Order] = {}
        """By name: carried out; the newest look may be older than that."""

    def due(self, step: int, *, saved_step: int | None) -> str | None:
        """What to say at the end of `step`; `saved_step`: of the newest save that has begun."""
        order = self._lookout.latest
        if order is None or self._closed.get(order.name) == order:
            return None
        seen = self._open.get(order.name)
        if seen is None or seen.order != order:
            seen = self._open[order.name] = _Seen(order, step)
            self._event("ordered", {"order": order.name, "step": step})
        if order.name == SAVE and saved_step is not None and saved_step >= seen.step:
            return None  # it is being saved
        return order.name

    def heard(self, kind: str, facts: Mapping[str, Any]) -> None:
        """An event of the checkpointer's."""
        seen = self._open.get(SAVE)
        if seen is None or facts.get("step", -1) < seen.step:
            return
        given_by_ns = seen.order.given_at_ns
        if kind == "committed":
            self._close(SAVE, "order_done", {"step": facts["step"]}, given_by_ns)
        elif kind in ("save_failed", "save_abandoned"):
            self._close(SAVE, "order_failed", facts, given_by_ns)

    def leaving(self, agreed: str | None) -> str | None:
        """The order that an attempt which is leaving obeys as well, agreed on or just found."""
        latest = self._lookout.latest
        names = [agreed, None if latest is None else latest.name]
        return max((name for name in names if name in LEAVING), key=strength, default=None)

    def ended(self, outcome: Outcome) -> None:
        """The outcome is durable: say what it has carried out. A run that has finished leaves
        nothing to order."""
        facts = {"step": outcome.committed_step}
        is_finished = outcome.result == FINISHED
        for name in LEAVING:
            if is_finished or strength(name) <= strength(outcome.order):
                self._done(name, "order_done", facts)
        is_asked_for = is_finished or outcome.order is not None or SAVE in self._open
        if is_asked_for and outcome.committed_step == outcome.step:
            self._close(SAVE, "order_done", facts)

    def _close(
        self, name: str, kind: str, facts: Mapping[str, Any], given_by_ns: int | None = None
    ) -> None:
        self._done(name, kind, facts)
        with contextlib.suppress(OSError):
            self._files.take_away(name, given_by_ns=given_by_ns)

    def _done(self, name: str, kind: str, facts: Mapping[str, Any]) -> None:
        seen = self._open.pop(name, None)
        if seen is not None:
            self._closed[name] = seen.order
            self._event(kind, {**facts, "order": name})
