"""What counts once a step has been renamed into place, and what a list of steps leaves out."""

import errno
import logging
from pathlib import Path

import pytest
from checkpoints import make_step, make_unreadable, two_steps

from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.run.layout import RunLayout


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    return two_steps(tmp_path / "run", monkeypatch)


def test_a_step_counts_also_when_the_hint_for_people_cannot_be_written(
    layout: RunLayout, caplog: pytest.LogCaptureFixture
) -> None:
    layout.latest_json.unlink()
    layout.latest_json.mkdir()
    with caplog.at_level(logging.WARNING, "ftslurm"):
        path = make_step(layout, 30)
    assert CheckpointStore(layout).verify(path, full=True).ok
    assert "step 30 is published" in caplog.text
    assert str(layout.latest_json) in caplog.text


def test_an_older_step_is_not_listed_as_the_newest_while_that_cannot_be_read(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(layout)
    with monkeypatch.context() as broken:
        make_unreadable(broken, layout.steps / "step-000000000020" / "COMMITTED", errno.EIO)
        with pytest.raises(OSError, match="Input/output error"):
            store.published()
    make_unreadable(monkeypatch, layout.steps / "step-000000000010" / "COMMITTED", errno.EIO)
    assert [step.step for step in store.published()] == [20]


def test_steps_that_cannot_be_listed_are_not_taken_for_none(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_unreadable(monkeypatch, layout.steps, errno.ESTALE)
    monkeypatch.setattr(Path, "is_dir", lambda path: path != layout.steps)  # as Python 3.14 says
    with pytest.raises(OSError, match="Stale"):
        CheckpointStore(layout).choose(full=False)
