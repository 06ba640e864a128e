"""What an attempt says of itself: each rank by its beats, rank 0 on disk too.

Every rank makes the same calls; only rank 0 writes (progress.py) and hears an operator's orders
(orders.py). Nothing here is collective, and nothing decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftslurm.run.attempts import Outcome
from ftslurm.run.control import control_files
from ftslurm.run.heartbeat import PHASES
from ftslurm.run.pulse import Pulse
from ftslurm.run.rank import RankEnvironment
from ftslurm.run.record import RunRecord
from ftslurm.train.ending import settle
from ftslurm.train.orders import Orders
from ftslurm.train.progress import Recorder


class Account:
    """One rank's, of one attempt."""

    def __init__(self, env: RankEnvironment, record: RunRecord, pulse: Pulse) -> None:
        self._env, self._pulse = env, pulse
        self._recorder: Recorder | None = None
        self._orders: Orders | None = None
        if env.rank == 0:
            self._recorder = Recorder.of(env, record)
            self._orders = Orders(control_files(env.layout, record), self.event)

    def enter(self, phase: str, **changes: object) -> None:
        """`changes`: of progress.json."""
        if phase in PHASES:
            self._pulse.phase(phase)
        if self._recorder is not None:
            self._recorder.enter(phase, **changes)

    def begin(self, *, step: int, tokens: int, restored_step: int | None) -> None:
        """The first step of the attempt begins now."""
        if self._recorder is not None:
            self._recorder.begin(step=step, tokens=tokens, restored_step=restored_step)

    def step(self, step: int, **facts: Any) -> None:
        """One step is done; `facts` as in Recorder.step."""
        if self._recorder is not None:
            self._recorder.step(step, **facts)

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """One line for the journal."""
        if self._recorder is not None:
            self._recorder.event(kind, facts)

    def save_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Likewise, of the checkpointer; it may be what an order has asked for."""
        self.event(kind, facts)
        if self._orders is not None:
            self._orders.heard(kind, facts)

    def order_due(self, step: int, *, saved_step: int | None) -> str | None:
        """See Orders.due; None on other ranks than rank 0."""
        return None if self._orders is None else self._orders.due(step, saved_step=saved_step)

    def order_obeyed(self, agreed: str | None) -> str | None:
        """See Orders.leaving; None on other ranks than rank 0."""
        return None if self._orders is None else self._orders.leaving(agreed)

    def settle(self, outcome: Outcome, *, loss: float | None, digest: str | None) -> None:
        """How the attempt has ended, after all that is said is durable; see ending.settle."""
        if self._recorder is None or self._orders is None:
            return
        self._recorder.close()
        settle(self._env.layout, self._env.attempt, outcome, loss=loss, parameter_digest=digest)
        self._orders.ended(outcome)
        self.enter(outcome.result, step=outcome.step, committed_step=outcome.committed_step)
