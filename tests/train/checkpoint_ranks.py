"""Multi-rank checkpoint checks: python checkpoint_ranks.py FOLDER SCENARIO:WORLD_SIZE...

Imports torch once (4 s a process) and forks the ranks of one scenario after the other from there;
prints a line with their exit codes for each. Started by test_checkpointer_ranks.py.
"""

from __future__ import annotations

import os
import random
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import misread_checks
import numpy as np
import torch
import torch.distributed as dist
from checkpoint_model import Averages, Counted, Model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ftslurm import files
from ftslurm.checkpoint import reading
from ftslurm.errors import CheckpointError
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import CheckpointSpec
from ftslurm.train.checkpointer import Checkpointer
from ftslurm.train.distributed import Groups
from ftslurm.train.restore import MisreadElsewhereError, MisreadError, StorageError
from ftslurm.train.rng import seed_generators
from ftslurm.train.save_facts import SaveFacts
from ftslurm.train.state import TrainState

RANK, WORLD_SIZE = 0, 1
GROUPS: Groups
STRATEGIES = ("ddp", "fsdp")
DEADLINE_S = 120.0

files.VIEW_LAG_S = 0.5  # what a check has broken is not mended by waiting


class Trainer:
    """One rank of a run."""

    def __init__(self, root: Path, strategy: str, *, seed: int, extra=None, **spec) -> None:
        torch.manual_seed(seed)
        root.mkdir(exist_ok=True)
        model = Model()
        if strategy == "ddp":
            self.wrapped: nn.Module = DistributedDataParallel(model, find_unused_parameters=True)
        else:
            shape = (WORLD_SIZE,) if strategy == "fsdp" else (2, WORLD_SIZE // 2)
            names = ("replicate", "shard")[-len(shape) :]
            fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
            self.wrapped = model
        self.model, self.layout = model, RunLayout(root)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [model.embedding.weight, model.unused], "weight_decay": 0.0},
                {"params": [*model.block.parameters(), *model.narrow.parameters(), model.frozen]},
            ],
            lr=1e-2,
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.extra = Counted(seed) if extra is None else Counted(extra)
        self.averages = Averages(model)
        self.events: list[tuple[str, dict]] = []
        self.checkpointer = Checkpointer(
            layout=self.layout,
            spec=CheckpointSpec(**spec),
            facts=SaveFacts(
                "run", WORLD_SIZE, {"dp": WORLD_SIZE}, 8, 3, torch.__version__, *[None] * 5
            ),
            groups=GROUPS,
            state=TrainState(
                self.wrapped,
                self.optimizer,
                scheduler=self.scheduler,
                extra={"counted": self.extra, "averages": self.averages},
            ),
            attempt=1,
            on_event=lambda kind, facts: self.events.append((kind, facts)),
        )

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.wrapped(torch.arange(50) * (RANK + 3) % 300).backward()
            self.optimizer.step()
            self.scheduler.step()

    def save(self, step: int) -> bool:
        position = {"epoch": 0, "samples": 8 * step, "tokens": 64 * step}
        return self.checkpointer.emergency_save(step, position, deadline_s=DEADLINE_S)

    def fail_to_save(self, step: int) -> dict:
        self.checkpointer.save(step, {"epoch": 0, "samples": 0, "tokens": 0})
        self.checkpointer.close(timeout_s=DEADLINE_S)
        return [facts for kind, facts in self.events if kind == "save_failed"][-1]

    def whole(self) -> dict[str, torch.Tensor]:
        """Every tensor of model and optimizer in full; collective."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        found = {**named, **dict(self.model.named_buffers())}
        found.update({f"average {name}": v for name, v in self.averages.values.items()})
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}.{key}"] = value
        return {
            key: value.detach().full_tensor()
            if isinstance(value, DTensor)
            else value.detach().clone()
            for key, value in found.items()
        }

    def settings(self) -> list[dict]:
        groups = self.optimizer.param_groups
        options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        return [*options, self.scheduler.state_dict(), {"extra": self.extra.value}]


def check_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys(), set(one) ^ set(other)
    for key, value in one.items():
        assert value.dtype == other[key].dtype, key
        assert torch.equal(value, other[key]), key


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def save_and_restore(folder: Path) -> None:
    """Each strategy saves; both restore it, equal to the bit; then rank-scoped random numbers."""
    for strategy in STRATEGIES:
        first = Trainer(folder / strategy, strategy, seed=1)
        first.train(2)
        assert first.model.unused not in first.optimizer.state
        seed_generators(seed=9, step=9, rank=RANK)
        expected, settings = first.whole(), first.settings()
        assert first.checkpointer.save(2, {"epoch": 0, "samples": 16, "tokens": 128})
        numbers = draw()
        first.train(1)  # changes everything while the save is in flight
        first.checkpointer.close(timeout_s=DEADLINE_S)
        assert first.checkpointer.committed_step == 2, first.events
        if RANK == 0:
            torch.save((expected, settings), folder / f"{strategy}.pt")
        for reader in STRATEGIES:
            second = Trainer(folder / strategy, reader, seed=2)
            if reader == "fsdp":
                second.train(1)  # state that the checkpoint replaces, or takes away
            restored = second.checkpointer.restore(None)
            assert restored.step == 2 and restored.generators_continue
            assert draw() == numbers
            check_equal(expected, second.whole())
            assert second.settings() == settings
            assert second.model.head.weight is second.model.embedding.weight
            assert second.model.unused not in second.optimizer.state
            assert second.model.frozen not in second.optimizer.state


def pieces_that_two_ranks_hold_are_written_once(folder: Path) -> None:
    """Sharded over two ranks, replicated over two (HSDP)."""
    first = Trainer(folder / "hsdp", "hsdp", seed=1)
    first.train()
    assert first.save(1)
    for reader in ("hsdp", "ddp"):
        second = Trainer(folder / "hsdp", reader, seed=2)
        assert second.checkpointer.restore(None).step == 1
        check_equal(first.whole(), second.whole())


def shards_are_shared_out(folder: Path) -> None:
    """Replicated state is spread over the ranks instead of written by one of them."""
    sizes = [
        (folder / "ddp/checkpoints/steps/step-000000000002" / f"shard-{rank:05d}-000.bin")
        .stat()
        .st_size
        for rank in range(WORLD_SIZE)
    ]
    assert max(sizes) <= 1.3 * sum(sizes) / len(sizes), sizes


def failures_are_shared(folder: Path) -> None:
    """What one rank alone cannot write fails the save on all; the third in a row ends all together.
    What is closed to all ranks never ends them."""
    run = Trainer(folder / "failing", "ddp", seed=1, when_busy="skip")
    run.train()
    assert run.save(1)
    os.environ["FTSLURM_FAULTS"] = "eacces@persist:times=3"
    assert [run.fail_to_save(2)["in_a_row"] for _ in range(3)] == [1, 2, 3] and run.save(2)
    breaks = [("eio@persist:rank=2", 2), ("eacces@persist:rank=1", 1), ("erofs@make_folder", 0)]
    for count, (fault, rank) in enumerate(breaks, 1):
        os.environ["FTSLURM_FAULTS"] = fault
        facts = run.fail_to_save(2 + count)
        assert (facts["rank"], facts["in_a_row"], facts["step"]) == (rank, count, 2 + count), facts
        assert run.checkpointer.committed_step == 2
    try:
        run.checkpointer.save(6, {"epoch": 0, "samples": 0, "tokens": 0})
    except CheckpointError as error:
        assert "3 saves in a row" in str(error)
    else:
        raise AssertionError("the fourth save was tried")
    del os.environ["FTSLURM_FAULTS"]
    dist.barrier(GROUPS.control)
    assert {path.name[-1] for path in run.layout.steps.iterdir()} == {"1", "2"}


def differing_copies_are_refused(folder: Path) -> None:
    """State that is said to be the same everywhere and is not would lose all ranks' but one."""
    run = Trainer(folder / "differing", "ddp", seed=1, extra=int(RANK == 1))
    run.train()
    facts = run.fail_to_save(1)
    assert facts["rank"] == 1 and "extra/counted" in facts["reason"], facts


