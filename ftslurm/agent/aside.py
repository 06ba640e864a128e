"""What slurmctld says while somebody is silent: asked aside, and true of that silence only.

An answer from before says nothing of a network that has parted since: a leader that is cut off
would hold it for a proof that it is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Optional, TypeVar

from ftslurm.scheduler.accounting import read_nodes

Said = TypeVar("Said")

AGAIN_S = 3.0


class Aside(Generic[Said]):
    """`in_thread(work, done)`: as a Loop does it. `ask` may block; None: no answer."""

    def __init__(
        self,
        in_thread: Callable[[Callable[[], Any], Callable[[Any], None]], None],
        ask: Callable[..., Optional[Said]],
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._in_thread, self._ask, self._now = in_thread, ask, now
        self._silence = 0
        self._said: Optional[Said] = None
        self._asked_at: Optional[float] = None
        self._is_asking = False

    def said(self, *of: Any) -> Optional[Said]:
        """The newest answer to what was asked in this silence, None while there is none; asked anew
        every AGAIN_S."""
        is_due = self._asked_at is None or self._now() - self._asked_at >= AGAIN_S
        if is_due and not self._is_asking:
            self._asked_at, self._is_asking = self._now(), True
            silence = self._silence

            def done(said: Optional[Said]) -> None:
                self._is_asking = False
                if silence == self._silence:
                    self._said = said

            self._in_thread(lambda: self._ask(*of), done)
        return self._said

    def forget(self) -> None:
        """Nobody is silent any more."""
        self._silence += 1
        self._said = self._asked_at = None


def down_nodes(nodes: Sequence[str]) -> Optional[frozenset[str]]:
    """Those that slurmctld reaches no more, known long before it gives them up; None: it does not
    answer."""
    states = read_nodes(nodes)
    if states is None:
        return None
    return frozenset(name for name in nodes if name in states and _is_down(states[name].state))


def _is_down(state: str) -> bool:
    return state.startswith("DOWN") or "*" in state or "NOT_RESPONDING" in state
