"""A node's view may be late: what somebody names is waited for before an older step is taken."""

import os

import pytest
from checkpoints import make_step

from ftslurm import files
from ftslurm.checkpoint import reading, sight
from ftslurm.checkpoint.choose import Rejected
from ftslurm.checkpoint.published import published_steps
from ftslurm.checkpoint.reading import StepFile
from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.run.layout import RunLayout, step_name


@pytest.fixture
def layout(tmp_path):
    layout = RunLayout(tmp_path)
    for step in (10, 20):
        make_step(layout, step)
    return layout


def hide(monkeypatch, layout, step, *, looks):
    """The next `looks` listings of the steps lack one of them."""
    left = [looks]
    listdir = os.listdir

    def late(path):
        names = listdir(path)
        if path == layout.steps and left[0]:
            left[0] -= 1
            names.remove(step_name(step))
        return names

    monkeypatch.setattr(files.os, "listdir", late)
    return left


def test_a_step_that_latest_names_is_waited_for(layout, monkeypatch):
    monkeypatch.setattr(files, "VIEW_LAG_S", 60.0)
    left = hide(monkeypatch, layout, 20, looks=3)
    assert sight.await_newest(layout) is None
    assert left == [0]
    assert published_steps(layout)[0].step == 20


def test_a_step_that_does_not_come_into_sight_is_named_after_a_while(layout, monkeypatch):
    hide(monkeypatch, layout, 20, looks=10**9)
    assert sight.await_newest(layout) == 20


def test_nobody_waits_for_a_step_that_was_put_aside_or_that_a_newer_one_follows(
    layout, monkeypatch
):
    monkeypatch.setattr(files, "VIEW_LAG_S", 60.0)
    monkeypatch.setattr(sight.time, "sleep", lambda seconds: pytest.fail("waited"))
    latest = layout.latest_json.read_bytes()
    CheckpointStore(layout).quarantine(Rejected(20, layout.steps / step_name(20), "test"))
    assert sight.await_newest(layout) is None
    make_step(layout, 30)
    layout.latest_json.write_bytes(latest)
    assert sight.await_newest(layout) is None
    layout.latest_json.write_text("{")
    assert sight.await_newest(layout) is None
    layout.latest_json.unlink()
    assert sight.await_newest(layout) is None


def test_a_commit_that_is_listed_and_not_in_sight_yet_is_no_reason_to_take_an_older_step(
    layout, monkeypatch
):
    monkeypatch.setattr(files, "VIEW_LAG_S", 60.0)
    monkeypatch.setenv("FTSLURM_FAULTS", "enoent@read_step:name=COMMITTED:times=2")
    assert published_steps(layout)[0].step == 20


def test_a_handle_that_went_stale_is_opened_again(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "VIEW_LAG_S", 60.0)
    path = tmp_path / "shard"
    path.write_bytes(b"0123456789")
    file, into = StepFile(path), memoryview(bytearray(4))
    assert file.read_at(into, 0) == 4
    read_at, opened = reading.read_at, []

    def stale_once(fd, into, offset):
        opened.append(fd)
        if len(opened) == 1:
            path.rename(tmp_path / "old")
            path.write_bytes(b"abcdefghij")
            raise OSError(116, "Stale file handle")
        return read_at(fd, into, offset)

    monkeypatch.setattr(reading, "read_at", stale_once)
    assert file.read_at(into, 4) == 4
    assert bytes(into) == b"efgh"
    file.close()
