"""The order of samples: a bijection, well mixed, of constant memory, and the same for ever."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftslurm.errors import UsageError
from ftslurm.train.order import ORDER_VERSION, inverse, permute

SIZES = st.integers(1, 3000)
SEEDS = st.integers(0, 2**64 - 1)
EPOCHS = st.integers(0, 10**6)


@settings(max_examples=200, deadline=None)
@given(SIZES, SEEDS, EPOCHS)
def test_an_epoch_holds_each_sample_once(n: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(n), n=n, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(order), np.arange(n))


def test_every_small_size_is_a_bijection() -> None:
    for n in range(1, 258):
        order = permute(np.arange(n), n=n, seed=5, epoch=0)
        assert np.array_equal(np.sort(order), np.arange(n)), n


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 2**62 - 1), SEEDS, EPOCHS)
def test_the_inverse_gives_the_place_back(
    data: st.DataObject, n: int, seed: int, epoch: int
) -> None:
    places = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8))
    samples = permute(places, n=n, seed=seed, epoch=epoch)
    assert samples.min() >= 0
    assert samples.max() < n
    assert inverse(samples, n=n, seed=seed, epoch=epoch).tolist() == places


@settings(max_examples=50, deadline=None)
@given(SIZES, SEEDS, EPOCHS)
def test_one_at_a_time_gives_what_all_at_once_gives(n: int, seed: int, epoch: int) -> None:
    together = permute(np.arange(n), n=n, seed=seed, epoch=epoch)
    for place in range(0, n, max(1, n // 7)):
        assert permute(place, n=n, seed=seed, epoch=epoch) == together[place]


def test_the_order_is_the_one_of_version_1() -> None:
    """A change of these values changes the trajectory of runs in progress: raise ORDER_VERSION."""
    assert ORDER_VERSION == 1
    first = permute(np.arange(16), n=16, seed=0, epoch=0)
    assert first.tolist() == [4, 14, 7, 2, 0, 6, 10, 11, 5, 1, 12, 3, 8, 15, 13, 9]
    second = permute(np.arange(16), n=16, seed=0, epoch=1)
    assert second.tolist() == [14, 0, 8, 3, 4, 5, 9, 13, 2, 12, 11, 1, 6, 7, 10, 15]
    prime = permute(np.arange(8), n=1_000_003, seed=42, epoch=7)
    assert prime.tolist() == [78529, 292526, 138634, 399789, 85936, 122926, 891992, 108788]
    assert permute(10**15, n=10**16, seed=42, epoch=7) == 5483318284160861


def test_places_shapes_and_kinds_are_kept() -> None:
    square = permute(np.arange(6).reshape(2, 3), n=6, seed=1, epoch=0)
    assert square.shape == (2, 3)
    assert permute(np.empty(0, np.int64), n=6, seed=1, epoch=0).shape == (0,)
    assert isinstance(permute(3, n=6, seed=1, epoch=0), int)


def test_epochs_and_seeds_differ() -> None:
    n = 1000
    orders = {
        tuple(permute(np.arange(n), n=n, seed=seed, epoch=epoch).tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_neighbours_are_torn_apart() -> None:
    n = 20_000
    order = permute(np.arange(n), n=n, seed=3, epoch=0)
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 5 / n**0.5
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 5 / n**0.5
    # Each tenth of the epoch draws evenly from each tenth of the data.
    table = np.histogram2d(np.arange(n), order, bins=10)[0]
    expected = n / 100
    assert ((table - expected) ** 2 / expected).sum() < 81 + 5 * (2 * 81) ** 0.5


def test_every_permutation_of_four_comes_about_equally_often() -> None:
    seen: dict[tuple[int, ...], int] = {}
    for seed in range(2400):
        order = tuple(permute(np.arange(4), n=4, seed=seed, epoch=0).tolist())
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 24
    assert all(50 < count < 150 for count in seen.values())


def test_memory_does_not_grow_with_the_epoch() -> None:
    permute(np.arange(64), n=64, seed=0, epoch=0)
    tracemalloc.start()
    permute(np.arange(64), n=10**15, seed=0, epoch=0)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 100_000


@pytest.mark.parametrize(("index", "n"), [(-1, 5), (5, 5), (0, 0), (0, 2**62)])
def test_a_place_outside_the_epoch_is_refused(index: int, n: int) -> None:
    with pytest.raises(UsageError):
        permute(index, n=n, seed=0, epoch=0)
