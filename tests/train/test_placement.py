"""Sharing out replicated tensors: every row once, nobody much above a fair share."""

from __future__ import annotations

import itertools
import random

import pytest

from ftslurm.train.placement import Item, spread


def gpt(width: int, layers: int, vocabulary: int) -> list[Item]:
    """Parameters and both Adam moments of a GPT, and its packed steps."""
    shapes = {"wte": (vocabulary, width), "wpe": (1024, width), "ln_f": (width,)}
    for layer in range(layers):
        shapes |= {
            f"h{layer}/qkv": (3 * width, width),
            f"h{layer}/proj": (width, width),
            f"h{layer}/up": (4 * width, width),
            f"h{layer}/up_bias": (4 * width,),
            f"h{layer}/down": (width, 4 * width),
            f"h{layer}/ln": (width,),
        }
    kinds = ("model", "exp_avg", "exp_avg_sq")
    items = [Item(f"{kind}/{key}", shape, 4) for kind in kinds for key, shape in shapes.items()]
    return [*items, Item("step", (len(shapes),), 4), Item("scale", (), 4)]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 31, 64])
@pytest.mark.parametrize("sizes", [(64, 2, 256), (256, 4, 256), (768, 12, 50257)])
def test_no_rank_writes_much_more_than_its_share(sizes, world_size):
    shares = spread(gpt(*sizes), world_size)
    loads = [sum(rows.bytes for rows in share) for share in shares]
    working = [load for load in loads if load]
    assert max(working) <= 1.2 * sum(working) / len(working)
    if sum(loads) > world_size * 64 * 1024:
        assert len(working) == world_size


@pytest.mark.parametrize("world_size", [1, 3, 7, 64])
def test_every_row_is_written_exactly_once(world_size):
    items = gpt(64, 2, 256)
    shares = spread(items, world_size, grain_bytes=1, record_bytes=10_000)
    pieces = sorted((r.key, r.start, r.stop) for r in itertools.chain(*shares))
    for item in items:
        own = [(start, stop) for key, start, stop in pieces if key == item.key]
        assert own[0][0] == 0
        assert own[-1][1] == item.rows
        assert all(a[1] == b[0] for a, b in itertools.pairwise(own))


def test_the_answer_does_not_depend_on_the_order_of_the_tensors():
    items = gpt(64, 2, 256)
    shuffled = random.Random(0).sample(items, len(items))
    assert spread(shuffled, 4) == spread(items, 4)


def test_a_long_tensor_is_cut_into_records_a_reader_can_buffer():
    (share,) = spread([Item("x", (1000, 10), 4)], 1, record_bytes=4000)
    assert max(rows.bytes for rows in share) <= 4000
    assert sum(rows.bytes for rows in share) == 40_000


def test_a_row_longer_than_a_record_is_left_whole():
    (share,) = spread([Item("x", (2, 5000), 4)], 1, record_bytes=4000)
    assert [rows.bytes for rows in share] == [20_000, 20_000]


def test_little_state_is_not_scattered_over_many_ranks():
    shares = spread([Item("a", (10,), 4), Item("b", (), 8)], 64)
    assert [len(share) for share in shares] == [2] + [0] * 63


def test_empty_tensors_are_written_by_nobody():
    assert spread([Item("a", (0, 5), 4)], 2) == [[], []]
