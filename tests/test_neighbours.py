"""The runs that lie in one folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ftslurm.run import neighbours
from ftslurm.run.neighbours import newest_runs


def _folder(root: Path, name: str, *, at: int, what: str = "run.json") -> Path:
    path = root / name
    path.mkdir()
    (path / what).write_text("{}")
    os.utime(path / what, (at, at))
    return path


def _names(root: Path, most: int = 10, *, with_tasks: bool = False) -> list[str]:
    return [run.root.name for run in newest_runs(root, most, with_tasks=with_tasks)]


def test_the_newest_come_first_and_no_more_than_are_asked_for(tmp_path: Path) -> None:
    for name, at in (("b", 30), ("a", 10), ("c", 20)):
        _folder(tmp_path, name, at=at)
    assert _names(tmp_path) == ["b", "c", "a"]
    assert _names(tmp_path, 2) == ["b", "c"]


def test_a_folder_that_a_submission_builds_is_no_run(tmp_path: Path) -> None:
    _folder(tmp_path, ".a-20261130-0001.tmp", at=40)
    sweep = _folder(tmp_path, "sweep", at=20, what="sweep.json")
    _folder(sweep, ".0001.tmp", at=50)
    _folder(sweep, "0000", at=10)
    assert _names(tmp_path) == []
    assert _names(tmp_path, with_tasks=True) == ["0000"]


def test_what_is_renamed_while_it_is_looked_for_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _folder(tmp_path, "stays", at=10)
    monkeypatch.setattr(neighbours, "list_folder", lambda root: ["gone", "stays"])
    assert _names(tmp_path) == ["stays"]


def test_a_folder_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert _names(tmp_path / "none") == []
