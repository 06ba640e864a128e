"""Rank 0's clock for periodic saves: as configured, or chosen anew as saves are measured.

Decides only when to save, never what: that a save is due is agreed on by all ranks (stop.py), and
no step is other for it. What a save costs is seen from the steps: the one behind a save is longer
by the stall, whichever rank it came from, since all wait for the slowest; that is what
`ftslurm report` counts as stall. A slowdown spread over the steps while a save is written is not
seen. Where steps vary more than a save costs, many saves together tell what it costs.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Optional

from ftslurm.errors import FtslurmError
from ftslurm.plan.intervals import Costs
from ftslurm.run.attempts import PACED
from ftslurm.run.observed import LookBack, Seen, gpus_of, look_back
from ftslurm.run.rank import RankEnvironment
from ftslurm.run.record import RunRecord
from ftslurm.run.spec import AUTO, CheckpointSpec
from ftslurm.train.pace import choose, is_worth_a_change, middle, settled

STEPS, SAVES = 200, 5
"""How many of the newest count; of stalls up to MANY, as long as they do not change."""
MANY = 8 * SAVES


OnEvent = Callable[[str, Mapping[str, Any]], None]


def open_pacer(env: RankEnvironment, record: RunRecord, on_event: OnEvent) -> Pacer:
    """What came before is read on a thread: a file system that hangs holds up no step."""
    spec = record.spec.checkpoint
    found: list[LookBack] = []

    def read() -> None:
        with contextlib.suppress(OSError, FtslurmError):
            found.append(look_back(env.layout, record, env.attempt))

    if spec.interval == AUTO and env.rank == 0:
        threading.Thread(target=read, name="look-back", daemon=True).start()
    return Pacer(
        spec,
        gpus=gpus_of(record.spec, env.world_size),
        is_first=env.rank == 0,
        on_event=on_event,
        look_back=lambda: found[0] if found else None,
    )


class Pacer:
    """Owned by the session; of ranks other than the first it only knows whether steps count.

    `look_back`: None until it is there, or for good where nothing can be read.
    """

    def __init__(
        self,
        spec: CheckpointSpec,
        *,
        gpus: int,
        is_first: bool,
        on_event: OnEvent,
        look_back: Callable[[], Optional[LookBack]] = lambda: None,
    ) -> None:
        self._is_auto = spec.interval == AUTO
        self.interval_steps = 0 if self._is_auto else spec.interval_steps
        self._interval_s = spec.interval_s if is_first else 0.0
        self._measures = self._is_auto and is_first
        self._gpus = gpus
        self._on_event = on_event
        self._look_back = look_back
        self._before: Optional[LookBack] = None
        self._usual: deque[float] = deque(maxlen=STEPS)
        self._stalls: deque[float] = deque(maxlen=MANY)
        self._lags: deque[float] = deque(maxlen=SAVES)
        self._trained_s = 0.0
        self._has_saved = False
        self._has_chosen = False

    def interval_s(self) -> float:
        """To the next save by the clock; 0: none is due by it."""
        return self._interval_s

    def step(self, took_s: float) -> None:
        """A step has ended, `took_s` after the one before, a save between them included."""
        if not self._measures:
            return
        self._trained_s += took_s
        if not self._has_saved:
            self._usual.append(took_s)
        elif self._usual:
            self._stalls.append(took_s - middle(self._usual))
        self._has_saved = False
        if self._before is None:
            self._before = self._look_back()
            if self._before is not None:
                self._choose()

    def saved(self) -> None:
        """A save has begun at the end of the newest step."""
        self._has_saved = True

    def heard(self, kind: str, facts: Mapping[str, Any]) -> None:
        """An event of the checkpointer's."""
        if kind == "committed" and self._measures:
            self._lags.append(float(facts["seconds"]))
            self._choose()

    def _choose(self) -> None:
        before = self._before or LookBack(Seen())
        stall_s = self._stall_s() if self._stalls else before.stall_s
        lag_s = middle(self._lags) if self._lags else before.lag_s
        if stall_s is None or lag_s is None:
            return
        own_hours = self._gpus * self._trained_s / 3600.0
        seen = Seen(before.seen.failures, before.seen.gpu_hours + own_hours, before.seen.runs + 1)
        choice = choose(Costs(stall_s, 0.0, lag_s), seen, gpus=self._gpus)
        if self._has_chosen and not is_worth_a_change(self._interval_s, choice.interval_s):
            return
        was_s, self._interval_s = self._interval_s, choice.interval_s
        self._has_chosen = True
        facts = {"before_s": was_s, "stall_s": stall_s, "lag_s": lag_s, **asdict(seen),
                 "gpus": self._gpus, **asdict(choice)}  # fmt: skip
        self._on_event(PACED, {name: _short(value) for name, value in facts.items()})

    def _stall_s(self) -> float:
        kept = settled(list(self._stalls), self._usual, newest=SAVES)
        while len(self._stalls) > kept:
            self._stalls.popleft()
        return max(0.0, middle(self._stalls))


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
