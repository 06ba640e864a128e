"""How long a last save may take: the same on all ranks, by the best that rank 0 knows.

Slurm's own word comes from the node's agent (run/deadline.py), mostly while the ranks are still on
their way to the boundary at which they stop. It is waited for a moment, never long: a grace time
passes. One that comes later still lengthens the time, when what was frozen at submit is up; or ends
the save sooner, as does one that a later signal brings. That needs no agreement: each rank sees
what its own node was told, and the first to give up makes all do so.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist

from ftslurm.run.deadline import (
    AGENTS,
    APART_S,
    ENDING,
    LEAST_S,
    MARGIN_S,
    MOST_S,
    PREEMPTED,
    SUBMIT,
    TIME_LIMIT,
    Deadline,
    read_deadline,
)
from ftslurm.run.rank import RankEnvironment
from ftslurm.run.record import RunRecord
from ftslurm.train.exchange import largest

ANSWER_S = 1.0
"""After the signal; squeue answers in 0.1 s where nothing is wrong."""
LATE_S = 2.0
"""How much later than the deadline ranks are waited for, as by a save (checkpointer.py)."""
_LOOK_S = 0.02
_MET_S = 1.0
"""How long ranks that have just met are waited for."""
_ORDER = "order"
_BY_SLURM = (PREEMPTED, TIME_LIMIT, ENDING)
_BY = (*_BY_SLURM, AGENTS)


class Leeway:
    """Of one stop, asked for at `asked_at` by the monotonic clock; `signal_number` 0: by an
    operator, who waits for the save. Every rank makes the same calls, at the same boundary."""

    def __init__(
        self,
        env: RankEnvironment,
        record: RunRecord,
        group: dist.ProcessGroup,
        *,
        asked_at: float,
        signal_number: int,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._env, self._record, self._group = env, record, group
        self._asked_at, self._is_by_clock = asked_at, signal_number == signal.SIGALRM
        self._environ, self._clock, self._now = environ, clock, now
        own = record.spec.checkpoint.emergency_deadline_s
        may_change = own is None and record.scheduler == "slurm"
        self._is_told = may_change and record.spec.recovery.agents
        is_known = self._is_by_clock or self._is_told
        self._may_change = bool(signal_number) and may_change and is_known
        self._best = Deadline(clock() + MOST_S, _ORDER)
        """As far as known, the same moment on all ranks."""
        if signal_number:
            deadline_s = record.emergency_deadline_s
            assert deadline_s is not None, "frozen at submit"
            self._best = Deadline(asked_at + deadline_s, SUBMIT)
        self._until = self._best.until
        """What this rank goes by: that, or nearer."""
        self.given_s = 0.0
        """What `save` has given to the save so far."""

    @property
    def left_s(self) -> float:
        return max(LEAST_S, self._until - self._clock())

    def save(
        self, save: Callable[..., bool], on_event: Callable[[str, Mapping[str, Any]], None]
    ) -> bool:
        """Whether `save(deadline_s=...)` has committed. Collective."""
        are_all_here = self._agree(self._asked_at + ANSWER_S, patience_s=LATE_S) is not None
        if self._save(save, on_event):
            return True
        if self._best.by != SUBMIT or not are_all_here:
            return False
        left_ms = self._agree(0.0, patience_s=_MET_S) or 0
        return left_ms > 1000 * LEAST_S and self._save(save, on_event)

    def _save(
        self, save: Callable[..., bool], on_event: Callable[[str, Mapping[str, Any]], None]
    ) -> bool:
        began_at, left_s = self._clock(), self.left_s
        self._until = began_at + left_s
        if self._best.by != _ORDER:
            on_event("deadline", {"left_s": round(left_s, 3), "by": self._best.by})

        nearer = partial(self._nearer, began_at + LEAST_S, on_event)
        has_committed = save(deadline_s=left_s, nearer=nearer)
        self.given_s += self._until - began_at
        return has_committed

    def _nearer(self, least: float, on_event: Callable[[str, Mapping[str, Any]], None]) -> float:
        """Until when, by what this rank's node has been told by now."""
        told = self._read() if self._is_told else None
        if told is not None and told.by in _BY_SLURM:
            until = max(told.until, least)
            if until < self._until - APART_S:
                self._until = until
                left_s = round(until - self._clock(), 3)
                on_event("deadline", {"left_s": left_s, "by": told.by})
        return self._until

    def _agree(self, wait_until: float, *, patience_s: float) -> int | None:
        """Take what rank 0 has been told; the milliseconds that are left by it, the same on all
        ranks, 0: it was told nothing. None: not all have come. They are at one boundary already;
        who is stopped there is waited for until the deadline as this rank knows it."""
        if not self._may_change:
            return 0
        is_first, words = self._env.rank == 0, [0, 0]
        told = self._told(wait_until if is_first else 0.0)
        now = self._clock()
        until = self._best.until if told is None or told.by == AGENTS else told.until
        if told is not None and is_first:
            words = [max(1, round(1000 * (told.until - now))), _BY.index(told.by)]
        timeout_s, size = max(0.0, until - now) + patience_s, self._env.world_size
        try:
            left_ms, by = largest(words, self._group, world_size=size, timeout_s=timeout_s)
        except RuntimeError:
            return None  # the save, which needs all of them, says so
        if left_ms:
            self._best = Deadline(self._clock() + left_ms / 1000, _BY[by])
            self._until = self._best.until
        return left_ms

    def _told(self, wait_until: float) -> Deadline | None:
        """By the agent, or by rank 0's own clock (stop.py), when no signal may have come that
        anybody could ask about; the nearer."""
        told = self._read()
        while told is None and not self._is_by_clock and self._clock() < wait_until:
            time.sleep(_LOOK_S)
            told = self._read()
        known = [] if told is None or told.by not in _BY else [told]
        if self._is_by_clock:
            assert self._env.stop_at is not None
            limit_at = self._env.stop_at + self._record.spec.cluster.signal_lead_s
            until = self._clock() + limit_at - self._now() - MARGIN_S
            known.append(Deadline(until, TIME_LIMIT))
        return min(known, key=lambda one: one.until, default=None)

    def _read(self) -> Deadline | None:
        return read_deadline(self._environ, self._env.attempt, asked_at=self._asked_at)
