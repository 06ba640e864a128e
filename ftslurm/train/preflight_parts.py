"""What a preflight does: fill memory and read it back, multiply matrices, exchange within a node,
all-reduce between two nodes.

Each part takes a device and does the same on a GPU (nccl) and on a CPU (gloo), there with less of
it. What comes back is checked bit by bit: `Wrong` says that it is not what it was. A part may hang
with its device: whoever calls it sets the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

BLOCK_BYTES = 256 << 20
"""Memory is had, filled and read in pieces: what is free may lie scattered."""
FREE_SHARE = 0.9
"""Of a GPU's free memory."""
CPU_BYTES = 32 << 20

CHUNK_S = 0.2
"""Of multiplying, timed as one: longer than the period of a CPU quota (0.1 s), which a process that
was idle before can compute through unthrottled."""
CHUNKS = 3

EXCHANGES = 5
"""Timed one by one: the best of them counts."""


class Wrong(Exception):
    """Bits came back other than they were: the end of a sentence on whom they came back to."""


# Address by address, and each bit once as 0 and once as 1.
_SALTS = (0x5A5A5A5A, 0x25A5A5A5)


def fill_and_read(
    device: torch.device,
    *,
    until: float,
    between: Callable[[list[torch.Tensor]], None] = lambda blocks: None,
) -> int:
    """Bytes that held what was written to them; `until` (monotonic) no further pattern is begun.
    `between` gets the filled memory before it is read."""
    blocks = _take_memory(device)
    if not blocks:
        return 0
    base = torch.arange(blocks[0].numel(), dtype=torch.int32, device=device)
    for salt in (_SALTS[0], ~_SALTS[0], _SALTS[1], ~_SALTS[1]):
        if time.monotonic() >= until:
            break
        for number, block in enumerate(blocks):
            torch.bitwise_xor(base, salt ^ number, out=block)
        between(blocks)
        for number, block in enumerate(blocks):
            block.bitwise_xor_(base).bitwise_xor_(salt ^ number)
            count = int(torch.count_nonzero(block))
            if count:
                raise Wrong(f"read {count} words of memory other than it had written them")
    return sum(block.nbytes for block in blocks)


def _take_memory(device: torch.device) -> list[torch.Tensor]:
    block_bytes, count = CPU_BYTES // 2, 2
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        # `base` and what count_nonzero needs are two blocks more.
        block_bytes, count = BLOCK_BYTES, max(1, int(free_bytes * FREE_SHARE) // BLOCK_BYTES - 2)
    blocks: list[torch.Tensor] = []
    try:
        for _ in range(count):
            blocks.append(torch.empty(block_bytes // 4, dtype=torch.int32, device=device))
    except torch.OutOfMemoryError:  # ranks that share a GPU saw the same memory free
        del blocks[len(blocks) // 2 :]
    return blocks


def wake(device: torch.device) -> None:
    """What only the first use of a device costs: CUDA starts, and reads its kernels from where
    torch lies, which on a cold node may take longer than all that is timed."""
    left, right = _matrices(device)
    torch.equal(left @ right, left)
    _await(device)


def multiply(device: torch.device) -> float:
    """Seconds of one multiplication, of the best of some chunks; the same bits each time."""
    left, right = _matrices(device)
    first = left @ right
    _await(device)
    best_s = float("inf")
    for _ in range(CHUNKS):
        began, count = time.perf_counter(), 0
        while (spent_s := time.perf_counter() - began) < CHUNK_S:
            if not torch.equal(left @ right, first):  # waits for the device
                raise Wrong("got another product of the same matrices")
            count += 1
        best_s = min(best_s, spent_s / count)
    return best_s


def _matrices(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    seeded = torch.Generator(device).manual_seed(0)
    left = torch.randn(size, size, generator=seeded, device=device, dtype=dtype)
    right = torch.randn(size, size, generator=seeded, device=device, dtype=dtype)
    return left, right


def open_group(
    store: Store, rank: int, size: int, device: torch.device, *, timeout_s: float
) -> Any:
    """A process group of its own, not the process's one: it may never come back, and the next part
    must not care."""
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def all_reduce(group: Any, device: torch.device) -> float:
    """Seconds of one sum over the group, the best of some; checked to the last bit."""
    count = (64 << 20) if device.type == "cuda" else (1 << 18)
    pattern = torch.arange(count, dtype=torch.int32, device=device).remainder_(251).float()
    size, rank = group.size(), group.rank()
    # Whole numbers below 2**24: a float holds their sum exactly.
    expected = pattern * size + size * (size - 1) // 2

    def once() -> tuple[torch.Tensor, float]:
        values = pattern + rank
        _await(device)
        began = time.perf_counter()
        group.allreduce([values]).wait()
        _await(device)
        return values, time.perf_counter() - began

    return _best(once, expected, "got another sum")


def exchange(group: Any, device: torch.device) -> float:
    """Seconds in which each gave each its part, the best of some; checked to the last bit."""
    size, rank = group.size(), group.rank()
    each = ((256 << 20) if device.type == "cuda" else (1 << 20)) // size
    parts = torch.arange(size, dtype=torch.int32, device=device).repeat_interleave(each)
    outgoing, expected = parts + rank * size, parts * size + rank

    def once() -> tuple[torch.Tensor, float]:
        incoming = torch.zeros_like(outgoing)
        _await(device)
        began = time.perf_counter()
        group.alltoall_base(incoming, outgoing, _even(each, size), _even(each, size)).wait()
        _await(device)
        return incoming, time.perf_counter() - began

    return _best(once, expected, "got something else than its ranks had sent each other")


def _even(each: int, size: int) -> Sequence[int]:
    return [each] * size


def _best(
    once: Callable[[], tuple[torch.Tensor, float]], expected: torch.Tensor, complaint: str
) -> float:
    once()  # connections are made, pages are touched
    best_s = float("inf")
    for _ in range(EXCHANGES):
        values, seconds = once()
        best_s = min(best_s, seconds)
        if not torch.equal(values, expected):
            raise Wrong(complaint)
    return best_s


def _await(device: torch.device) -> None:
    if device.type == "cuda":
        # Not the whole device: a collective that was given up may be on another stream for ever.
        torch.cuda.current_stream(device).synchronize()
