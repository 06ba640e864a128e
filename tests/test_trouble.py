"""What `ftslurm status` says of a run's storage."""

import os
from types import SimpleNamespace

import pytest

from ftslurm.run.attempts import append_event
from ftslurm.run.layout import RunLayout
from ftslurm.run.trouble import storage_trouble


@pytest.fixture
def layout(tmp_path):
    layout = RunLayout(tmp_path)
    layout.attempt(1).root.mkdir(parents=True)
    return layout


def disk(*, free=1 << 20, flags=0):
    return lambda path: SimpleNamespace(f_bavail=free, f_frsize=4096, f_flag=flags)


def test_a_disk_with_room_and_saves_that_commit_are_no_trouble(layout):
    paths = layout.attempt(1)
    append_event(paths, "save_failed", step=10, reason="No space left on device")
    append_event(paths, "committed", step=20)
    assert storage_trouble(layout, 1, look=disk()) is None
    assert storage_trouble(layout, 1) is None


@pytest.mark.parametrize(
    ("look", "word"), [(disk(free=255), "full"), (disk(flags=os.ST_RDONLY), "read-only")]
)
def test_a_disk_that_takes_nothing_is_named_and_so_are_the_saves_it_has_failed(layout, look, word):
    paths = layout.attempt(1)
    append_event(paths, "committed", step=10)
    for step in (20, 30):
        append_event(paths, "save_failed", step=step, reason="No space left on device")
    told = storage_trouble(layout, 1, look=look)
    assert f"file system is {word}" in told
    assert "2 saves have failed since the newest committed step: No space left" in told
