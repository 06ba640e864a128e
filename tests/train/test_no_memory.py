"""A machine without memory for a snapshot: the save has failed, and the training goes on."""

from __future__ import annotations

import pytest
from test_checkpointer import DEADLINE_S, POSITION, Trainer

from ftslurm.train.arena import Arena

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory"), MemoryError()])
def test_a_snapshot_for_which_there_is_no_memory_is_a_failed_save(tmp_path, monkeypatch, error):
    trainer = Trainer(tmp_path)
    trainer.train()

    def refuse(arena, needed_bytes):
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(Arena, "reserve", refuse)
        assert trainer.checkpointer.save(1, POSITION)
        assert not trainer.checkpointer.emergency_save(1, POSITION, deadline_s=DEADLINE_S)
    reasons = [facts["reason"] for facts in trainer.reported("save_failed")]
    assert reasons == ["rank 0 has no host memory for its snapshot"] * 2
    assert trainer.save(2)
    assert trainer.steps() == ["step-000000000002"]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_memory_that_is_not_there_beside_the_training_is_no_error_of_its(tmp_path, monkeypatch):
    """A traceback in the rank's output would be taken for what ended it."""
    trainer = Trainer(tmp_path)
    trainer.train()

    def refuse(arena, needed_bytes):
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as broken:
        broken.setattr(Arena, "reserve", refuse)
        trainer.checkpointer.poll()
        trainer.checkpointer._reserving.join()
    assert trainer.save(2)