def damage_seen_by_one_rank_moves_all_back(folder: Path) -> None:
    """Rank 1's own shard is damaged: rank 0, which never reads it, falls back as well."""
    run = Trainer(folder / "damaged", "fsdp", seed=1)
    run.train()
    assert run.save(1)
    expected = run.whole()
    run.train()
    assert run.save(2)
    if RANK == 0:
        misread_checks.damage_shard(run.layout.root, "step-000000000002", rank=1)
    dist.barrier(GROUPS.control)
    second = Trainer(folder / "damaged", "fsdp", seed=2)
    assert second.checkpointer.restore(None).step == 1
    check_equal(expected, second.whole())


def what_one_rank_reads_not_or_wrongly_ends_all_and_rejects_nothing(folder: Path) -> None:
    run = Trainer(folder / "unread", "fsdp", seed=1)
    run.train()
    assert run.save(1)
    read_at = reading.read_at

    def stale(*_: object) -> int:
        raise OSError(116, "Stale file handle")

    def flipped(fd: int, into: memoryview, offset: int) -> int:
        count = read_at(fd, into, offset)
        into[0] ^= 1
        return count

    wrong = MisreadError if RANK == 2 else MisreadElsewhereError
    for broken, kind, said in ((stale, StorageError, "Stale"), (flipped, wrong, "digest")):
        reading.read_at = broken if RANK == 2 else read_at
        try:
            Trainer(folder / "unread", "fsdp", seed=2).checkpointer.restore(None)
        except StorageError as error:
            assert type(error) is kind and "rank 2" in str(error) and said in str(error), error
        else:
            raise AssertionError("restored from what rank 2 did not read")
        reading.read_at = read_at
    assert run.checkpointer.restore(None).step == 1


