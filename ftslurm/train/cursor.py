"""Where a run stands in its data: one number, the samples consumed, and what that number means.

Sample g of the run (counted over all epochs) is place g % n of epoch g // n. So a batch may cross
an epoch's end, nothing is dropped or drawn twice, and neither world size nor workers nor restarts
change what step follows which. The cursor moves only when it is told that a step was trained:
reading ahead never moves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
from numpy.typing import NDArray

from ftslurm.errors import DataError, UsageError
from ftslurm.train.order import ORDER_VERSION, permute


def sample_indices(
    first: int, count: int, *, samples_per_epoch: int, seed: int
) -> NDArray[np.int64]:
    """Indices into the data set of the run's samples `first` to `first + count - 1`."""
    pieces = [np.empty(0, np.int64)]
    while count > 0:
        epoch, place = divmod(first, samples_per_epoch)
        taken = min(count, samples_per_epoch - place)
        places = np.arange(place, place + taken)
        pieces.append(permute(places, n=samples_per_epoch, seed=seed, epoch=epoch))
        first, count = first + taken, count - taken
    return np.concatenate(pieces)


def slice_bounds(total: int, part: int, parts: int) -> tuple[int, int]:
    """(start, stop) of one of `parts` consecutive slices of [0, total), sizes at most 1 apart."""
    if not 0 <= part < parts:
        raise UsageError(f"rank {part} is outside a world of {parts}; expected 0 to {parts - 1}")
    return part * total // parts, (part + 1) * total // parts


@dataclass(frozen=True)
class BatchPlan:
    """How one rank works through its slice of each global batch."""

    start: int
    stop: int
    """The slice, in places of the global batch."""
    micro_steps: int
    """Forward passes a step: equal on all ranks, or a collective in one would wait for ever."""
    rows: int
    """Sequences in each of them; those that the slice does not fill have weight zero."""


def plan_batch(
    global_batch_size: int, rank: int, world_size: int, micro_batch_size: int
) -> BatchPlan:
    """As few micro-steps as `micro_batch_size` allows, and no more padding than those need."""
    if micro_batch_size < 1:
        raise UsageError(f"micro_batch_size is {micro_batch_size}; it has to be at least 1")
    start, stop = slice_bounds(global_batch_size, rank, world_size)
    longest = -(-global_batch_size // world_size)
    micro_steps = -(-longest // micro_batch_size)
    return BatchPlan(start, stop, micro_steps, rows=-(-longest // micro_steps))


class Cursor:
    """The run's place in its data, the same on every rank at a step boundary."""

    def __init__(
        self,
        samples_per_epoch: int,
        global_batch_size: int,
        seed: int,
        samples: int = 0,
        *,
        snapshot: str,
        passed_over: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`snapshot` is the digest of the data that the samples are counted in; `passed_over`:
        first and last of ranges of batches, counted from 0 and in order, that no step trains."""
        if samples_per_epoch < 1 or global_batch_size < 1 or samples < 0:
            raise UsageError(
                f"a cursor at sample {samples} over {samples_per_epoch} samples an epoch in "
                f"batches of {global_batch_size} makes no sense; sizes start at 1, places at 0"
            )
        self.samples_per_epoch = samples_per_epoch
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.snapshot = snapshot
        self.samples = samples
        self.passed_over = passed_over
        self.moves = 0
        """How often the place was set by hand; readers that run ahead start anew when it grows."""

    @property
    def epoch(self) -> int:
        return self.samples // self.samples_per_epoch

    def position(self) -> dict[str, int]:
        """The place as plain numbers, for the manifest."""
        return {"epoch": self.epoch, "samples": self.samples}

    def batch_indices(self, samples: Optional[int] = None) -> NDArray[np.int64]:
        """The global batch of the step that starts at `samples` consumed; default: the next one."""
        return sample_indices(
            self.begin_of(self.samples if samples is None else samples),
            self.global_batch_size,
            samples_per_epoch=self.samples_per_epoch,
            seed=self.seed,
        )

    def begin_of(self, samples: int) -> int:
        """First sample of the step that is trained after `samples`: batches may lie between that
        are passed over."""
        batch, rest = divmod(samples, self.global_batch_size)
        for first, last in self.passed_over:
            if first <= batch <= last:
                batch = last + 1
        return batch * self.global_batch_size + rest

    def begins(self) -> Iterator[int]:
        """First samples of the steps from here on, without end. Moves nothing."""
        samples = self.samples
        while True:
            samples = self.begin_of(samples)
            yield samples
            samples += self.global_batch_size

    def slice_for(self, rank: int, world_size: int) -> tuple[int, int]:
        """(start, stop) of the rank's part of each global batch."""
        return slice_bounds(self.global_batch_size, rank, world_size)

    def advance(self) -> None:
        """One more global batch has been trained. Called once a step, and by nobody who reads."""
        self.samples = self.begin_of(self.samples) + self.global_batch_size

    def state_dict(self) -> dict[str, Any]:
        """The position and all that it is counted in: plain JSON."""
        return {**self.position(), **self._promise()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved place; DataError, and no move, when it is a place in something else."""
        for name, ours in self._promise().items():
            saved = state.get(name)
            if saved != ours:
                raise DataError(
                    f"the saved cursor has {name} `{saved}`, this run has `{ours}`; the place "
                    "means nothing there: resume with the data, sequence length, seed and ftslurm "
                    "that it was saved with, or start a new run"
                )
        samples = state.get("samples")
        if not isinstance(samples, int) or samples < 0:
            raise DataError(f"the saved cursor is at sample `{samples}`; expected 0 or more")
        if state.get("epoch") != samples // self.samples_per_epoch:
            raise DataError(
                f"the saved cursor is at sample {samples} in epoch `{state.get('epoch')}`, where "
                f"{self.samples_per_epoch} samples an epoch make it epoch "
                f"{samples // self.samples_per_epoch}; the record is damaged"
            )
        self.samples = samples
        self.moves += 1

    def _promise(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "snapshot": self.snapshot,
            "samples_per_epoch": self.samples_per_epoch,
            "order_version": ORDER_VERSION,
        }
