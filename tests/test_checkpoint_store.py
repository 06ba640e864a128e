"""Publishing, choosing, fencing, quarantine and retention over real folders."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import pytest
from checkpoints import (
    damage,
    make_layout,
    make_manifest,
    make_step,
    names,
    skip_fsync,
    tree,
    write_ranks,
)

from ftslurm.checkpoint import rename
from ftslurm.checkpoint.choose import Choice, Rejected
from ftslurm.checkpoint.records import Parent
from ftslurm.checkpoint.rename import rename_new
from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.errors import CheckpointError
from ftslurm.files import write_json
from ftslurm.run.attempts import AdoptedStep
from ftslurm.run.layout import RunLayout

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    skip_fsync(monkeypatch)
    return make_layout(tmp_path / "run")


def chosen(layout: RunLayout, **options: Any) -> Optional[int]:
    choice = CheckpointStore(layout).choose(full=True, **options)
    return None if choice.manifest is None else choice.manifest.step


def published(layout: RunLayout) -> list[int]:
    return [step.step for step in CheckpointStore(layout).published()]


def adopted(layout: RunLayout) -> list[AdoptedStep]:
    steps = CheckpointStore(layout).published()
    return [AdoptedStep(step.step, step.committed_digest) for step in steps]


def parent_of(layout: RunLayout, step: int) -> Parent:
    (found,) = [item for item in CheckpointStore(layout).published() if item.step == step]
    return Parent(found.step, found.committed_digest)


def test_nothing_saved_is_told_from_nothing_restorable(layout: RunLayout) -> None:
    store = CheckpointStore(layout)
    assert store.choose(full=True) == Choice(None, None, [])
    damage(make_step(layout, 10))
    choice = store.choose(full=True)
    assert choice.path is None
    assert [rejected.step for rejected in choice.rejected] == [10]


def test_a_published_step_is_complete_and_latest_names_it(layout: RunLayout) -> None:
    make_step(layout, 10)
    path = make_step(layout, 20, algorithm="sha256", extra={"best": float("inf")})
    store = CheckpointStore(layout)
    found = store.verify(path, full=True, expect_step=20)
    assert (found.ok, found.problems, found.step) == (True, [], 20)
    assert found.bytes_read > 20_000
    assert found.manifest is not None
    assert found.manifest.extra == {"best": float("inf")}
    assert found.manifest.parent == parent_of(layout, 10)
    assert names(layout.steps) == ["step-000000000010", "step-000000000020"]
    latest = json.loads(layout.latest_json.read_text())
    assert latest["step"] == 20
    assert (layout.checkpoints / latest["path"]).samefile(path)
    assert latest["digest"] == store.published()[0].committed_digest


def test_each_thing_is_durable_before_the_next_one_relies_on_it(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    move, write = os.rename, os.replace

    def fsync(fd: int) -> None:
        # write_atomic syncs under a temporary name: .NAME.random.tmp
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        events.append(f"sync {name.rsplit('.', 2)[0].lstrip('.') if name[-4:] == '.tmp' else name}")

    def replaced(source: Any, target: Any) -> None:
        events.append(f"see {Path(target).name}")
        write(source, target)

    def renamed(source: Path, target: Path) -> int:
        events.append(f"see {target.name}")
        move(source, target)
        return 0

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(rename, "_rename_noreplace", renamed)
    make_step(layout, 10, world_size=1)
    temporary, step = "step-000000000010.tmp-0001", "step-000000000010"
    order = [
        "sync shard-00000-000.bin",
        *("sync index-00000.json", "see index-00000.json", f"sync {temporary}"),
        *("sync manifest.json", "see manifest.json", f"sync {temporary}"),
        *("sync COMMITTED", "see COMMITTED", f"sync {temporary}"),
        *(f"see {step}", "sync steps"),
        *("sync latest.json", "see latest.json", "sync checkpoints"),
    ]
    rest = iter(events)
    assert all(event in rest for event in order), events


CRASH = """
import os, sys
os.fsync = os.fdatasync = lambda fd: None  # what is written survives the process, not a power cut
sys.path[:0] = {paths!r}
from pathlib import Path
from checkpoints import make_step
from ftslurm.run.layout import RunLayout
make_step(RunLayout(Path({root!r})), 20)
"""


def crash_at(layout: RunLayout, plan: str) -> int:
    """Publish step 20 in a child that breaks by `plan`; its return code."""
    paths = [str(ROOT), str(ROOT / "tests")]
    code = CRASH.format(paths=paths, root=str(layout.root))
    environ = {**os.environ, "FTSLURM_FAULTS": plan}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, timeout=60, capture_output=True, check=False
    )
    return done.returncode


@pytest.mark.parametrize(
    ("point", "survivor"),
    [
        ("persist:rank=1", 10),
        ("before_commit", 10),
        ("before_rename", 10),
        ("after_rename", 20),
    ],
)
def test_a_writer_killed_anywhere_leaves_the_right_step(
    layout: RunLayout, point: str, survivor: int
) -> None:
    make_step(layout, 10)
    before = tree(layout.steps / "step-000000000010")
    assert crash_at(layout, f"kill@{point}") == -signal.SIGKILL
    assert chosen(layout) == survivor
    assert tree(layout.steps / "step-000000000010") == before
    assert (layout.steps / "step-000000000020.tmp-0001").exists() == (survivor == 10)
    if survivor == 10:
        make_step(layout, 20)  # the same attempt writes over its own leftover
    else:
        with pytest.raises(CheckpointError, match="never replaced"):
            make_step(layout, 20, parent=None)
    make_step(layout, 30, attempt=2)
    CheckpointStore(layout).retain(9, 0, set(), attempt=2)
    assert chosen(layout) == 30
    assert published(layout) == [30, 20, 10]
    assert len(names(layout.steps)) == 3


@pytest.mark.parametrize("point", ["before_commit", "before_rename"])
def test_a_full_disk_while_publishing_is_an_error_and_no_step(
    layout: RunLayout, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTSLURM_FAULTS", f"enospc@{point}:step=20:attempt=1")
    make_step(layout, 10)
    with pytest.raises(CheckpointError, match="cannot publish step 20 .* No space left"):
        make_step(layout, 20)
    assert chosen(layout) == 10
    assert make_step(layout, 20, attempt=2).exists()


@pytest.mark.parametrize("there", ["step", "empty folder", "file"])
def test_nothing_that_bears_the_name_of_the_step_is_replaced(layout: RunLayout, there: str) -> None:
    target = layout.steps / "step-000000000010"
    temporary, indexes = write_ranks(layout, 10, attempt=2)
    if there == "step":
        make_step(layout, 10)
    elif there == "file":
        target.write_text("x")
    else:
        target.mkdir()
    before = tree(layout.steps)
    with pytest.raises(CheckpointError, match="quarantine what is there first"):
        CheckpointStore(layout).publish(temporary, make_manifest(10, indexes, attempt=2))
    after = tree(layout.steps)
    assert {name: after[name] for name in before} == before
    CheckpointStore(layout).quarantine(Rejected(10, target, "in the way"))
    assert make_step(layout, 10, attempt=2).exists()


def test_rename_replaces_nothing_where_the_kernel_cannot_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rename, "_rename_noreplace", lambda source, target: 22)  # EINVAL, as on NFS
    (tmp_path / "a").mkdir()
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileExistsError):
        rename_new(tmp_path / "a", tmp_path / "empty")
    rename_new(tmp_path / "a", tmp_path / "b")
    assert names(tmp_path) == ["b", "empty"]


def test_a_step_that_is_not_whole_is_not_committed(layout: RunLayout) -> None:
    make_step(layout, 10)
    breaks: dict[str, Callable[[Path], object]] = {
        "has 4096 bytes, expected": lambda path: os.truncate(path / "shard-00000-000.bin", 4096),
        "No such file": lambda path: (path / "shard-00001-000.bin").unlink(),
        "not the index": lambda path: damage(path, "index-00001.json"),
        "belongs to no index": lambda path: (path / "core").write_text("x"),
    }
    for match, break_it in breaks.items():
        temporary, indexes = write_ranks(layout, 20)
        break_it(temporary)
        with pytest.raises(CheckpointError, match=match):
            CheckpointStore(layout).publish(temporary, make_manifest(20, indexes))
        assert not (temporary / "COMMITTED").exists()
        assert chosen(layout) == 10
    temporary, indexes = write_ranks(layout, 20)
    with pytest.raises(CheckpointError, match="lists 2 indexes for world_size 3"):
        CheckpointStore(layout).publish(
            temporary, replace(make_manifest(20, indexes), world_size=3)
        )
    temporary, indexes = write_ranks(layout, 20)
    with pytest.raises(CheckpointError, match="pieces cover"):
        CheckpointStore(layout).publish(temporary, make_manifest(20, indexes[:1]))


def test_a_temporary_folder_of_another_step_or_attempt_is_refused(layout: RunLayout) -> None:
    temporary, indexes = write_ranks(layout, 20)
    for manifest in (make_manifest(30, indexes), make_manifest(20, indexes, attempt=2)):
        with pytest.raises(CheckpointError, match="cannot be published from"):
            CheckpointStore(layout).publish(temporary, manifest)


def test_a_run_folder_that_is_gone_is_an_error_and_is_not_made_again(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "unmounted")
    with pytest.raises(CheckpointError, match="cannot make"):
        CheckpointStore(layout).create_temporary(10, 1)
    assert not layout.root.exists()


def test_a_leftover_of_the_same_attempt_does_not_leak_into_the_next_save(layout: RunLayout) -> None:
    leftover, _ = write_ranks(layout, 20, world_size=4)
    assert make_step(layout, 20, world_size=2).exists()
    assert not leftover.exists()
    assert chosen(layout) == 20


def test_choosing_goes_back_step_by_step_and_names_each_reason(layout: RunLayout) -> None:
    for step in (10, 20, 30):
        make_step(layout, step)
    damage(layout.steps / "step-000000000030")
    (layout.steps / "step-000000000020" / "COMMITTED").unlink()
    choice = CheckpointStore(layout).choose(full=True)
    assert choice.manifest is not None
    assert choice.manifest.step == 10
    assert [rejected.step for rejected in choice.rejected] == [30, 20]
    assert "model/weight" in choice.rejected[0].reason
    assert "COMMITTED" in choice.rejected[1].reason


def test_a_quick_choice_takes_what_only_reading_all_can_refute(layout: RunLayout) -> None:
    make_step(layout, 10)
    damage(make_step(layout, 20))
    store = CheckpointStore(layout)
    assert store.choose(full=False).manifest.step == 20  # type: ignore[union-attr]
    choice = store.choose(full=False, failed={20: "rank 1: damaged"})
    assert choice.manifest is not None
    assert choice.manifest.step == 10
    assert choice.rejected == [Rejected(20, layout.steps / "step-000000000020", "rank 1: damaged")]


def test_after_a_bad_step_none_off_its_lineage_is_taken(layout: RunLayout) -> None:
    make_step(layout, 10)
    make_step(layout, 20)
    make_step(layout, 25)  # trained on from 20, then given up
    damage(make_step(layout, 30, attempt=2, parent=parent_of(layout, 20)))
    choice = CheckpointStore(layout).choose(full=True)
    assert choice.manifest is not None
    assert choice.manifest.step == 20
    assert "step 30 continues from step 20" in choice.rejected[1].reason


def test_the_parent_has_to_be_the_very_step_that_was_continued(layout: RunLayout) -> None:
    make_step(layout, 10)
    make_step(layout, 20)
    parent = replace(parent_of(layout, 20), digest="0" * 64)
    damage(make_step(layout, 30, parent=parent))
    choice = CheckpointStore(layout).choose(full=True)
    assert choice.manifest is not None
    assert choice.manifest.step == 10
    assert "not the step 20 from which step 30 continues" in choice.rejected[1].reason


def test_a_step_older_than_a_retired_parent_is_taken(layout: RunLayout) -> None:
    make_step(layout, 10)
    damage(make_step(layout, 30, parent=Parent(20, "0" * 64)))
    assert chosen(layout) == 10


def test_a_trajectory_from_step_0_has_no_older_steps(layout: RunLayout) -> None:
    make_step(layout, 10)
    damage(make_step(layout, 20, attempt=2, parent=None))
    choice = CheckpointStore(layout).choose(full=True)
    assert choice.path is None
    assert "was trained from step 0" in choice.rejected[1].reason


def test_a_retrained_step_takes_the_place_of_the_quarantined_one(layout: RunLayout) -> None:
    store = CheckpointStore(layout)
    make_step(layout, 10)
    for attempt in (1, 2, 3):
        path = make_step(layout, 20, attempt=attempt)
        damage(path)
        before = tree(path)
        (rejected,) = store.choose(full=True).rejected
        home = store.quarantine(rejected)
        assert home.parent == layout.quarantine
        assert tree(home / "step-000000000020") == before
        reason = json.loads((home / "reason.json").read_text())
        assert reason["reason"] == rejected.reason
        assert reason["from"] == "checkpoints/steps/step-000000000020"
    assert len(names(layout.quarantine)) == 3
    make_step(layout, 20, attempt=4)
    assert chosen(layout) == 20


def test_a_step_published_late_by_an_older_attempt_is_fenced_off(layout: RunLayout) -> None:
    make_step(layout, 10)
    make_step(layout, 20)
    known = adopted(layout)
    make_step(layout, 30, attempt=1)  # attempt 2 has been claimed meanwhile
    store = CheckpointStore(layout)
    choice = store.choose(full=True, attempt=2, adopted=known)
    assert choice.manifest is not None
    assert choice.manifest.step == 20
    (stray,) = store.fence(2, known)
    assert stray.step == 30
    assert "published by attempt 1 after attempt 2 was claimed" in stray.reason
    store.quarantine(stray)
    make_step(layout, 30, attempt=2)
    assert chosen(layout, attempt=2, adopted=known) == 30
    assert store.fence(2, known) == []


def test_the_fence_knows_steps_by_digest_and_lets_adopted_ones_pass(layout: RunLayout) -> None:
    make_step(layout, 10)
    store = CheckpointStore(layout)
    assert store.fence(2, adopted(layout)) == []
    assert [row.step for row in store.fence(2, [AdoptedStep(10, "0" * 64)])] == [10]
    assert [row.step for row in store.fence(2, [])] == [10]
    assert store.fence(2, None) == []
    assert store.fence(1, []) == []


def test_an_attempt_that_was_superseded_may_not_choose(layout: RunLayout) -> None:
    make_step(layout, 10, attempt=3)
    with pytest.raises(CheckpointError, match="attempt 2 has been superseded"):
        CheckpointStore(layout).choose(full=False, attempt=2, adopted=[])


def test_a_step_of_another_run_is_refused_and_does_not_define_the_lineage(
    layout: RunLayout, tmp_path: Path
) -> None:
    write_json(layout.run_json, {"schema_version": 1, "run_id": "gpt-test"})
    make_step(layout, 10)
    other = make_layout(tmp_path / "other")
    make_step(other, 20, run_id="other").rename(layout.steps / "step-000000000020")
    choice = CheckpointStore(layout).choose(full=True)
    assert choice.manifest is not None
    assert choice.manifest.step == 10
    assert "of run 'other', expected `gpt-test`" in choice.rejected[0].reason
