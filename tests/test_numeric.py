"""When a loss ends an attempt."""

import math

import pytest

from ftslurm.errors import NumericError
from ftslurm.run.spec import RecoverySpec
from ftslurm.train.numeric import LossWatch


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_named_with_its_step(loss):
    with pytest.raises(NumericError, match=f"step 7 is {loss}") as caught:
        LossWatch(RecoverySpec()).check(7, loss)
    assert caught.value.step == 7 and "recovery.on_nan" in str(caught.value)


def watch_after(losses, factor=3.0):
    watch = LossWatch(RecoverySpec(spike_factor=factor))
    for step, loss in enumerate(losses, start=1):
        watch.check(step, loss)
    return watch


def test_a_spike_is_one_only_if_asked_for_and_beside_what_is_usual():
    usual = [2.0 + 0.1 * (i % 5) for i in range(100)]
    with pytest.raises(NumericError, match="a spike"):
        watch_after(usual).check(101, 7.0)
    watch_after(usual).check(101, 6.5)
    watch_after(usual, factor=0.0).check(101, 1e9)


def test_the_fast_fall_at_a_start_is_no_spike():
    watch_after([10.0, 1.0, 9.0, 1.0, 8.0] * 3).check(16, 30.0)


def test_a_loss_that_may_be_negative_has_no_spikes():
    watch_after([-1.0] * 50).check(51, 5.0)
