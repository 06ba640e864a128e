"""The learning rate when a run goes on with other ranks (recovery.elastic_lr: scale)."""

import pytest

from ftslurm.train.reference import use_rate_of_this_size
from ftslurm.train.schedule import scaled, warm_up_cosine

pytestmark = pytest.mark.torch

SHAPE = {"warmup_steps": 4, "steps": 20, "min_ratio": 0.1}


def make(by: float):
    import torch
    from torch.optim.lr_scheduler import LambdaLR

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    return optimizer, LambdaLR(optimizer, scaled(warm_up_cosine(**SHAPE), by=by))


def rates(optimizer, scheduler, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_half_the_ranks_train_at_half_the_rate_and_all_of_them_at_the_old_one_again():
    whole = rates(*make(1.0), steps=12)
    optimizer, scheduler = make(1.0)
    seen = rates(optimizer, scheduler, steps=4)
    for by, steps in ((0.5, 4), (1.0, 4)):
        saved = optimizer.state_dict(), scheduler.state_dict()
        optimizer, scheduler = make(by)
        optimizer.load_state_dict(saved[0])
        scheduler.load_state_dict(saved[1])
        use_rate_of_this_size(scheduler)
        seen += rates(optimizer, scheduler, steps=steps)
    assert seen[:4] == whole[:4] and seen[8:] == whole[8:]
    assert seen[4:8] == [0.5 * rate for rate in whole[4:8]]


def test_the_factor_of_a_whole_run_has_the_same_bits_as_without_scaling():
    plain = warm_up_cosine(**SHAPE)
    assert [scaled(plain, by=1.0)(step) for step in range(25)] == [
        plain(step) for step in range(25)
    ]
