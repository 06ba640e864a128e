"""The account of a run may fail to be written: the training must not notice."""

import errno
import logging
import os
from pathlib import Path

import pytest

from ftslurm.run.attempts import read_events, read_progress
from ftslurm.run.layout import RunLayout

pytestmark = pytest.mark.torch


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_costs_the_account_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ftslurm.replay.trace import read_trace
    from ftslurm.train import progress
    from ftslurm.train.progress import Recorder

    layout = RunLayout(tmp_path)
    layout.attempt(1).root.mkdir(parents=True)
    recorder = Recorder(layout, attempt=1, steps=9, log_interval_steps=10)

    def account(step: int) -> None:
        recorder.enter("training")
        recorder.event("committed", {"step": step})
        recorder.step(
            step, loss=1.0, samples=0, tokens=0, values={}, committed_step=None, failed_saves=0
        )

    caplog.set_level(logging.WARNING)
    with monkeypatch.context() as broken:
        broken.setattr(progress, "append_event", full_disk)
        broken.setattr(progress, "write_progress", full_disk)
        broken.setattr("ftslurm.replay.trace.os.write", full_disk)
        account(1)
        account(2)
        broken.undo()
    for kind in ("trace", "journal", "progress"):
        assert caplog.text.count(f"the {kind} misses") == 1, caplog.text
    account(3)
    recorder.close()
    assert "failed_writes {'progress': 2, 'journal': 4, 'trace': 2}" in caplog.text
    kept = read_events(layout.attempt(1))
    assert [event["step"] for event in kept if event["kind"] == "committed"] == [1, 2, 3]
    assert [event["step"] for event in kept if event["kind"] == "first_step"] == [1]
    assert [event["at"] for event in kept] == sorted({event["at"] for event in kept})
    assert list(read_trace(layout)) == [3]
    assert read_progress(layout.attempt(1)) is not None
