"""srun of a preflight, for one machine: `python preflight_step.py NODES TASKS ILL...` forks the
ranks of NODES nodes from one process that has torch loaded.

ILL is `NODE=ILLNESS`, see ILLNESSES: what is wrong there. Deadlines are shorter than the real ones.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any, Callable

import torch.distributed  # noqa: F401 - loaded before the fork

from ftslurm.parent import tie_to_parent
from ftslurm.train import distributed, interface, preflight, preflight_parts, preflight_table

LATE = (distributed, interface, preflight_table)
SLOW_S = 0.05
ALONE_S = 4.0


def slow_at_matrices() -> None:
    real = preflight_parts.multiply
    preflight_parts.multiply = lambda device: real(device) * 40


def late_for_everybody() -> None:
    real = preflight_parts.open_group

    def open_group(*given: Any, **named: Any) -> Any:
        group = real(*given, **named)
        return Lazy(group, lambda: time.sleep(SLOW_S))

    preflight_parts.open_group = open_group


class Lazy:
    """A group that does something before each all-reduce."""

    def __init__(self, group: Any, before: Callable[[], None]) -> None:
        self._group, self._before = group, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self._before()
        return self._group.allreduce(tensors)


def forgets_a_bit() -> None:
    real = preflight_parts.fill_and_read

    def flip(blocks: list[torch.Tensor]) -> None:
        blocks[-1][7] ^= 1 << 20

    preflight_parts.fill_and_read = lambda device, until: real(device, until=until, between=flip)


def miscalculates() -> None:
    real = torch.Tensor.__matmul__
    calls = iter(range(10**9))

    def multiply(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        product = real(one, other)
        if next(calls) == 5:
            product[3, 3] += 0.5
        return product

    torch.Tensor.__matmul__ = multiply  # type: ignore[method-assign,assignment]


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def freezes_at_matrices() -> None:
    preflight_parts.multiply = lambda device: freeze()


def freezes_in_a_pair() -> None:
    preflight_parts.all_reduce = lambda group, device: freeze()


def has_no_device() -> None:
    def fail(*given: Any) -> Any:
        raise RuntimeError("CUDA error: device unavailable")

    distributed.take_device = fail


def once(function: Callable[..., Any], before: Callable[[], None]) -> Callable[..., Any]:
    """`function`, the first time after something else."""
    firsts = iter([before])
    nothing: Callable[[], None] = lambda: None  # noqa: E731

    def call(*given: Any) -> Any:
        next(firsts, nothing)()
        return function(*given)

    return call


def is_cold() -> None:
    # Longer than all goes together.
    preflight_parts._matrices = once(preflight_parts._matrices, lambda: time.sleep(5 * ALONE_S))


def comes_back_late() -> None:
    preflight_parts.multiply = once(preflight_parts.multiply, lambda: time.sleep(1.5 * ALONE_S))


def has_a_bug() -> None:
    preflight_parts.multiply = lambda device: {}["there is no such key"]


def is_told_to_leave() -> None:
    preflight_parts.multiply = lambda device: os.kill(os.getpid(), signal.SIGUSR1)


ILLNESSES = {
    function.__name__: function
    for function in (
        slow_at_matrices,
        late_for_everybody,
        forgets_a_bit,
        miscalculates,
        freeze,
        freezes_at_matrices,
        freezes_in_a_pair,
        has_no_device,
        is_cold,
        comes_back_late,
        has_a_bug,
        is_told_to_leave,
    )
}


def hurry() -> None:
    preflight.COMING_S, preflight.MEETING_S, preflight.SLACK_S = 30.0, 6.0, 4.0
    preflight.ALONE_S = dict.fromkeys(preflight.ALONE_S, ALONE_S)
    preflight_parts.CHUNK_S, preflight_parts.CHUNKS = 0.04, 4


def become_rank(rank: int, nodes: int, tasks: int, ill: dict[str, str]) -> None:
    tie_to_parent()  # a frozen one outlives everything but a KILL
    node = f"n{rank // tasks + 1}"
    os.environ.update(
        FTSLURM_TASKS_PER_NODE=str(tasks),
        SLURM_NTASKS=str(nodes * tasks),
        SLURM_PROCID=str(rank),
        SLURM_LOCALID=str(rank % tasks),
        SLURMD_NODENAME=node,
    )
    hurry()
    if node in ill:
        ILLNESSES[ill[node]]()
    preflight.main()


def main(nodes: int, tasks: int, ill: dict[str, str]) -> int:
    pids = []
    for rank in range(nodes * tasks):
        pid = os.fork()
        if pid == 0:
            become_rank(rank, nodes, tasks, ill)
        pids.append(pid)

    def end(number: int, frame: Any) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return max(128 - code if code < 0 else code for code in codes)


if __name__ == "__main__":
    count, tasks_per_node, *illnesses = sys.argv[1:]
    ill_nodes = dict(text.split("=") for text in illnesses)
    sys.exit(main(int(count), int(tasks_per_node), ill_nodes))
