"""Which batches a run passes over follows from what was noted alone."""

import random

import pytest

from ftslurm.run.layout import RunLayout
from ftslurm.run.skipped import batch_of_step, note_skip, read_skips, skipped_batches


def test_a_skip_is_noted_once_an_attempt(tmp_path):
    layout = RunLayout(tmp_path)
    assert read_skips(layout) == []
    for _ in range(2):
        note_skip(layout, (21, 37), attempt=3)
    note_skip(layout, (50, 52), attempt=5)
    assert read_skips(layout) == [(21, 37), (50, 52)]


@pytest.mark.parametrize(("skips", "batches"), [
    ([], []),
    ([(21, 37)], [(20, 36)]),
    # A second one is told in the steps of the run as it was by then.
    ([(21, 37), (50, 52)], [(20, 36), (66, 68)]),
    ([(21, 37), (21, 23)], [(20, 39)]),
    ([(21, 37), (20, 22)], [(19, 38)]),
    ([(50, 52), (21, 22)], [(20, 21), (49, 51)]),
])  # fmt: skip
def test_steps_become_batches(skips, batches):
    assert skipped_batches(skips) == batches


def test_what_is_left_keeps_its_order_and_every_step_has_a_batch():
    draw = random.Random(7)
    for _ in range(200):
        left, skips = list(range(400)), []
        for _ in range(draw.randint(0, 4)):
            first = draw.randint(1, 60)
            last = first + draw.randint(0, 9)
            skips.append((first, last))
            del left[first - 1 : last]
        ranges = skipped_batches(skips)
        assert [batch_of_step(step, ranges) for step in range(1, 200)] == left[:199]