def a_rank_without_memory_for_its_snapshot_fails_the_save_on_all(folder: Path) -> None:
    run = Trainer(folder / "memory", "ddp", seed=1)
    run.train()
    if RANK == 2:
        run.checkpointer._arena.reserve = lambda count: torch.empty(count << 40)
    assert "rank 2 has no host memory" in run.fail_to_save(1)["reason"]
    run.checkpointer._arena.__dict__.pop("reserve", None)
    assert run.save(2)


def a_peer_that_does_not_come_cannot_hold_an_emergency_save(folder: Path) -> None:
    """Rank 1 is late; the others leave when their deadline has passed."""
    run = Trainer(folder / "late", "ddp", seed=1)
    run.train()
    began_at = time.monotonic()
    left = [folder / f"left-{rank}" for rank in range(WORLD_SIZE) if rank != 1]
    if RANK == 1:
        while not all(path.exists() for path in left):
            assert time.monotonic() - began_at < DEADLINE_S
            time.sleep(0.05)
    else:
        position = {"epoch": 0, "samples": 0, "tokens": 0}
        assert not run.checkpointer.emergency_save(1, position, deadline_s=0.5)
        assert time.monotonic() - began_at < DEADLINE_S / 2
        assert run.events[-1][0] == "save_abandoned", run.events
        (folder / f"left-{RANK}").touch()


def a_lost_peer_ends_the_save(folder: Path) -> None:
    """The last check: rank 3 dies while it writes; the others' save ends with an error."""
    run = Trainer(folder / "lost", "ddp", seed=1)
    run.train()
    os.environ["FTSLURM_FAULTS"] = "exit@persist:rank=3"
    assert run.checkpointer.save(1, {"epoch": 0, "samples": 0, "tokens": 0})
    began_at = time.monotonic()
    run.checkpointer.close(timeout_s=DEADLINE_S)
    assert time.monotonic() - began_at < DEADLINE_S / 2
    assert run.checkpointer.failed_saves == 1, run.events
    assert run.checkpointer.committed_step is None


def four(folder: Path) -> None:
    save_and_restore(folder)
    shards_are_shared_out(folder)
    pieces_that_two_ranks_hold_are_written_once(folder)
    failures_are_shared(folder)
    differing_copies_are_refused(folder)
    damage_seen_by_one_rank_moves_all_back(folder)
    what_one_rank_reads_not_or_wrongly_ends_all_and_rejects_nothing(folder)
    misread_checks.run(sys.modules[__name__], folder)
    a_rank_without_memory_for_its_snapshot_fails_the_save_on_all(folder)
    a_lost_peer_ends_the_save(folder)


def late(folder: Path) -> None:
    a_peer_that_does_not_come_cannot_hold_an_emergency_save(folder)


def resize(folder: Path) -> None:
    """Restore what another world size saved, by both strategies; save again for the next."""
    for strategy in STRATEGIES:
        expected, settings = torch.load(folder / f"{strategy}.pt", weights_only=False)
        for reader in STRATEGIES:
            run = Trainer(folder / strategy, reader, seed=2)
            restored = run.checkpointer.restore(None)
            assert not restored.generators_continue
            check_equal(expected, run.whole())
            assert run.settings() == settings
            numbers: list = [None] * WORLD_SIZE
            dist.all_gather_object(numbers, draw())
            assert len({tuple(row) for row in numbers}) == WORLD_SIZE
            seed_generators(seed=3, step=restored.step, rank=RANK)
            assert draw() == numbers[RANK]
        assert run.save(restored.step + 1)
        run.checkpointer.close(timeout_s=DEADLINE_S)


def open_groups(store: Path) -> Groups:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=RANK,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    world = dist.group.WORLD
    control, checkpoint = (dist.new_group(backend="gloo") for _ in range(2))
    return Groups(RANK, WORLD_SIZE, RANK, torch.device("cpu"), world, control, checkpoint)


def run_rank(scenario: str, folder: Path, rank: int, world_size: int) -> None:
    """Be one rank; never returns. A lost peer leaves groups that cannot be closed in order."""
    global RANK, WORLD_SIZE, GROUPS  # noqa: PLW0603 - a process is one rank
    RANK, WORLD_SIZE = rank, world_size
    code = 1
    try:
        GROUPS = open_groups(folder / f"store-{scenario}-{world_size}")
        SCENARIOS[scenario](folder)
        code = 0
    except Exception:  # noqa: BLE001 - into the log of the test
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(scenario: str, folder: Path, world_size: int) -> list[int]:
    """Exit codes by rank."""
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            run_rank(scenario, folder, rank, world_size)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


SCENARIOS = {"four": four, "resize": resize, "late": late}

if __name__ == "__main__":
    for order in sys.argv[2:]:
        name, _, size = order.partition(":")
        print(f"{order} {run(name, Path(sys.argv[1]), int(size))}", flush=True)
