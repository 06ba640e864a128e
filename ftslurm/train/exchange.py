"""JSON values between ranks over a gloo group. Nothing that arrives is unpickled.

Collective: every rank of the group calls the same function, and one thread at a time per group.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def broadcast_json(value: Any, group: dist.ProcessGroup, *, world_size: int) -> Any:
    """Rank 0's value, on every rank; what the others pass is ignored."""
    if world_size == 1:
        return value
    data = _encode(value) if dist.get_rank() == 0 else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()], dtype=torch.int64)
    dist.broadcast(size, src=0, group=group)
    if dist.get_rank() != 0:
        data = torch.empty(int(size.item()), dtype=torch.uint8)
    dist.broadcast(data, src=0, group=group)
    return _decode(data)


def gather_json(value: Any, group: dist.ProcessGroup, *, world_size: int) -> list[Any]:
    """Everyone's value in order of rank, on rank 0; an empty list on the others."""
    if world_size == 1:
        return [value]
    data = _encode(value)
    size = torch.tensor([data.numel()], dtype=torch.int64)
    sizes = [torch.zeros_like(size) for _ in range(world_size)]
    dist.all_gather(sizes, size, group=group)
    padded = torch.zeros(max(int(s.item()) for s in sizes), dtype=torch.uint8)
    padded[: data.numel()] = data
    if dist.get_rank() != 0:
        dist.gather(padded, dst=0, group=group)
        return []
    rows = [torch.empty_like(padded) for _ in range(world_size)]
    dist.gather(padded, rows, dst=0, group=group)
    return [_decode(row[: int(s.item())]) for row, s in zip(rows, sizes, strict=True)]


def largest(
    values: list[int],
    group: dist.ProcessGroup,
    *,
    world_size: int,
    timeout_s: float | None = None,
) -> list[int]:
    """Element by element the largest over all ranks, on every rank.

    RuntimeError when a rank is gone or, with `timeout_s`, does not come in time; the group is of no
    further use then.
    """
    tensor = torch.tensor(values, dtype=torch.int64)
    if world_size > 1:
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None, "this rank is in the group"
        work.wait() if timeout_s is None else work.wait(timedelta(seconds=timeout_s))
    return [int(value) for value in tensor.tolist()]


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
