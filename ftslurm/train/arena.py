"""Host memory into which a snapshot is copied: allocated once, touched in advance, reused.

A slot belongs either to the training thread (free, staged) or to the writer (persisting); one that
is being persisted is never written to. Copies are complete when `stage` returns.
"""

from __future__ import annotations

import enum
import logging
from collections import defaultdict
from collections.abc import Sequence

import torch

from ftslurm.train.leaves import Shape, size_bytes

log = logging.getLogger(__name__)

_ALIGNMENT = 64


class SlotState(enum.Enum):
    FREE = "free"
    STAGED = "staged"
    PERSISTING = "persisting"


class Arena:
    """One reused slot."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._side_stream: torch.cuda.Stream | None = None
        self.state = SlotState.FREE

    @property
    def capacity_bytes(self) -> int:
        return self._memory.numel()

    def reserve(self, needed_bytes: int) -> None:
        """Have room for `needed_bytes`, every page touched; the only place that allocates."""
        assert self.state is SlotState.FREE, "the slot is in use"
        if needed_bytes > self.capacity_bytes:
            # Page faults on first touch cost seven times the copy itself (1.1 against 0.16 s per
            # GiB measured), so they are taken here and once.
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(needed_bytes, dtype=torch.uint8, pin_memory=self._pinned)
            self._memory.zero_()

    def has_room(self, needed_bytes: int) -> bool:
        """`reserve`; False when this machine has not the memory."""
        try:
            self.reserve(needed_bytes)
        except (RuntimeError, MemoryError) as error:  # what torch and Python say of it
            log.warning("no memory for a snapshot of %d bytes: %s", needed_bytes, error)
            return False
        return True

    def stage(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of `sources`, contiguous, in the slot; valid until `release`."""
        shapes = [(source.dtype, tuple(source.shape)) for source in sources]
        offsets, needed_bytes = plan(shapes)
        self.reserve(needed_bytes)
        copies = [
            self._memory[offset : offset + size_bytes(*shape)].view(shape[0]).view(shape[1])
            for offset, shape in zip(offsets, shapes, strict=True)
        ]
        self._copy(copies, sources)
        self.state = SlotState.STAGED
        return copies

    def hand_over(self) -> None:
        """The writer takes the slot."""
        assert self.state is SlotState.STAGED, "nothing is staged"
        self.state = SlotState.PERSISTING

    def release(self) -> None:
        """The slot may be staged into again."""
        self.state = SlotState.FREE

    @torch.no_grad()
    def _copy(self, copies: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        for index, source in enumerate(sources):
            groups[source.device, source.dtype].append(index)
        for (device, _), indexes in groups.items():
            into = [copies[i] for i in indexes]
            out_of = [sources[i] for i in indexes]
            if device.type == "cuda":
                self._copy_from_cuda(into, out_of, device)
            else:
                torch._foreach_copy_(into, out_of)
        if self._side_stream is not None:
            self._side_stream.synchronize()

    def _copy_from_cuda(
        self, into: list[torch.Tensor], out_of: list[torch.Tensor], device: torch.device
    ) -> None:
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The values are those that the work queued so far leaves behind.
        self._side_stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._side_stream):
            torch._foreach_copy_(into, out_of, non_blocking=True)
        for source in out_of:
            source.record_stream(self._side_stream)


def plan(shapes: Sequence[tuple[torch.dtype, Shape]]) -> tuple[list[int], int]:
    """Aligned offsets of tensors laid one after another, and the bytes they take together."""
    offsets = []
    end = 0
    for dtype, shape in shapes:
        offsets.append(end)
        end += -(-size_bytes(dtype, shape) // _ALIGNMENT) * _ALIGNMENT
    return offsets, end
