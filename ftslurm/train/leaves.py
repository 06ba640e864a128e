"""Tensors as a checkpoint sees them: key, memory of this rank, place in the global tensor.

A leaf never owns or changes a value; its `local` is the live memory. Tensors whose bytes this
module cannot name exactly (wrapper subclasses, sparse, meta, strided or partial placements) are
refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ftslurm.errors import CheckpointError

Shape = tuple[int, ...]


class StateMismatch(CheckpointError):
    """Checkpoint and program do not describe the same state; no other step would fit better."""


@dataclass(frozen=True)
class Leaf:
    """One tensor of the training state on this rank."""

    key: str
    local: torch.Tensor
    """This rank's piece: live memory, detached, any device, any strides."""
    global_shape: Shape
    offsets: Shape
    replica: int
    """Which of the ranks that hold the same piece this one is."""
    num_replicas: int
    """How many of them share the writing: 1 for a piece only this rank holds, the world size for a
    replicated tensor. A rank whose `replica` is not below it writes nothing."""

    @property
    def dtype(self) -> str:
        return dtype_name(self.local.dtype)

    @property
    def shape(self) -> Shape:
        return tuple(self.local.shape)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`, `bfloat16`, ...: torch's name without the prefix."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"`{name}` is no dtype of torch {torch.__version__}")
    return dtype


def replicated(key: str, tensor: torch.Tensor, *, rank: int, world_size: int) -> Leaf:
    """A leaf of a plain tensor that every rank holds whole and equal."""
    check_plain(key, tensor)
    local = tensor.detach()
    shape = tuple(local.shape)
    return Leaf(key, local, shape, (0,) * len(shape), rank, world_size)


def private(key: str, tensor: torch.Tensor) -> Leaf:
    """A leaf of a plain tensor that only this rank holds; its key names the rank."""
    return replicated(key, tensor, rank=0, world_size=1)


def describe(key: str, tensor: torch.Tensor, *, rank: int, world_size: int) -> Leaf:
    """The leaf of a parameter, a buffer or a tensor of optimizer state."""
    if not isinstance(tensor, DTensor):
        return replicated(key, tensor, rank=rank, world_size=world_size)
    mesh = tensor.device_mesh
    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate):
            raise CheckpointError(
                f"`{key}` is placed as {placement}; only Shard and Replicate can be saved exactly"
            )
    if mesh.size() != world_size:
        raise CheckpointError(
            f"`{key}` lies on {mesh.size()} of {world_size} ranks; meshes that cover only some "
            "ranks cannot be saved"
        )
    with torch.no_grad():
        local = tensor.to_local()
    check_plain(key, local)
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    assert tuple(shape) == tuple(local.shape), f"{key}: torch says {shape}, holds {local.shape}"
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    replica, num_replicas = 0, 1
    for index, size, placement in zip(coordinate, mesh.shape, tensor.placements, strict=True):
        if type(placement) is Replicate:
            replica, num_replicas = replica * size + index, num_replicas * size
    return Leaf(key, local, tuple(tensor.shape), tuple(offsets), replica, num_replicas)


def check_plain(key: str, tensor: torch.Tensor) -> None:
    """Refuse tensors that are more than their strided bytes (wrappers have data_ptr() == 0)."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        kind = type(tensor)
        raise CheckpointError(
            f"`{key}` is a {kind.__module__}.{kind.__qualname__}; tensor subclasses other than "
            "DTensor cannot be saved exactly"
        )
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise CheckpointError(
            f"`{key}` is {tensor.layout} on {tensor.device}; only strided tensors with memory of "
            "their own can be saved"
        )


def size_bytes(dtype: torch.dtype, shape: Shape) -> int:
    return math.prod(shape) * dtype.itemsize


@torch.no_grad()
def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source)`, also where elements of `target` share memory, as expand() makes them;
    StateMismatch when they would have to differ."""
    for dim, (length, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if length > 1 and stride == 0:
            first = source.narrow(dim, 0, 1)
            if not _is_same(source, first.expand_as(source)):
                raise StateMismatch(
                    f"a tensor of shape {tuple(target.shape)} has one element for all places along "
                    f"dimension {dim} (expand), where the checkpoint has different ones"
                )
            target, source = target.narrow(dim, 0, 1), first
    target.copy_(source)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, on any device."""
    return torch.equal(*(each.contiguous().view(torch.uint8) for each in (one, other)))


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether its bytes are its values in order: contiguous, and no view that conjugates or negates
    what is read through it."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor with at least one element, writable, not copied."""
    # .numpy() refuses bfloat16 and float8, and a 0-dim tensor cannot be viewed as another size.
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    assert flat.data_ptr() == tensor.data_ptr(), "not contiguous"
    view: Any = flat.numpy()
    return memoryview(view).cast("B")
