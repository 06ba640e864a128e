"""Retention: what stays, what goes, and what must never go."""

import os
from pathlib import Path
from typing import Any

import pytest
from checkpoints import damage, make_layout, make_step, names, skip_fsync

from ftslurm.checkpoint import verification
from ftslurm.checkpoint.removal import remove_trash
from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.errors import CheckpointError
from ftslurm.run.layout import RunLayout


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    skip_fsync(monkeypatch)
    return make_layout(tmp_path / "run")


def published(layout: RunLayout) -> list[int]:
    return [step.step for step in CheckpointStore(layout).published()]


@pytest.mark.parametrize(
    ("keep_last", "every", "protect", "left"),
    [
        (3, 0, set(), [50, 40, 30]),
        (1, 0, {20}, [50, 20]),
        (1, 20, set(), [50, 40, 20]),
        (0, 0, set(), [50]),
        (9, 0, set(), [50, 40, 30, 20, 10]),
    ],
)
def test_retention_keeps_what_it_was_told(
    layout: RunLayout, keep_last: int, every: int, protect: set[int], left: list[int]
) -> None:
    for step in (10, 20, 30, 40, 50):
        make_step(layout, step)
    removed = CheckpointStore(layout).retain(keep_last, every, protect)
    assert published(layout) == left
    assert removed == [step for step in (50, 40, 30, 20, 10) if step not in left]


def test_retention_counts_only_steps_that_check_out_and_removes_no_evidence(
    layout: RunLayout,
) -> None:
    for step in (10, 20, 30, 40):
        make_step(layout, step)
    (layout.steps / "step-000000000040" / "COMMITTED").unlink()
    os.truncate(layout.steps / "step-000000000030" / "shard-00000-000.bin", 4096)
    (layout.steps / "step-000000000050.tmp-0001").mkdir()
    assert CheckpointStore(layout).retain(1, 0, set()) == [10]
    choice = CheckpointStore(layout).choose(full=True)
    assert choice.manifest is not None
    assert choice.manifest.step == 20
    assert len(names(layout.steps)) == 4


def test_steps_from_before_a_restart_stay_until_a_new_one_was_read_back(layout: RunLayout) -> None:
    for step in (10, 20):
        make_step(layout, step, attempt=1)
    path = make_step(layout, 30, attempt=2)
    good = (path / "shard-00001-000.bin").read_bytes()
    damage(path)
    store = CheckpointStore(layout)
    assert store.retain(1, 0, set(), attempt=2) == []
    (path / "shard-00001-000.bin").write_bytes(good)
    assert store.retain(1, 0, set(), attempt=2, should_stop=lambda: True) == []
    assert published(layout) == [30, 20, 10]
    assert store.retain(1, 0, set(), attempt=2) == [20, 10]


def test_reading_back_is_done_once_an_attempt(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned: list[Path] = []
    scan = verification._scan

    def counted(path: Path, *rest: Any) -> None:
        scanned.append(path)
        scan(path, *rest)

    monkeypatch.setattr(verification, "_scan", counted)
    store = CheckpointStore(layout)
    for step in (10, 20, 30):
        make_step(layout, step, attempt=1)
    assert store.retain(2, 0, set(), attempt=1) == [10]
    assert scanned == []
    make_step(layout, 40, attempt=2)
    assert store.retain(2, 0, set(), attempt=2) == [20]
    assert {path.parent.name for path in scanned} == {"step-000000000040"}
    count = len(scanned)
    make_step(layout, 50, attempt=2)
    assert store.retain(2, 0, set(), attempt=2) == [30]
    assert len(scanned) == count


def test_leftovers_of_older_attempts_and_old_trash_are_cleared(layout: RunLayout) -> None:
    make_step(layout, 10)
    for name in ("step-000000000020.tmp-0001", "step-000000000030.tmp-0002", ".trash-step-1-x"):
        (layout.steps / name).mkdir()
        (layout.steps / name / "part").write_text("x")
    CheckpointStore(layout).retain(3, 0, set(), attempt=2)
    assert names(layout.steps) == ["step-000000000010", "step-000000000030.tmp-0002"]


def test_trash_that_somebody_else_is_removing_is_no_failure(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that failed gives its space back while the retention before it clears old trash."""
    trash = layout.steps / ".trash-step-000000000040.tmp-0001-00"
    trash.mkdir(parents=True)
    for name in ("a", "b", "c"):
        (trash / name).touch()
    unlink, gone = os.unlink, []

    def outrun(name: Any, **options: Any) -> None:
        if not gone:
            gone.append(name)
            unlink(name, **options)
        unlink(name, **options)

    monkeypatch.setattr(os, "unlink", outrun)
    remove_trash(trash)
    assert gone and not trash.exists()
    remove_trash(trash)


def test_a_stop_is_heeded_before_each_removal(layout: RunLayout) -> None:
    for step in (10, 20, 30, 40):
        make_step(layout, step)
    leftovers = ["step-000000000050.tmp-0000", ".trash-step-1-x"]
    for name in leftovers:
        (layout.steps / name).mkdir()
    store = CheckpointStore(layout)
    assert store.retain(1, 0, set(), attempt=1, should_stop=lambda: True) == []
    assert set(leftovers) < set(names(layout.steps))
    assert published(layout) == [40, 30, 20, 10]
    answers = iter([False, False, False, True])
    assert store.retain(1, 0, set(), attempt=1, should_stop=lambda: next(answers)) == [30]
    assert published(layout) == [40, 20, 10]
    assert not set(leftovers) & set(names(layout.steps))


def test_a_removal_cut_short_leaves_nothing_that_looks_like_a_step(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (10, 20):
        make_step(layout, step)

    def torn(path: Path) -> None:
        (path / "COMMITTED").unlink()
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr("shutil.rmtree", torn)
        with pytest.raises(CheckpointError, match="cannot remove old steps"):
            CheckpointStore(layout).retain(1, 0, set())
    choice = CheckpointStore(layout).choose(full=True)
    assert (choice.rejected, published(layout)) == ([], [20])
    CheckpointStore(layout).retain(1, 0, set())
    assert names(layout.steps) == ["step-000000000020"]
