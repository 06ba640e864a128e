"""Where the parts of a sweep are, and how a sweep or a task of it is found by its name."""

from pathlib import Path

import pytest

from ftslurm.operate.standing import open_run
from ftslurm.run.sweep_layout import (
    SweepLayout,
    find_sweep,
    parse_task_id,
    place_of_run,
    task_id,
)
from tests.fakes.array_queue import make_sweep


def test_a_task_is_a_run_in_the_sweeps_folder(tmp_path):
    layout = SweepLayout(tmp_path / "gpt-1")
    assert layout.task(3).root == tmp_path / "gpt-1" / "gpt-1-0003"
    assert layout.task(12345).root.name == "gpt-1-12345"
    assert parse_task_id(task_id("gpt-1", 3)) == ("gpt-1", 3)
    assert parse_task_id("gpt-1") is None


def test_a_sweep_is_found_by_its_folder_and_by_its_id_under_runs(tmp_path, monkeypatch):
    layout = make_sweep(tmp_path, 1)
    assert find_sweep(str(layout.root)) == layout
    assert find_sweep("sweep-1") is None
    monkeypatch.chdir(tmp_path)
    assert find_sweep("sweep-1") == layout
    assert find_sweep("runs/sweep-1") == layout
    assert find_sweep("sweep-1-0000") is None


def test_a_task_is_found_by_its_id_under_runs(tmp_path, monkeypatch):
    layout = make_sweep(tmp_path, 1)
    monkeypatch.chdir(tmp_path)
    assert open_run("sweep-1-0000").layout == layout.task(0)
    assert place_of_run("sweep-1-0000").absolute() == layout.task(0).root
    assert place_of_run("nothing") == Path("nothing")


def test_a_verb_of_one_run_says_to_name_a_task(tmp_path):
    layout = make_sweep(tmp_path, 1)
    with pytest.raises(Exception, match="is a sweep.*sweep-1-0000"):
        open_run(str(layout.root))
