"""Read a published step into the live state: every byte verified in the pass that reads it.

Records go straight into the memory they belong in where their layout allows, otherwise through one
bounded buffer, whatever world size or strategy wrote them. Only indexes and records that this rank
needs are read. Errors of the files are CheckpointError (another step may do); StateMismatch says
that the program is not the one that was saved (no other step will do).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ftslurm.checkpoint.records import Manifest, ShardIndex, TensorRecord
from ftslurm.checkpoint.shard import ShardReader, read_index
from ftslurm.errors import CheckpointError
from ftslurm.train.boxes import Box
from ftslurm.train.leaves import Leaf, byte_view, dtype_of, fill, is_plain_memory


class StepReader:
    """The indexes of one step, each read and verified once, when first asked for."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._indexes: dict[int, ShardIndex] = {}

    def index(self, rank: int) -> ShardIndex:
        if rank not in self._indexes:
            entry = self.manifest.indexes[rank]
            self._indexes[rank] = read_index(self.folder, entry, self.manifest.digest_algorithm)
        return self._indexes[rank]

    def fill(self, leaves: Iterable[Leaf], *, rank: int) -> None:
        """Fill the memory of `leaves`; all of it or CheckpointError."""
        wanted = {leaf.key: _Wanted(leaf) for leaf in leaves if leaf.local.numel()}
        missing = set(wanted)
        with ShardReader(self.folder, self.manifest.digest_algorithm) as shards:
            filler = _Filler(shards)
            # Own index first, then rank 0's: a sharded state of the same world needs no other.
            order = dict.fromkeys([rank % self.manifest.world_size, 0])
            for writer in [*order, *(r for r in range(self.manifest.world_size) if r not in order)]:
                if not missing:
                    break
                for record in sorted(self.index(writer).tensors, key=lambda r: (r.file, r.offset)):
                    if record.key in missing:
                        filler.take(record, wanted[record.key])
                missing = {key for key in missing if wanted[key].remaining}
        if missing:
            raise CheckpointError(
                f"`{self.folder}` does not hold all of {sorted(missing)[:3]}; its indexes and its "
                "catalogue of tensors disagree"
            )


@dataclass
class _Wanted:
    """A leaf and how much of it is still to come."""

    leaf: Leaf
    filled: list[Box] = field(default_factory=list)

    @property
    def box(self) -> Box:
        return Box(self.leaf.offsets, self.leaf.shape)

    @property
    def remaining(self) -> int:
        return self.box.volume - sum(box.volume for box in self.filled)

    def claim(self, box: Box) -> None:
        for other in self.filled:
            if other.intersect(box).volume:
                raise CheckpointError(f"`{self.leaf.key}` is stored twice in {box}")
        self.filled.append(box)


class _Filler:
    """Moves verified records into leaves; owns the one buffer that needs."""

    def __init__(self, shards: ShardReader) -> None:
        self._shards = shards
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, record: TensorRecord, wanted: _Wanted) -> None:
        leaf = wanted.leaf
        if (record.dtype, record.global_shape) != (leaf.dtype, leaf.global_shape):
            raise CheckpointError(
                f"a record of `{record.key}` is {record.dtype} of {record.global_shape}, the "
                f"step's catalogue says {leaf.dtype} of {leaf.global_shape}"
            )
        stored = Box(record.offsets, record.shape)
        common = stored.intersect(wanted.box)
        if not common.volume:
            return
        wanted.claim(common)
        begin = stored.contiguous_in(wanted.box)
        local = leaf.local
        if begin is not None and local.device.type == "cpu" and is_plain_memory(local):
            offset = begin * local.element_size()
            self._shards.read(record, byte_view(local)[offset : offset + record.bytes])
            return
        self._copy_part(record, stored, wanted, common)

    def _copy_part(self, record: TensorRecord, stored: Box, wanted: _Wanted, common: Box) -> None:
        if self._buffer.numel() < record.bytes:
            self._buffer = torch.empty(record.bytes, dtype=torch.uint8)
        piece = self._buffer[: record.bytes]
        self._shards.read(record, byte_view(piece))
        values = piece.view(dtype_of(record.dtype)).view(record.shape)
        fill(wanted.leaf.local[common.within(wanted.box)], values[common.within(stored)])
