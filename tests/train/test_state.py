"""Training state as leaves and JSON, and back in place: one rank, no files."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from ftslurm.checkpoint import objects
from ftslurm.errors import CheckpointError
from ftslurm.train import rng
from ftslurm.train.leaves import StateMismatch, byte_view, describe
from ftslurm.train.state import TrainState
from ftslurm.train.tree import flatten, unflatten

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
ONE_RANK = {"rank": 0, "world_size": 1, "device": CPU}


class Tied(nn.Module):
    """Tied embedding and head, a buffer that state_dict() leaves out, a 0-dim one, bf16, frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.small = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))
        self.register_buffer("cache", torch.randn(2, 2).t(), persistent=False)

    def forward(self, tokens):
        return self.head(self.norm(self.embedding(tokens))).sum() + self.small.float().sum()


def trained(steps: int = 2, seed: int = 0, **kwargs):
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **kwargs)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3])
    for step in range(steps):
        model(torch.arange(8) * (step + 1) % 8).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, optimizer, scheduler


def transfer(source: TrainState, target: TrainState) -> None:
    """What save and restore do, without files: JSON through JSON's own form, bytes by key."""
    snapshot = source.capture(**ONE_RANK)
    content = {leaf.key: leaf.local.clone() for leaf in snapshot.leaves}
    shared = objects.decode(objects.encode(snapshot.shared, key="shared"), where="shared")
    restoration = target.prepare(
        shared, snapshot.private, snapshot.aliases, **ONE_RANK, fresh_seed=pytest.fail
    )
    for leaf in restoration.leaves:
        leaf.local.copy_(content[leaf.key])
    restoration.adopt()


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and bytes(byte_view(one.contiguous())) == bytes(byte_view(other.contiguous()))
    )


def test_all_state_comes_back_bit_for_bit_and_in_place():
    model, optimizer, scheduler = trained()
    fresh, fresh_optimizer, fresh_scheduler = trained(steps=0, seed=1)
    objects_before = {id(p) for p in fresh.parameters()} | {id(b) for b in fresh.buffers()}
    transfer(
        TrainState(model, optimizer, scheduler=scheduler),
        TrainState(fresh, fresh_optimizer, scheduler=fresh_scheduler),
    )
    assert {id(p) for p in fresh.parameters()} | {id(b) for b in fresh.buffers()} == objects_before
    assert fresh.head.weight is fresh.embedding.weight
    for (name, one), (_, other) in zip(model.named_parameters(), fresh.named_parameters()):
        assert equal(one, other), name
    for (name, one), (_, other) in zip(model.named_buffers(), fresh.named_buffers()):
        assert equal(one, other), name
    for one, other in zip(model.parameters(), fresh.parameters()):
        state, restored = optimizer.state.get(one), fresh_optimizer.state.get(other)
        assert (state is None) == (restored is None)
        assert all(equal(state[key], restored[key]) for key in state or {})
    assert scheduler.state_dict() == fresh_scheduler.state_dict()
    assert type(fresh_scheduler.milestones) is Counter
    options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert options == [
        {k: v for k, v in g.items() if k != "params"} for g in fresh_optimizer.param_groups
    ]


def test_a_resumed_run_continues_as_the_other_would_have():
    model, optimizer, scheduler = trained()
    fresh, fresh_optimizer, fresh_scheduler = trained(steps=5, seed=1)
    transfer(
        TrainState(model, optimizer, scheduler=scheduler),
        TrainState(fresh, fresh_optimizer, scheduler=fresh_scheduler),
    )
    for one_model, one_optimizer in ((model, optimizer), (fresh, fresh_optimizer)):
        one_optimizer.zero_grad()
        one_model(torch.arange(8)).backward()
        one_optimizer.step()
    assert all(equal(a, b) for a, b in zip(model.parameters(), fresh.parameters()))


def test_reading_neither_steps_the_optimizer_nor_gives_it_state():
    model, optimizer, _ = trained(steps=0)
    TrainState(model, optimizer).capture(**ONE_RANK)
    assert not optimizer.state
    model, optimizer, _ = trained(steps=1)
    TrainState(model, optimizer).capture(**ONE_RANK)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_a_parameter_saved_without_state_is_restored_without_state():
    model, optimizer, _ = trained()
    assert model.unused not in optimizer.state
    fresh, fresh_optimizer, _ = trained(seed=1)
    fresh_optimizer.state[fresh.unused] = {"step": torch.tensor(7.0)}
    transfer(TrainState(model, optimizer), TrainState(fresh, fresh_optimizer))
    assert fresh.unused not in fresh_optimizer.state
    assert fresh.frozen not in fresh_optimizer.state


