"""Which failed saves count against the attempt; torch-free."""

import errno

import pytest

from ftslurm.train.setbacks import Setbacks, is_same_everywhere

FULL = [errno.ENOSPC, errno.EDQUOT]
CLOSED = [errno.EROFS, errno.EACCES, errno.EPERM]


@pytest.mark.parametrize("number", FULL)
def test_a_full_disk_is_the_same_for_every_node_whoever_met_it(number):
    assert is_same_everywhere([number], of_all=False)
    assert is_same_everywhere([number], of_all=True)


@pytest.mark.parametrize("number", CLOSED)
def test_what_is_closed_to_some_ranks_only_counts_against_the_attempt(number):
    assert not is_same_everywhere([number], of_all=False)
    assert not is_same_everywhere([errno.ENOSPC, number], of_all=False)
    assert is_same_everywhere([errno.ENOSPC, number], of_all=True)
    setbacks = Setbacks()
    setbacks.failed([number], of_all=True)
    assert (setbacks.in_a_row, setbacks.against_attempt, setbacks.is_of_disk) == (1, 0, True)
    setbacks.failed([number], of_all=False)
    assert (setbacks.in_a_row, setbacks.against_attempt, setbacks.is_of_disk) == (2, 1, False)


@pytest.mark.parametrize("numbers", [[errno.EIO], [None], [errno.ENOSPC, None], []])
def test_all_else_counts_also_when_it_met_all_ranks(numbers):
    assert not is_same_everywhere(numbers, of_all=True)
