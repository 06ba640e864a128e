"""From a snapshot of live tensors to this rank's share of them in the arena.

Which rank writes what is decided by placement; a piece that several ranks hold is written once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ftslurm.checkpoint.digest import digest
from ftslurm.checkpoint.shard import TensorData
from ftslurm.train.arena import Arena, plan
from ftslurm.train.leaves import Leaf, Shape, byte_view
from ftslurm.train.placement import Item, Rows, spread


@dataclass(frozen=True)
class Part:
    """Rows of a leaf that this rank writes; `source` is live memory."""

    leaf: Leaf
    source: torch.Tensor
    offsets: Shape


def own_parts(leaves: Sequence[Leaf]) -> list[Part]:
    """This rank's share of `leaves`, in the order of their keys."""
    by_holder: dict[tuple[int, int], dict[str, Leaf]] = defaultdict(dict)
    for leaf in leaves:
        if leaf.replica < leaf.num_replicas:
            by_holder[leaf.replica, leaf.num_replicas][leaf.key] = leaf
    parts = []
    for (replica, num_replicas), group in by_holder.items():
        items = [Item(leaf.key, leaf.shape, leaf.local.element_size()) for leaf in group.values()]
        parts += [_part(group[rows.key], rows) for rows in spread(items, num_replicas)[replica]]
    return sorted(parts, key=lambda part: (part.leaf.key, part.offsets))


def needed_bytes(parts: Sequence[Part]) -> int:
    return plan([(part.source.dtype, tuple(part.source.shape)) for part in parts])[1]


def copy_digests(copies: Sequence[Leaf], algorithm: str) -> dict[str, str]:
    """Digest of each whole tensor, to be held against that of other ranks."""
    return {
        leaf.key: digest(algorithm, byte_view(_as_memory(leaf.local)))
        for leaf in copies
        if leaf.local.numel()
    }


def stage(parts: Sequence[Part], arena: Arena) -> list[TensorData]:
    """Copy the parts; the result no longer depends on live memory."""
    copies = arena.stage([part.source for part in parts])
    return [
        TensorData(
            key=part.leaf.key,
            dtype=part.leaf.dtype,
            global_shape=part.leaf.global_shape,
            offsets=part.offsets,
            shape=tuple(copy.shape),
            data=byte_view(copy),
        )
        for part, copy in zip(parts, copies, strict=True)
    ]


def _as_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().cpu().contiguous()


def _part(leaf: Leaf, rows: Rows) -> Part:
    if not leaf.shape:
        return Part(leaf, leaf.local, ())
    source = leaf.local.narrow(0, rows.start, rows.stop - rows.start)
    return Part(leaf, source, (leaf.offsets[0] + rows.start, *leaf.offsets[1:]))
