"""A file system that is away for a moment is not taken for damage."""

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import damage, make_step, make_unreadable, two_steps

from ftslurm import files
from ftslurm.checkpoint.records import MANIFEST
from ftslurm.checkpoint.shard import ShardReader, read_index
from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.checkpoint.verify import main as verify
from ftslurm.errors import CheckpointError
from ftslurm.run.layout import RunLayout

SHARD, INDEX = "shard-00001-000.bin", "index-00001.json"
PARTS = ["COMMITTED", MANIFEST, INDEX, SHARD]
PASSING = [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT, errno.ENOTCONN]


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    return two_steps(tmp_path / "run", monkeypatch)


@pytest.fixture
def newest(layout: RunLayout) -> Path:
    return layout.steps / "step-000000000020"


@pytest.mark.parametrize("number", PASSING)
@pytest.mark.parametrize("name", PARTS)
def test_a_step_that_cannot_be_read_just_now_is_not_given_up_for_an_older_one(
    layout: RunLayout, newest: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    store = CheckpointStore(layout)
    with monkeypatch.context() as broken:
        make_unreadable(broken, newest / name, number)
        with pytest.raises(CheckpointError, match="step 20 cannot be read just now") as caught:
            store.choose(full=False)
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == number
        found = store.verify(newest, full=True)
        assert not found.ok
        assert found.unreadable is not None
        assert found.unreadable.errno == number
        assert f"cannot read `{newest / name}`" in found.problems[0]
    choice = store.choose(full=True)
    assert choice.manifest is not None
    assert choice.manifest.step == 20


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR, errno.EISDIR])
@pytest.mark.parametrize("name", PARTS)
def test_a_file_that_is_not_there_is_damage(
    layout: RunLayout, newest: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    make_unreadable(monkeypatch, newest / name, number)
    store = CheckpointStore(layout)
    assert store.verify(newest, full=False).unreadable is None
    choice = store.choose(full=False)
    assert choice.manifest is not None
    assert choice.manifest.step == 10


def timed(work: Callable[[], object]) -> float:
    began_at = time.monotonic()
    work()
    return time.monotonic() - began_at


def lose_files(layout: RunLayout, monkeypatch: pytest.MonkeyPatch, how: str) -> Path:
    """A step 30 of 16 ranks, 14 files of which are listed and cannot be read; to wait for one of
    them takes from one to two seconds."""
    path = make_step(layout, 30, world_size=16)
    action, kind = how.split()
    form = {"indexes": "index-{:05d}.json", "shards": "shard-{:05d}-000.bin"}[kind]
    plan = ";".join(f"{action}@read_step:name={form.format(rank)}" for rank in range(2, 16))
    monkeypatch.setenv("FTSLURM_FAULTS", plan)
    monkeypatch.setattr(files, "VIEW_LAG_S", 2.0)
    return path


@pytest.mark.parametrize("how", ["enoent indexes", "enoent shards"])
def test_a_step_of_many_lost_files_is_given_up_after_the_patience_of_one(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    lost = lose_files(layout, monkeypatch, how)
    store = CheckpointStore(layout)

    def fall_back() -> None:
        choice = store.choose(full=False)
        assert choice.manifest is not None
        assert choice.manifest.step == 20

    def verify_all() -> None:
        problems = store.verify(lost, full=True).problems
        assert len([text for text in problems if "such" in text]) == 14

    assert 1.0 < timed(fall_back) < 17
    assert 1.0 < timed(verify_all) < 17


@pytest.mark.parametrize("how", ["estale indexes", "estale shards"])
def test_a_step_of_many_stale_files_is_said_to_be_unreadable_after_the_patience_of_one(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    lose_files(layout, monkeypatch, how)

    def choose() -> None:
        with pytest.raises(CheckpointError, match="step 30 cannot be read just now"):
            CheckpointStore(layout).choose(full=False)

    assert 1.0 < timed(choose) < 17


@pytest.mark.parametrize("name", ["COMMITTED", MANIFEST])
@pytest.mark.parametrize("action", ["enoent", "estale"])
def test_the_fence_waits_for_all_steps_as_it_would_for_one(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, name: str, action: str
) -> None:
    for step in range(30, 150, 10):
        make_step(layout, step)
    monkeypatch.setenv("FTSLURM_FAULTS", f"{action}@read_step:name={name}")
    monkeypatch.setattr(files, "VIEW_LAG_S", 2.0)
    store, patience = CheckpointStore(layout), files.Patience()
    assert 1.0 < timed(lambda: store.fence(2, [], patience=patience)) < 17
    if action == "enoent":
        assert timed(lambda: store.choose(full=False, patience=patience)) < 17
        if name == "COMMITTED":
            assert 1.0 < timed(store.published) < 17


def test_an_error_that_passes_is_waited_out_behind_a_step_that_is_gone(
    layout: RunLayout, newest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_step(layout, 30)
    left = {30: 1000, 20: 1}
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        step = int(path.parent.name[-3:]) if path.name == "COMMITTED" else 0
        if left.get(step, 0):
            left[step] -= 1
            number = errno.ENOENT if step == 30 else errno.ESTALE
            raise OSError(number, os.strerror(number))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    choice = CheckpointStore(layout).choose(full=False)
    assert choice.path == newest
    assert left[20] == 0


def test_a_step_with_damage_is_rejected_also_when_another_part_cannot_be_read(
    layout: RunLayout, newest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(newest, "shard-00000-000.bin")
    make_unreadable(monkeypatch, newest / SHARD, errno.EIO)
    store = CheckpointStore(layout)
    found = store.verify(newest, full=True)
    assert found.unreadable is None
    assert len(found.problems) > 1
    choice = store.choose(full=True)
    assert [rejected.step for rejected in choice.rejected] == [20]


def test_what_the_ranks_found_about_a_step_outweighs_a_look_that_failed(
    layout: RunLayout, newest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_unreadable(monkeypatch, newest / INDEX, errno.EIO)
    choice = CheckpointStore(layout).choose(full=False, failed={20: "rank 1: damaged"})
    assert [rejected.reason for rejected in choice.rejected] == ["rank 1: damaged"]


def test_an_older_step_that_cannot_be_read_does_not_matter(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_unreadable(monkeypatch, layout.steps / "step-000000000010" / MANIFEST, errno.EIO)
    choice = CheckpointStore(layout).choose(full=True)
    assert choice.manifest is not None
    assert choice.manifest.step == 20


def test_verify_names_what_it_could_not_read(
    layout: RunLayout,
    newest: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_unreadable(monkeypatch, newest / INDEX, errno.EIO)
    assert verify([str(layout.root), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["restore"] is None
    assert "step 20 cannot be read just now" in found["findings"][-1]
    assert any(f"{INDEX}`: Input/output error" in text for text in found["steps"][0]["problems"])
    assert [step["is_unreadable"] for step in found["steps"]] == [True, False]
    assert verify([str(newest)]) == 1
    assert "unreadable" in capsys.readouterr().out


def test_a_folder_that_cannot_be_listed_is_unreadable(
    layout: RunLayout, newest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_unreadable(monkeypatch, newest, errno.EACCES)
    found = CheckpointStore(layout).verify(newest, full=True)
    assert found.unreadable is not None
    assert len(found.problems) == 1


@pytest.mark.parametrize(("number", "is_passing"), [(errno.EIO, True), (errno.ENOENT, False)])
def test_readers_of_a_step_say_by_the_cause_whether_it_may_pass(
    layout: RunLayout,
    newest: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    is_passing: bool,
) -> None:
    manifest = CheckpointStore(layout).verify(newest, full=False).manifest
    assert manifest is not None
    entry, algorithm = manifest.indexes[1], manifest.digest_algorithm
    record = read_index(newest, entry, algorithm).tensors[0]
    make_unreadable(monkeypatch, newest / SHARD, number)
    make_unreadable(monkeypatch, newest / INDEX, number)
    with pytest.raises(CheckpointError) as caught:
        read_index(newest, entry, algorithm)
    assert (caught.value.__cause__ is not None) == is_passing
    with ShardReader(newest, algorithm) as reader, pytest.raises(CheckpointError) as caught:
        reader.read(record, memoryview(bytearray(record.bytes)))
    assert (caught.value.__cause__ is not None) == is_passing
