"""Agreement of all ranks on what happens at a step boundary, at no cost to the step.

What a rank knows at the end of step k (its stop flag; on rank 0 also the clock) rides on an
asynchronous all-reduce that is read at the end of step k+1, so every rank acts at the same step.
A signal therefore takes effect one to two steps after it came. Never in a signal handler.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Optional, Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Word:
    """What one rank knows, or what all have agreed on."""

    stop_signal: int = 0
    """Number of the signal that asks for a stop; 0: none."""
    save_due: bool = False
    """Rank 0's clock says that a periodic save is due."""

    @property
    def stop_signal_name(self) -> Optional[str]:
        return signal.Signals(self.stop_signal).name if self.stop_signal else None


def encode(word: Word) -> list[int]:
    """Numbers whose maximum over ranks is the agreed word."""
    return [word.stop_signal, int(word.save_due)]


def decode(values: Sequence[int]) -> Word:
    return Word(stop_signal=values[0], save_due=bool(values[1]))


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


def save_is_due(step: int, *, interval_steps: int, asked_by_clock: bool) -> bool:
    """Whether to save at the end of `step`; the same on every rank."""
    return asked_by_clock or (interval_steps > 0 and step % interval_steps == 0)
