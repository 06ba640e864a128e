"""A node that misreads, checked over four ranks: part of checkpoint_ranks.py, which calls `run`.

`ranks`: that module; it knows the rank of this process and makes trainers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch.distributed as dist

from ftslurm.checkpoint import reading, verification
from ftslurm.run.layout import RunLayout
from ftslurm.train import restore
from ftslurm.train.restore import MisreadElsewhereError, MisreadError, StorageError


def run(ranks: ModuleType, folder: Path) -> None:
    with two_nodes(ranks):
        a_node_of_rank_0_that_always_misreads_costs_no_step(ranks, folder / "misread")
        what_a_second_node_cannot_read_now_is_not_rejected(ranks, folder / "second")
        what_two_nodes_find_damaged_is_rejected(ranks, folder / "both")


@contextlib.contextmanager
def two_nodes(ranks: ModuleType) -> Iterator[None]:
    """Ranks 0 and 1 are on n0, the others on n1."""
    here = ranks.GROUPS
    ranks.GROUPS = dataclasses.replace(here, node=f"n{ranks.RANK // 2}")
    try:
        yield
    finally:
        ranks.GROUPS = here


def three_steps(ranks: ModuleType, root: Path):
    run = ranks.Trainer(root, "fsdp", seed=1)
    for step in (1, 2, 3):
        run.train()
        assert run.save(step)
    return run


def ends_with(ranks: ModuleType, kind: type[Exception], said: str, root: Path) -> None:
    try:
        ranks.Trainer(root, "fsdp", seed=2).checkpointer.restore(None)
    except StorageError as error:
        assert type(error) is kind and said in str(error), error
    else:
        raise AssertionError("restored from what was not read")
    layout = RunLayout(root)
    assert {path.name[-1] for path in layout.steps.iterdir()} == {"1", "2", "3"}
    assert not layout.quarantine.exists()


def a_node_of_rank_0_that_always_misreads_costs_no_step(ranks: ModuleType, root: Path) -> None:
    """Wrong bytes of tensors, or of the records; a rank on another node reads what was saved."""
    run = three_steps(ranks, root)
    read_at, read_small = reading.read_at, verification.read_small

    def flipped_part(fd: int, into: memoryview, offset: int) -> int:
        count = read_at(fd, into, offset)
        into[0] ^= 1
        return count

    def flipped(path: Path, **how: object) -> bytes:
        data = bytearray(read_small(path, **how))
        data[-3] ^= 1
        return bytes(data)

    kind = MisreadError if ranks.RANK == 0 else MisreadElsewhereError
    if ranks.RANK < 2:
        reading.read_at = flipped_part
    ends_with(ranks, kind, "step 3 was read wrongly (rank 0 on n0: ", root)
    reading.read_at = read_at
    if ranks.RANK < 2:
        verification.read_small = flipped
    ends_with(ranks, kind, "and rank 2 on n1 finds these files whole", root)
    verification.read_small = read_small
    assert run.checkpointer.restore(None).step == 3


def what_a_second_node_cannot_read_now_is_not_rejected(ranks: ModuleType, root: Path) -> None:
    three_steps(ranks, root)
    if ranks.RANK == 0:
        damage_shard(root, "step-000000000003", rank=0)
    dist.barrier(ranks.GROUPS.control)
    read_at, fill = reading.read_at, restore.StepReader.fill

    def stale(*_: object) -> int:
        raise OSError(116, "Stale file handle")

    def fill_and_break(self: object, *args: object, **how: object) -> None:
        fill(self, *args, **how)  # its own shard it has read by then
        reading.read_at = stale

    if ranks.RANK == 2:
        restore.StepReader.fill = fill_and_break
    ends_with(ranks, StorageError, "rank 2 on n1 cannot read it now (cannot read", root)
    reading.read_at, restore.StepReader.fill = read_at, fill


def what_two_nodes_find_damaged_is_rejected(ranks: ModuleType, root: Path) -> None:
    three_steps(ranks, root)
    steps = RunLayout(root).steps
    if ranks.RANK == 0:
        damage_shard(root, "step-000000000003", rank=0)
        (steps / "step-000000000002" / "manifest.json").unlink()
    dist.barrier(ranks.GROUPS.control)
    assert ranks.Trainer(root, "fsdp", seed=2).checkpointer.restore(None).step == 1
    if ranks.RANK == 0:
        assert {path.name for path in steps.iterdir()} == {"step-000000000001"}


def damage_shard(root: Path, step: str, *, rank: int) -> None:
    shard = RunLayout(root).steps / step / f"shard-{rank:05d}-000.bin"
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(data)
