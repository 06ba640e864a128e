"""The cursor: each sample once an epoch, whatever the world does; no place in other data."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftslurm.errors import DataError, UsageError
from ftslurm.train.cursor import Cursor, plan_batch, slice_bounds
from ftslurm.train.order import permute

WORLDS = st.integers(1, 9)


def make_cursor(samples_per_epoch: int = 10, batch: int = 4, seed: int = 1) -> Cursor:
    return Cursor(samples_per_epoch, batch, seed, snapshot="abc")


@settings(max_examples=60, deadline=None)
@given(
    samples_per_epoch=st.integers(1, 60),
    batch=st.integers(1, 25),
    seed=st.integers(0, 2**32),
    attempts=st.lists(
        st.tuples(WORLDS, st.integers(0, 8), st.integers(0, 3)), min_size=1, max_size=8
    ),
)
def test_each_sample_comes_once_an_epoch_over_restarts_and_world_sizes(
    samples_per_epoch: int, batch: int, seed: int, attempts: list[tuple[int, int, int]]
) -> None:
    """Each attempt trains some steps, reads ahead a few more and is cut off."""
    consumed: list[int] = []
    saved = make_cursor(samples_per_epoch, batch, seed).state_dict()
    for world_size, steps, ahead in attempts:
        cursor = make_cursor(samples_per_epoch, batch, seed)
        cursor.load_state_dict(json.loads(json.dumps(saved)))
        for _ in range(steps):
            indices = cursor.batch_indices()
            for rank in range(world_size):
                start, stop = cursor.slice_for(rank, world_size)
                consumed.extend(indices[start:stop].tolist())
            cursor.advance()
        for number in range(ahead):
            cursor.batch_indices(cursor.samples + number * batch)
        saved = cursor.state_dict()
    assert saved["samples"] == len(consumed) == batch * sum(steps for _, steps, _ in attempts)
    for begin in range(0, len(consumed), samples_per_epoch):
        epoch = Counter(consumed[begin : begin + samples_per_epoch])
        assert set(epoch.values()) == {1}


def test_a_batch_may_cross_the_end_of_an_epoch() -> None:
    cursor = make_cursor(10, 4)
    cursor.advance()
    cursor.advance()
    first = permute(np.arange(10), n=10, seed=1, epoch=0)
    second = permute(np.arange(10), n=10, seed=1, epoch=1)
    assert cursor.batch_indices().tolist() == [*first[8:], *second[:2]]
    assert cursor.position() == {"epoch": 0, "samples": 8}
    cursor.advance()
    assert cursor.position() == {"epoch": 1, "samples": 12}


def test_a_batch_may_be_larger_than_the_data() -> None:
    assert Counter(make_cursor(3, 7).batch_indices().tolist()).most_common()[0][1] == 3
    assert set(make_cursor(3, 7).batch_indices().tolist()) == {0, 1, 2}


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_slices_are_consecutive_and_differ_by_one_at_most(total: int, parts: int) -> None:
    bounds = [slice_bounds(total, part, parts) for part in range(parts)]
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == total
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 500), WORLDS, st.integers(1, 40))
def test_all_ranks_take_equally_many_micro_steps_and_no_more_than_needed(
    batch: int, world_size: int, micro_batch_size: int
) -> None:
    plans = [plan_batch(batch, rank, world_size, micro_batch_size) for rank in range(world_size)]
    assert len({(plan.micro_steps, plan.rows) for plan in plans}) == 1
    assert sum(plan.stop - plan.start for plan in plans) == batch
    longest = max(plan.stop - plan.start for plan in plans)
    plan = plans[0]
    assert 1 <= plan.rows <= micro_batch_size
    assert longest <= plan.micro_steps * plan.rows < longest + plan.micro_steps
    assert (plan.micro_steps - 1) * micro_batch_size < longest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 2),
        ("snapshot", "abd"),
        ("samples_per_epoch", 11),
        ("order_version", 2),
        ("samples", -1),
        ("samples", None),
        ("samples", "8"),
        ("epoch", 1),
    ],
)
def test_a_place_in_something_else_is_refused_and_nothing_moves(name: str, value: object) -> None:
    cursor = make_cursor()
    with pytest.raises(DataError, match=name.partition("_")[0].rstrip("s")):
        cursor.load_state_dict({**make_cursor().state_dict(), name: value})
    assert (cursor.samples, cursor.moves) == (0, 0)


@pytest.mark.parametrize("name", ["seed", "snapshot", "samples_per_epoch", "order_version"])
def test_a_place_that_does_not_say_in_what_is_refused(name: str) -> None:
    state = make_cursor().state_dict()
    del state[name]
    with pytest.raises(DataError, match=name):
        make_cursor().load_state_dict(state)


def test_the_batch_size_may_change_over_a_restart() -> None:
    cursor = make_cursor(10, 4)
    cursor.advance()
    wider = make_cursor(10, 6)
    wider.load_state_dict(cursor.state_dict())
    order = permute(np.arange(10), n=10, seed=1, epoch=0)
    assert wider.batch_indices().tolist() == order[4:].tolist()


@pytest.mark.parametrize(("samples_per_epoch", "batch"), [(0, 1), (1, 0)])
def test_a_cursor_over_nothing_is_refused(samples_per_epoch: int, batch: int) -> None:
    with pytest.raises(UsageError):
        make_cursor(samples_per_epoch, batch)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_has_no_slice(rank: int) -> None:
    with pytest.raises(UsageError, match="world of 4"):
        make_cursor().slice_for(rank, 4)


def test_batches_that_are_passed_over_are_trained_by_no_step_and_nothing_else_changes():
    whole, short = make_cursor(), make_cursor()
    short.passed_over = [(2, 3), (6, 6)]
    trained = [whole.batch_indices(4 * batch).tolist() for batch in range(10)]
    seen = []
    for _ in range(6):
        seen.append(short.batch_indices().tolist())
        short.advance()
    assert seen == [trained[batch] for batch in (0, 1, 4, 5, 7, 8)]
    assert short.samples == 9 * 4  # what is passed over counts as consumed


@pytest.mark.parametrize("steps", range(7))
def test_a_restart_at_any_step_passes_over_the_same_batches(steps):
    straight, resumed = make_cursor(), make_cursor()
    straight.passed_over = resumed.passed_over = [(2, 3), (6, 6)]
    for _ in range(steps):
        straight.advance()
    resumed.load_state_dict(straight.state_dict())
    ahead = resumed.begins()
    for _ in range(5):
        assert next(ahead) == straight.begin_of(straight.samples)
        straight.advance()
