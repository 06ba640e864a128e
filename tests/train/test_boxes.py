"""Boxes against arrays: the arithmetic that moves slices between world sizes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ftslurm.train.boxes import Box


@st.composite
def two_boxes(draw):
    whole = draw(st.lists(st.integers(1, 6), min_size=0, max_size=3))

    def box():
        starts = [draw(st.integers(0, n - 1)) for n in whole]
        lengths = [draw(st.integers(1, n - start)) for n, start in zip(whole, starts)]
        return Box(tuple(starts), tuple(lengths))

    return tuple(whole), box(), box()


@given(two_boxes())
def test_copying_the_common_part_moves_exactly_the_elements_both_hold(boxes):
    whole, stored, wanted = boxes
    values = np.arange(1, 1 + int(np.prod(whole))).reshape(whole)
    everything = Box((0,) * len(whole), whole)
    source = values[stored.within(everything)]
    target = np.zeros(wanted.shape, dtype=values.dtype)
    common = stored.intersect(wanted)
    if common.volume:
        target[common.within(wanted)] = source[common.within(stored)]
    expected = np.where(np.isin(values, source), values, 0)[wanted.within(everything)]
    assert np.array_equal(target, expected)
    assert common.volume == np.count_nonzero(expected)


@given(two_boxes())
def test_a_box_called_contiguous_is_one_run_of_the_memory_of_the_other(boxes):
    whole, inner, outer = boxes
    begin = inner.contiguous_in(outer)
    if begin is not None:
        everything = Box((0,) * len(whole), whole)
        values = np.arange(int(np.prod(whole))).reshape(whole)
        run = values[outer.within(everything)].ravel()[begin : begin + inner.volume]
        assert np.array_equal(run, values[inner.within(everything)].ravel())


def test_equal_boxes_and_whole_rows_are_contiguous():
    outer = Box((2, 0), (4, 3))
    assert outer.contiguous_in(outer) == 0
    assert Box((3, 0), (2, 3)).contiguous_in(outer) == 3
    assert Box((3, 1), (2, 2)).contiguous_in(outer) is None
    assert Box((5, 0), (2, 3)).contiguous_in(outer) is None
    assert Box((), ()).contiguous_in(Box((), ())) == 0
