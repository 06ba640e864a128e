"""How an attempt ends on disk."""

from pathlib import Path

import pytest

from ftslurm.errors import CheckpointError
from ftslurm.run.attempts import FINISHED, Attempt, Outcome, claim, read_outcome
from ftslurm.run.layout import RunLayout

pytestmark = pytest.mark.torch


def test_an_attempt_that_was_superseded_says_neither_done_nor_how_it_ended(tmp_path: Path) -> None:
    from ftslurm.train.ending import settle

    layout = RunLayout(tmp_path)
    for _ in range(2):
        claim(layout, Attempt(0, "7", 0, ["n1"], claimed_at=0.0))
    outcome = Outcome(FINISHED, 9, 9)
    with pytest.raises(CheckpointError, match="attempt 1 has been superseded by attempt 2"):
        settle(layout, 1, outcome, loss=1.0, parameter_digest="d")
    assert not layout.done.exists()
    assert read_outcome(layout.attempt(1)) is None
    settle(layout, 2, outcome, loss=1.0, parameter_digest="d")
    assert layout.done.exists()
    assert read_outcome(layout.attempt(2)) == outcome
