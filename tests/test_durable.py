"""A tree is put on the device whole, several files at a time."""

import os
import threading

import pytest

from ftslurm.submit import durable
from ftslurm.submit.durable import make_durable


@pytest.fixture
def tree(tmp_path):
    for number in range(8):
        folder = tmp_path / f"task-{number}"
        (folder / "empty").mkdir(parents=True)
        (folder / "own").write_text(str(number))
        os.link(tmp_path / "task-0" / "own", folder / "shared")
    (tmp_path / "link").symlink_to(tmp_path.parent)
    return tmp_path


@pytest.mark.timeout(120)
def test_several_files_are_under_way_at_once_also_where_there_are_few(tree, monkeypatch):
    entered, together = [], threading.Event()

    def fsync(path):
        entered.append(path)
        if len(entered) == 4:
            together.set()
        assert together.wait(60), "each waits for the one before"

    monkeypatch.setattr(durable, "_fsync", fsync)
    make_durable(tree)


def test_each_file_is_put_on_the_device_once_and_then_the_folders_that_hold_something(
    tree, monkeypatch
):
    done = []
    monkeypatch.setattr(durable, "_fsync", done.append)
    make_durable(tree)
    files = [path for path in done if os.path.isfile(path)]  # noqa: PTH113
    assert done[: len(files)] == files  # a folder's names come last
    assert {os.stat(path).st_ino for path in files} == {  # noqa: PTH116
        (tree / f"task-{number}" / "own").stat().st_ino for number in range(8)
    }
    assert len(files) == 8
    assert sorted(done[8:]) == sorted(map(str, [tree, *tree.glob("task-*")]))


def test_where_a_user_may_have_no_more_threads_one_does_it_all(tree, monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    done = []
    monkeypatch.setattr(durable, "_fsync", done.append)
    monkeypatch.setattr(threading.Thread, "start", start)
    make_durable(tree)
    assert len(done) == 8 + 9


def test_what_the_device_does_not_take_is_raised(tree, monkeypatch):
    def fsync(path):
        if path.endswith("task-3/own"):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(durable, "_fsync", fsync)
    with pytest.raises(OSError, match="Input/output error"):
        make_durable(tree)