def test_steps_of_all_parameters_share_one_record():
    model, optimizer, _ = trained()
    keys = [leaf.key for leaf in TrainState(model, optimizer).capture(**ONE_RANK).leaves]
    assert [key for key in keys if "step" in key or "packed" in key] == [
        "optimizer/packed/cpu.float32"
    ]


def test_a_tensor_learning_rate_is_restored_into_the_same_tensor():
    source = trained(steps=1)[:2]
    target = trained(steps=0)[:2]
    for _, optimizer in (source, target):
        optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    source[1].param_groups[0]["lr"].fill_(0.125)
    kept = target[1].param_groups[0]["lr"]
    transfer(TrainState(*source), TrainState(*target))
    assert target[1].param_groups[0]["lr"] is kept
    assert float(kept) == 0.125


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.NAdam, torch.optim.SGD])
def test_other_optimizers_come_back(kind):
    def build(seed: int):
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        return model, kind(model.parameters(), lr=0.1, **options)

    model, optimizer = build(0)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    fresh, fresh_optimizer = build(1)
    transfer(TrainState(model, optimizer), TrainState(fresh, fresh_optimizer))
    for one_model, one_optimizer in ((model, optimizer), (fresh, fresh_optimizer)):
        one_optimizer.zero_grad()
        one_model(torch.ones(1, 3)).sum().backward()
        one_optimizer.step()
    assert all(equal(a, b) for a, b in zip(model.parameters(), fresh.parameters()))


def build_with(change):
    model = nn.Linear(3, 2)
    change(model)
    return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.to(torch.float64), ["model/bias", "float32", "float64"]),
        (lambda m: setattr(m, "bias", nn.Parameter(torch.ones(3))), ["model/bias", "(2,)", "(3,)"]),
        (lambda m: setattr(m, "bias", None), ["only in the checkpoint", "model/bias"]),
        (lambda m: setattr(m, "more", nn.Parameter(torch.ones(1))), ["in the program", "more"]),
        (lambda m: setattr(m, "tie", m.weight), ["model/weight", "tied to nothing"]),
    ],
)
def test_a_model_that_is_not_the_saved_one_is_refused_by_name(change, words):
    model = nn.Linear(3, 2)
    saved = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(StateMismatch) as caught:
        transfer(saved, build_with(change))
    assert all(word in str(caught.value) for word in words), caught.value


def test_other_parameter_groups_are_refused():
    model, optimizer, _ = trained()
    fresh = trained(steps=0)[0]
    rest = [p for p in fresh.parameters() if p is not fresh.small]
    split = torch.optim.AdamW([{"params": [fresh.small]}, {"params": rest}], lr=1e-3)
    with pytest.raises(StateMismatch, match="2 parameter groups, the checkpoint 1"):
        transfer(TrainState(model, optimizer), TrainState(fresh, split))


def test_an_optimizer_of_other_parameters_is_refused_at_save():
    optimizer = trained()[1]
    with pytest.raises(CheckpointError, match="group 0 .* is not in the model"):
        TrainState(nn.Linear(2, 2), optimizer).capture(**ONE_RANK)


def test_a_leaf_that_has_no_json_form_is_refused_by_name():
    class Holder:
        def state_dict(self):
            return {"inner": [1, object()]}

        def load_state_dict(self, state):
            raise AssertionError

    model, optimizer, _ = trained()
    with pytest.raises(CheckpointError, match="`extra/mine/inner/1` is a builtins.object"):
        TrainState(model, optimizer, extra={"mine": Holder()}).capture(**ONE_RANK)


def test_a_tensor_subclass_is_refused_by_name():
    class Wrapped(torch.Tensor):
        pass

    tensor = torch.zeros(3).as_subclass(Wrapped)
    with pytest.raises(CheckpointError, match="`model/w` is a .*Wrapped"):
        describe("model/w", tensor, rank=0, world_size=1)


def test_values_of_state_dicts_come_back_with_their_types_and_bits():
    value = {
        "a": [1, 2.5, None, True, "x", (1, (2.0,))],
        "inf": [math.inf, -math.inf, -0.0, 0.1 + 0.2],
        3: Counter({7: 2}),
        "$tensor": {"$dict": 1},
        "big": 2**80,
        "t": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
    }
    kept = {}

    def take(key, tensor):
        kept[key] = tensor
        return {"key": key}

    plain = objects.decode(objects.encode(flatten(value, "v", take), key="v"), where="v")
    back = unflatten(plain, lambda entry: kept[entry["key"]])
    assert repr(back) == repr(value)
    assert type(back[3]) is Counter
    assert list(kept) == ["v/t"]


