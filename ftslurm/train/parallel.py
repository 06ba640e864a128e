"""Spreading a model over ranks, the same way for any loop: DDP or FSDP2, warm-up, clipping.

Nothing here knows what the model computes.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ftslurm.train.distributed import Groups
from ftslurm.train.leaves import fill


def wrap(model: nn.Module, *, strategy: str, groups: Groups) -> nn.Module:
    """Put `model` on this rank's device and spread it. Collective.

    fsdp: every member of a ModuleList is a unit of its own, whatever is left of its parameters once
    the lists inside it have been cut up; the rest is one more.
    """
    model = model.to(groups.device)
    if strategy == "ddp":
        devices = [groups.device] if groups.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, process_group=groups.main)
    mesh = init_device_mesh(groups.device.type, (groups.world_size,))
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    # From the inside out: what is a unit already is left out by the one around it. A list itself
    # has no forward, by which a unit gathers its parameters.
    for block in [block for blocks in reversed(lists) for block in blocks]:
        if not isinstance(block, (nn.ModuleList, FSDPModule)):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # in place
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """The module as its author wrote it (FSDP2 changes it in place)."""
    inner = uncompiled(model)
    return inner.module if isinstance(inner, DistributedDataParallel) else model


def uncompiled(model: nn.Module) -> nn.Module:
    """What torch.compile was given, whose type says how it is spread."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def in_ddp(model: nn.Module) -> list[DistributedDataParallel]:
    """All of `model` that is in DDP: it, what was compiled, or parts of it, as of a GAN."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


@contextlib.contextmanager
def gradient_sync(model: nn.Module, *, wanted: bool) -> Iterator[None]:
    """Around the forward and backward of one micro-step: reduce gradients only if `wanted`."""
    model = uncompiled(model)
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
        yield
    elif isinstance(model, DistributedDataParallel) and not wanted:
        with model.no_sync():
            yield
    else:
        yield


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Clip to `max_norm` over the whole model, sharded or not; the norm before. Collective."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def needs_warm_up(model: nn.Module) -> bool:
    """DDP alone rebuilds its gradient buckets after its first backward."""
    return bool(in_ddp(model))


def warm_up(model: nn.Module, forward_backward: Callable[[], None]) -> None:
    """Run one forward and backward whose only trace is DDP's final bucket order.

    A sum over ranks depends on that order in its last bits, so every attempt, the first included,
    has to enter its first step with the same one. Buffers, gradients and all random number
    generators are as before on return.
    """
    values = {buffer: buffer.clone() for buffer in model.buffers()}
    places = [(module._buffers, name) for module in model.modules() for name in module._buffers]
    before = [(buffers, name, buffers[name]) for buffers, name in places]
    with _generators_restored():
        forward_backward()
    # A forward may have put another tensor in a buffer's place, or the first one.
    for buffers, name, buffer in before:
        buffers[name] = buffer
    for buffer, value in values.items():
        fill(buffer, value)
    for parameter in model.parameters():
        parameter.grad = None


@contextlib.contextmanager
def _generators_restored() -> Iterator[None]:
    python: Any = random.getstate()
    numpys: Any = numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):  # the CPU's and these
        yield
    random.setstate(python)
    numpy.random.set_state(numpys)
