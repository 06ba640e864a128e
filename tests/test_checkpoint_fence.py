"""A writer that was thought dead: it publishes nothing, removes nothing and is in nobody's way."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_layout, make_manifest, make_step, skip_fsync, tree, write_ranks

from ftslurm import faults
from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.errors import CheckpointError
from ftslurm.run.attempts import AdoptedStep, Attempt, claim
from ftslurm.run.layout import RunLayout


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    """A run whose attempt 1 has published 40 and 50."""
    skip_fsync(monkeypatch)
    layout = make_layout(tmp_path / "run")
    start_attempt(layout)
    for step in (40, 50):
        make_step(layout, step)
    return layout


def start_attempt(layout: RunLayout) -> int:
    """Claim the next number and adopt what is published, as the batch script does."""
    steps = CheckpointStore(layout).published()
    adopted = [AdoptedStep(step.step, step.committed_digest) for step in steps]
    return claim(layout, Attempt(0, "7", 0, ["n1"], claimed_at=86_400.0, adopted=adopted)).number


def published(layout: RunLayout) -> list[int]:
    return [step.step for step in CheckpointStore(layout).published()]


def test_a_superseded_attempt_publishes_nothing(layout: RunLayout) -> None:
    start_attempt(layout)
    temporary, indexes = write_ranks(layout, 60, attempt=1)
    told = "attempt 1 has been superseded by attempt 2, claimed at 1970-01-02 00:00:00 UTC"
    with pytest.raises(CheckpointError, match=told):
        CheckpointStore(layout).publish(temporary, make_manifest(60, indexes, attempt=1))
    assert not (temporary / "COMMITTED").exists()
    assert published(layout) == [50, 40]


def test_an_attempt_that_is_superseded_while_it_commits_does_not_rename(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def point(name: str, /, **_: Any) -> None:
        if name == "before_rename":
            layout.attempt(2).root.mkdir()  # a claim that has not written attempt.json yet

    temporary, indexes = write_ranks(layout, 60, attempt=1)
    monkeypatch.setattr(faults, "point", point)
    with pytest.raises(CheckpointError, match="superseded by attempt 2, claimed just now"):
        CheckpointStore(layout).publish(temporary, make_manifest(60, indexes, attempt=1))
    assert published(layout) == [50, 40]


def test_a_writer_outside_the_run_knows_no_fence(layout: RunLayout) -> None:
    temporary, indexes = write_ranks(layout, 60, attempt=0)
    store = CheckpointStore(layout)
    store.publish(temporary, make_manifest(60, indexes, attempt=0))
    assert store.retain(1, 0, set()) == [50, 40]


@pytest.mark.parametrize("keep_last", [3, 9])
def test_a_superseded_attempt_removes_nothing_of_the_newer_one(
    layout: RunLayout, keep_last: int
) -> None:
    start_attempt(layout)
    make_step(layout, 55, attempt=2)
    for step in (60, 70, 80):
        make_step(layout, step, attempt=1)
    before = tree(layout.steps)
    with pytest.raises(CheckpointError, match="attempt 1 has been superseded"):
        CheckpointStore(layout).retain(keep_last, 0, set(), attempt=1)
    assert tree(layout.steps) == before


def test_an_attempt_that_is_superseded_during_retention_removes_no_more(layout: RunLayout) -> None:
    for step in (60, 70):
        make_step(layout, step, attempt=1)
    asked: list[int] = []

    def claimed_meanwhile() -> bool:
        asked.append(0)
        if len(asked) == 2:
            start_attempt(layout)
        return False

    with pytest.raises(CheckpointError, match="attempt 1 has been superseded"):
        CheckpointStore(layout).retain(1, 0, set(), attempt=1, should_stop=claimed_meanwhile)
    assert published(layout) == [70, 50, 40]


def test_late_steps_of_an_older_attempt_neither_count_nor_go(layout: RunLayout) -> None:
    start_attempt(layout)
    make_step(layout, 55, attempt=2)
    for step in (60, 70, 80):
        make_step(layout, step, attempt=1)
    store = CheckpointStore(layout)
    assert store.retain(2, 0, set(), attempt=2) == [40]
    assert published(layout) == [80, 70, 60, 55, 50]
    make_step(layout, 56, attempt=2, parent=None)
    assert store.retain(1, 0, set(), attempt=2) == [55, 50]
    assert published(layout) == [80, 70, 60, 56]


def test_a_late_step_of_an_older_attempt_makes_way_for_the_same_step_of_this_one(
    layout: RunLayout,
) -> None:
    start_attempt(layout)
    late = tree(make_step(layout, 60, attempt=1))
    own = tree(make_step(layout, 60, attempt=2, parent=None))
    assert own != late
    assert tree(layout.steps / "step-000000000060") == own
    (home,) = layout.quarantine.iterdir()
    assert tree(home / "step-000000000060") == late
    reason = json.loads((home / "reason.json").read_text())["reason"]
    assert "published by attempt 1 after attempt 2 was claimed" in reason


@pytest.mark.parametrize("step", [50, 60])
def test_a_step_of_the_runs_own_history_makes_way_for_none(layout: RunLayout, step: int) -> None:
    start_attempt(layout)
    make_step(layout, 60, attempt=2)
    before = tree(layout.steps)
    with pytest.raises(CheckpointError, match="never replaced"):
        make_step(layout, step, attempt=2, parent=None)
    assert before.items() <= tree(layout.steps).items()
    assert not layout.quarantine.exists()