def test_random_numbers_continue_after_a_restore():
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    random.gauss(0, 1)
    np.random.standard_normal(3)
    model, optimizer, _ = trained(steps=0)
    snapshot = TrainState(model, optimizer).capture(**ONE_RANK)
    saved = {leaf.key: leaf.local.clone() for leaf in snapshot.leaves}

    def draw():
        return (
            [random.gauss(0, 1) for _ in range(3)],
            np.random.standard_normal(3).tolist(),
            torch.randn(3).tolist(),
        )

    expected = draw()
    restoration = TrainState(model, optimizer).prepare(
        snapshot.shared,
        snapshot.private,
        {"model/head.weight": "model/embedding.weight"},
        **ONE_RANK,
        fresh_seed=pytest.fail,
    )
    for leaf in restoration.leaves:
        leaf.local.copy_(saved[leaf.key])
    restoration.adopt()
    assert restoration.generators_continue
    assert draw() == expected


def test_fresh_streams_depend_on_seed_step_and_rank():
    def draw(**facts):
        rng.seed_generators(**facts)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    first = draw(seed=1, step=2, rank=3)
    assert draw(seed=1, step=2, rank=3) == first
    others = [
        draw(seed=2, step=2, rank=3),
        draw(seed=1, step=3, rank=3),
        draw(seed=1, step=2, rank=0),
    ]
    for other in others:
        assert all(a != b for a, b in zip(first, other))


def test_extra_state_of_modules_comes_back():
    class Scaled(nn.Linear):
        scale = 1.0

        def get_extra_state(self):
            return {"scale": self.scale, "amax": torch.full((2,), self.scale)}

        def set_extra_state(self, state):
            assert state["amax"].tolist() == [state["scale"]] * 2
            self.scale = state["scale"]

    def build(scale):
        model = nn.Sequential(Scaled(2, 2))
        model[0].scale = scale
        return TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))

    target = build(1.0)
    transfer(build(0.5), target)
    assert target.model[0].scale == 0.5


def test_groups_of_parameters_are_matched_by_their_names_in_any_order():
    def build(order):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}]
        return model, torch.optim.SGD([groups[i] for i in order], lr=0.0)

    model, optimizer = build([1, 0])
    for group in optimizer.param_groups:
        group["lr"] = 9.0 if group["params"][0] is model.weight else 8.0
    fresh, fresh_optimizer = build([0, 1])
    transfer(TrainState(model, optimizer), TrainState(fresh, fresh_optimizer))
    assert [group["lr"] for group in fresh_optimizer.param_groups] == [9.0, 8.0]


def test_a_scale_that_was_backed_off_stays_so():
    def build():
        model, optimizer, _ = trained(steps=0)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        return model, optimizer, scaler

    model, optimizer, scaler = build()
    scaler.scale(model(torch.arange(8))).backward()
    model.small.grad.fill_(math.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32.0
    fresh, fresh_optimizer, fresh_scaler = build()
    transfer(
        TrainState(model, optimizer, scaler=scaler),
        TrainState(fresh, fresh_optimizer, scaler=fresh_scaler),
    )
    assert fresh_scaler.state_dict() == scaler.state_dict()
    with pytest.raises(StateMismatch, match="scaler"):
        transfer(TrainState(model, optimizer, scaler=scaler), TrainState(fresh, fresh_optimizer))


def test_an_option_that_the_first_step_adds_comes_back():
    class Noting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["used_lr"] = group["lr"] / 3
                group["scale"] = torch.tensor(0.7)
            return super().step(closure)

    (model, _, _), (fresh, _, _) = trained(steps=1), trained(steps=0)
    source, target = (Noting(each.parameters(), lr=0.1) for each in (model, fresh))
    source.step()
    transfer(TrainState(model, source), TrainState(fresh, target))
    (group,) = target.param_groups
    assert group["used_lr"] == 0.1 / 3 and torch.equal(group["scale"], torch.tensor(0.7))
    group["other"] = 1
    with pytest.raises(StateMismatch, match="only in the program .'other'.*same optimizer"):
        transfer(TrainState(model, source), TrainState(fresh, target))
