"""A model that is compiled, or of several parts in DDP, is seen for what it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from test_state import transfer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ftslurm.errors import CheckpointError
from ftslurm.train.leaves import StateMismatch
from ftslurm.train.parallel import gradient_sync, needs_warm_up, unwrap
from ftslurm.train.state import TrainState

pytestmark = pytest.mark.torch

ONE_RANK = {"rank": 0, "world_size": 2, "device": torch.device("cpu")}


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def snapshot(model: nn.Module) -> tuple[set[str], set[str]]:
    """Keys of the model's tensors, and of those that are compared between ranks."""
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    taken = state.capture(**ONE_RANK)
    keys = {leaf.key for leaf in taken.leaves if leaf.key.startswith("model/")}
    return keys, {leaf.key for leaf in taken.copies}


def test_a_compiled_model_in_ddp_is_one_in_ddp() -> None:
    model = make()
    compiled = torch.compile(model, backend="eager")
    assert needs_warm_up(compiled)
    assert unwrap(compiled) is model.module
    assert snapshot(compiled) == snapshot(model) and not snapshot(model)[1]
    with gradient_sync(compiled, wanted=False):
        assert not model.require_backward_grad_sync


def test_parts_in_ddp_need_a_warm_up_and_have_the_buffers_of_the_first_rank() -> None:
    parts = nn.ModuleDict({"one": make(), "other": make()})
    parts.register_buffer("own", torch.zeros(3))
    assert needs_warm_up(parts)
    assert snapshot(parts)[1] == {"model/own"}
    assert not needs_warm_up(nn.ModuleDict({"one": nn.Linear(2, 2)}))


class Holder:
    """A user's object; `values` may still be empty."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.values = state


@pytest.fixture
def sharded() -> nn.Module:
    model = nn.Linear(4, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def state_with(model: nn.Module, value: object) -> TrainState:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainState(model, optimizer, extra={"more": value})  # type: ignore[dict-item]


def test_sharded_tensors_of_an_object_come_back_into_those_it_has(sharded: nn.Module) -> None:
    kept = {name: p.detach() * 2 for name, p in sharded.named_parameters()}
    empty = {name: torch.zeros_like(value) for name, value in kept.items()}
    target = Holder(empty)
    transfer(state_with(sharded, Holder(kept)), state_with(sharded, target))
    assert all(isinstance(value, DTensor) for value in target.values.values())
    assert all(torch.equal(target.values[k].to_local(), kept[k].to_local()) for k in kept)
    with pytest.raises(StateMismatch, match="`extra/more/weight` was spread over ranks"):
        transfer(state_with(sharded, Holder(kept)), state_with(sharded, Holder({})))


class Unready(Holder):
    """Without state until it is loaded, or its first step has come."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        if not self.values:
            raise AttributeError("no averages before the first step")
        return super().state_dict()


def test_an_object_that_has_no_state_yet_is_given_what_was_saved(sharded: nn.Module) -> None:
    kept, target = {"mean": torch.arange(3.0)}, Unready({})
    transfer(state_with(sharded, Holder(kept)), state_with(sharded, target))
    assert torch.equal(target.values["mean"], kept["mean"])
    kept = {name: p.detach() * 2 for name, p in sharded.named_parameters()}
    with pytest.raises(StateMismatch, match="`extra/more/weight` was spread over ranks"):
        transfer(state_with(sharded, Holder(kept)), state_with(sharded, Unready({})))


def test_a_second_optimizer_of_sharded_parameters_is_refused_at_the_first_save(
    sharded: nn.Module,
) -> None:
    state = state_with(sharded, torch.optim.AdamW(sharded.parameters()))
    with pytest.raises(CheckpointError, match="`extra/more` is an optimizer of sharded"):
        state.capture(rank=0, world_size=1, device=torch.device("cpu"))
