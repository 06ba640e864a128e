"""Buffers that a forward makes come back into a program that has none of them yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpointer import Trainer, damage
from test_state import transfer
from torch import nn

from ftslurm.train.leaves import StateMismatch
from ftslurm.train.state import TrainState

pytestmark = pytest.mark.torch


class Growing(nn.Module):
    """A table that grows with its input, a mask that the first forward makes, a mean likewise."""

    def __init__(self, *, persistent: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.register_buffer("table", torch.arange(2.0), persistent=persistent)
        self.register_buffer("mask", None, persistent=False)
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > len(self.table):
            self.table = torch.arange(float(len(x)), dtype=torch.float64)
        if self.mask is None:
            self.mask = torch.ones(len(x), dtype=torch.bool)
        self.mean = x.mean(0) if self.mean is None else 0.5 * self.mean
        return self.inner(x).sum()


def state(model: nn.Module) -> TrainState:
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_buffers_that_a_forward_has_made_come_back() -> None:
    model, fresh = Growing(), Growing()
    model(torch.ones(5, 1))
    model(torch.ones(3, 1))
    transfer(state(model), state(fresh))
    saved, restored = dict(model.named_buffers()), dict(fresh.named_buffers())
    assert saved.keys() == restored.keys() == {"table", "mask", "mean"}
    assert all(torch.equal(restored[name], tensor) for name, tensor in saved.items())
    assert restored["table"].dtype == torch.float64
    assert "mask" not in fresh.state_dict() and "mean" in fresh.state_dict()


def test_a_mask_that_two_modules_share_stays_shared() -> None:
    model, fresh = nn.ModuleList([Growing(), Growing()]), nn.ModuleList([Growing(), Growing()])
    model[1].mask = model[0].mask = torch.ones(4, dtype=torch.bool)
    transfer(state(model), state(fresh))
    assert fresh[1].mask is fresh[0].mask and torch.equal(fresh[0].mask, model[0].mask)


def test_a_buffer_that_the_model_saves_itself_has_one_shape() -> None:
    model, fresh = Growing(persistent=True), Growing(persistent=True)
    model(torch.ones(5, 1))
    with pytest.raises(StateMismatch, match=r"`model/table`: expected float64 of shape \(5,\)"):
        transfer(state(model), state(fresh))


def test_room_for_a_step_that_is_set_aside_is_taken_back(tmp_path: Path) -> None:
    """An older step, from before the first forward, has no such buffers."""

    def growing(**options: Any) -> Trainer:
        trainer = Trainer(tmp_path, **options)
        trainer.model[0].add_module("growing", Growing())  # which no forward of its own calls
        return trainer

    first, second = growing(), growing(seed=1, attempt=2)
    assert first.save(1)
    first.model[0].growing(torch.ones(5, 1))
    assert first.save(2)
    damage(tmp_path / "checkpoints" / "steps" / "step-000000000002")
    assert second.checkpointer.restore(None).step == 1
    restored = second.model[0].growing
    assert restored.mask is None and restored.mean is None
    assert torch.equal(restored.table, torch.arange(2.0))
    restored(torch.ones(5, 1))
    assert second.save(3)
