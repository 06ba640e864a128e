"""Agreement of all ranks on what happens at a step boundary, at no cost to the step.

What a rank knows at the end of step k (its stop flag; on rank 0 also the clock and an operator's
order) rides on an asynchronous all-reduce that is read at the end of step k+1, so every rank acts
at the same step. A signal therefore takes effect one to two steps after it came. Never in a signal
handler.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Optional, Protocol

import torch
import torch.distributed as dist

from ftslurm.run.control import LEAVING, SAVE, of_strength, strength
from ftslurm.run.rank import StopFlag


@dataclass(frozen=True)
class Word:
    """What one rank knows, or what all have agreed on."""

    stop_signal: int = 0
    """Number of the signal that asks for a stop; 0: none."""
    save_due: bool = False
    """Rank 0's clock says that a periodic save is due."""
    waited_ms: int = 0
    """How long ago the stop was asked for when this was said; the longest of all ranks."""
    order: Optional[str] = None
    """The strongest order that rank 0 has found (run/control.py)."""

    @property
    def stop_signal_name(self) -> Optional[str]:
        return signal.Signals(self.stop_signal).name if self.stop_signal else None

    @property
    def asked_by(self) -> str:
        """Who asks for a stop, in words."""
        return self.stop_signal_name or f"the order `{self.order}`"

    @property
    def leaves(self) -> bool:
        """All ranks are to save and leave."""
        return self.stop_signal != 0 or self.order in LEAVING

    @property
    def saves(self) -> bool:
        """Somebody, not the step number, asks for a save."""
        return self.save_due or self.order == SAVE


def encode(word: Word) -> list[int]:
    """Numbers whose maximum over ranks is the agreed word."""
    return [word.stop_signal, int(word.save_due), word.waited_ms, strength(word.order)]


def decode(values: Sequence[int]) -> Word:
    stop_signal, save_due, waited_ms, order = values
    return Word(stop_signal, bool(save_due), waited_ms, of_strength(order))


class Speaker:
    """What this rank has to say at a boundary: its flag; on rank 0 also what the clocks say.

    `interval_s`: from one periodic save to the next as it is by now, 0 for none.
    `stop_at`: UTC seconds at which the time limit is near, though no signal may come: the warn
    signal goes to the job step that runs then, and between two attempts there is none.
    """

    def __init__(
        self,
        flag: StopFlag,
        *,
        is_first: bool,
        interval_s: Callable[[], float],
        stop_at: Optional[float],
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._flag = flag
        self._interval_s = interval_s if is_first else lambda: 0.0
        self._stop_at = stop_at if is_first else None
        self._clock = clock
        self._now = now
        self._saved_at = clock()

    def saved(self) -> None:
        """The interval to the next periodic save begins now."""
        self._saved_at = self._clock()

    def word(self) -> Word:
        number, waited_s = self._asked()
        interval_s = self._interval_s()
        overdue = interval_s > 0 and self._clock() - self._saved_at >= interval_s
        return Word(number, save_due=overdue, waited_ms=round(1000 * waited_s))

    def _asked(self) -> tuple[int, float]:
        if self._flag.is_set:
            return self._flag.signal_number, self._clock() - self._flag.signalled_at
        late_s = 0.0 if self._stop_at is None else self._now() - self._stop_at
        if self._stop_at is not None and late_s >= 0:
            return signal.SIGALRM, late_s
        return 0, 0.0


class Pending(Protocol):
    """A reduction on its way."""

    def result(self) -> list[int]: ...


class Agreement:
    """One exchange in flight at any time; every rank calls `at_boundary` once a step."""

    def __init__(self, start: Callable[[list[int]], Pending]) -> None:
        self._start = start
        self._pending: Optional[Pending] = None

    def at_boundary(self, word: Word) -> Word:
        """Say `word`; get what was agreed on from the words said at the boundary before."""
        agreed = Word() if self._pending is None else decode(self._pending.result())
        self._pending = self._start(encode(word))
        return agreed

    def drain(self) -> None:
        """Wait for the exchange in flight, so that no peer is left alone in it."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None


@dataclass
class _Reduction:
    tensor: torch.Tensor
    work: dist.Work

    def result(self) -> list[int]:
        self.work.wait()
        return [int(value) for value in self.tensor.tolist()]


def start_maximum(group: dist.ProcessGroup) -> Callable[[list[int]], Pending]:
    """Exchanges by an asynchronous maximum on `group`, which has to be a gloo group of its own."""

    def start(values: list[int]) -> Pending:
        tensor = torch.tensor(values, dtype=torch.int64)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=True)
        return _Reduction(tensor, work)

    return start


def save_is_due(step: int, *, interval_steps: int, asked: bool, saved_step: Optional[int]) -> bool:
    """Whether to save at the end of `step`; the same on every rank. `asked`: by the agreed word.

    A save at the boundary before is what was asked for: rank 0 spoke before it began.
    """
    if asked and saved_step != step - 1:
        return True
    return interval_steps > 0 and step % interval_steps == 0
