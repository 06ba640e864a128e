"""What a restore makes of a file system that fails, and of steps that are gone."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from test_checkpointer import Trainer, damage, same

from ftslurm import files
from ftslurm.checkpoint.reading import StepFile
from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.errors import CheckpointError
from ftslurm.run.attempts import AdoptedStep
from ftslurm.train.restore import MisreadError, Restorer, StorageError, _doubt

pytestmark = pytest.mark.torch

FIRST, SECOND = "step-000000000001", "step-000000000002"


@pytest.fixture
def saved(tmp_path: Path) -> Trainer:
    """A run with the steps 1 and 2."""
    trainer = Trainer(tmp_path)
    assert trainer.save(1) and trainer.save(2)
    return trainer


def adopted(trainer: Trainer) -> list[AdoptedStep]:
    steps = CheckpointStore(trainer.layout).published()
    return [AdoptedStep(step.step, step.committed_digest) for step in steps]


def break_reading(monkeypatch: pytest.MonkeyPatch, name: str, number: int, *, times: int) -> None:
    """The next `times` reads of a file called `name` of step 2 fail with errno `number`."""
    read_bytes = Path.read_bytes
    left = [times]

    def read(path: Path) -> bytes:
        if path.name == name and path.parent.name == SECOND and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)


@pytest.mark.parametrize("name", ["COMMITTED", "manifest.json", "index-00000.json"])
def test_a_record_that_cannot_be_read_now_rejects_nothing(
    tmp_path: Path, saved: Trainer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    known = adopted(saved)
    second = Trainer(tmp_path, seed=1, attempt=2)
    break_reading(monkeypatch, name, errno.ESTALE, times=1000)
    with pytest.raises(StorageError, match="Stale file handle.*rank 0"):
        second.checkpointer.restore(known)
    assert second.steps() == [FIRST, SECOND]
    assert not second.reported("rejected")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT])
def test_a_record_that_fails_one_rank_after_rank_0_has_read_it_rejects_nothing(
    tmp_path: Path, saved: Trainer, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    known = adopted(saved)
    second = Trainer(tmp_path, seed=1, attempt=2)
    load = Restorer._load

    def load_broken(self: Restorer, offer: dict) -> tuple:
        with monkeypatch.context() as broken:
            break_reading(broken, "index-00000.json", number, times=1000)
            return load(self, offer)

    monkeypatch.setattr(Restorer, "_load", load_broken)
    with pytest.raises(StorageError, match="step 2 cannot be read now"):
        second.checkpointer.restore(known)
    assert second.steps() == [FIRST, SECOND]


def test_a_shard_that_cannot_be_read_now_rejects_nothing(
    tmp_path: Path, saved: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftslurm.checkpoint import reading

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    second = Trainer(tmp_path, seed=1, attempt=2)
    monkeypatch.setattr(reading, "read_at", broken)
    with pytest.raises(StorageError, match="step 2 cannot be read now .rank 0 on .*Input/output"):
        second.checkpointer.restore(adopted(saved))
    assert second.steps() == [FIRST, SECOND]
    monkeypatch.undo()
    third = Trainer(tmp_path, seed=1, attempt=3)
    assert third.checkpointer.restore(adopted(saved)).step == 2
    assert same(saved.values(), third.values())


@pytest.mark.parametrize("name", ["COMMITTED", "manifest.json", "index-00000.json"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOENT, errno.EIO])
def test_a_record_that_comes_into_sight_late_costs_no_step(
    tmp_path: Path, saved: Trainer, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    monkeypatch.setattr(files, "VIEW_LAG_S", 30.0)
    monkeypatch.setattr(files, "STUMBLE_S", 30.0)
    known = adopted(saved)
    second = Trainer(tmp_path, seed=1, attempt=2)
    break_reading(monkeypatch, name, number, times=2)
    assert second.checkpointer.restore(known).step == 2
    assert not second.reported("rejected")


def test_steps_that_are_listed_and_gone_cost_the_patience_of_one_file(
    tmp_path: Path, saved: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saved.save(3)
    known = adopted(saved)
    second = Trainer(tmp_path, seed=1, attempt=2)
    read_bytes, tried = Path.read_bytes, Counter[str]()

    def read(path: Path) -> bytes:
        if path.name == "COMMITTED" and path.parent.name > FIRST:
            tried[path.parent.name] += 1
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    monkeypatch.setattr(files, "VIEW_LAG_S", 6.0)  # of which more than three are waited
    began_at = time.monotonic()
    assert second.checkpointer.restore(known).step == 1
    assert time.monotonic() - began_at > 3.0
    assert sorted(tried) == [SECOND, "step-000000000003"]
    assert tried[SECOND] <= 2 < tried["step-000000000003"]
    assert [row["step"] for row in second.reported("rejected")] == [3, 2]


def test_an_adopted_step_is_waited_for(
    tmp_path: Path, saved: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "VIEW_LAG_S", 30.0)
    known, step = adopted(saved), saved.layout.steps / SECOND
    step.rename(tmp_path / SECOND)
    second = Trainer(tmp_path, seed=1, attempt=2)
    comes = threading.Timer(0.5, lambda: (tmp_path / SECOND).rename(step))
    comes.start()
    assert second.checkpointer.restore(known).step == 2
    comes.join()


def test_a_shard_that_rank_0_misses_too_is_damage(tmp_path: Path, saved: Trainer) -> None:
    second = Trainer(tmp_path, seed=1, attempt=2)
    next((saved.layout.steps / SECOND).glob("shard-*.bin")).unlink()
    assert second.checkpointer.restore(adopted(saved)).step == 1
    assert second.steps() == [FIRST]


def test_a_file_that_only_another_rank_misses_is_no_damage(saved: Trainer) -> None:
    checkpointer = saved.checkpointer
    restorer = Restorer(checkpointer._state, checkpointer._place, device=None, attempt=2, node="a")
    step = saved.layout.steps / SECOND
    offer = {"path": str(step), "step": 2}
    unread = [{}, {"unread": "cannot read `x`: No such file or directory", "node": "b"}]
    assert restorer._judge(offer, unread) == {
        "unread": "rank 1 on b: cannot read `x`: No such file or directory"
    }
    torn = {"damage": "digest", "node": "c"}
    told = {"damage": "rank 2 on c: digest", "doubts": []}
    assert restorer._judge(offer, [*unread, torn]) == told
    next(step.glob("shard-*.bin")).unlink()
    assert "damage" in restorer._judge(offer, unread)


def test_bytes_that_are_wrong_on_another_node_only_are_held_against_that_node(
    tmp_path: Path, saved: Trainer
) -> None:
    checkpointer = saved.checkpointer
    restorer = Restorer(checkpointer._state, checkpointer._place, device=None, attempt=2, node="a")
    step = saved.layout.steps / SECOND
    offer = {"path": str(step), "step": 2}
    shard = next(step.glob("shard-*.bin")).name
    rows = [{}, {"misread": "no such digest", "file": shard, "node": "b"}, {}]
    told = "rank 1 on b: no such digest"
    assert restorer._judge(offer, rows) == {"misread": told, "ranks": [1], "node": "a"}
    damage(step)
    found = restorer._judge(offer, rows)
    assert found["damage"] == told and found["doubts"][0]["files"] == [shard]


def test_a_second_reader_waits_once_for_all_that_is_listed_and_gone(
    saved: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for it in a collective that has a limit."""
    checkpointer = saved.checkpointer
    restorer = Restorer(checkpointer._state, checkpointer._place, device=None, attempt=2, node="b")
    doubts = [
        _doubt(step, saved.layout.steps / name, "x") for step, name in ((2, SECOND), (1, FIRST))
    ]
    looks: list[str] = []

    def gone(path: Path) -> bytes:
        if threading.current_thread() is threading.main_thread():  # not who removes old steps
            looks.append(path.parent.name)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    monkeypatch.setattr(files, "VIEW_LAG_S", 0.3)
    monkeypatch.setattr(Path, "read_bytes", gone)
    assert restorer._found_whole(doubts) is None
    assert restorer._patience.is_past_lag and looks.count(FIRST) == 1


def test_bytes_that_are_wrong_once_cost_no_step(
    tmp_path: Path, saved: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = adopted(saved)
    second = Trainer(tmp_path, seed=1, attempt=2)
    read, flipped = StepFile.read_at, []

    def misread(file: StepFile, into: memoryview, offset: int) -> int:
        count = read(file, into, offset)
        if not flipped:
            into[0] ^= 1
            flipped.append(offset)
        return count

    monkeypatch.setattr(StepFile, "read_at", misread)
    with pytest.raises(
        MisreadError, match="step 2 was read wrongly .rank 0 on .*does not have the dig"
    ):
        second.checkpointer.restore(known)
    assert second.steps() == [FIRST, SECOND]
    third = Trainer(tmp_path, seed=1, attempt=3)
    assert third.checkpointer.restore(known).step == 2


def test_a_file_system_that_fails_before_the_first_offer_is_not_final(
    tmp_path: Path, saved: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method in ("fence", "choose"):
        second = Trainer(tmp_path, seed=1, attempt=2)
        with monkeypatch.context() as broken:
            broken.setattr(CheckpointStore, method, stale)
            with pytest.raises(StorageError, match="Stale file handle"):
                second.checkpointer.restore(adopted(saved))


def stale(*_: object, **__: object) -> None:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_a_rejected_step_that_cannot_be_moved_now_is_not_final(
    tmp_path: Path, saved: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(saved.layout.steps / SECOND)
    second = Trainer(tmp_path, seed=1, attempt=2)
    monkeypatch.setattr("ftslurm.checkpoint.quarantine.rename_new", stale)
    with pytest.raises(StorageError, match="aside"):
        second.checkpointer.restore(adopted(saved))


def test_adopted_steps_that_have_vanished_are_named_and_nothing_starts_over(
    tmp_path: Path, saved: Trainer
) -> None:
    known = adopted(saved)
    saved.layout.steps.rename(tmp_path / "elsewhere")
    second = Trainer(tmp_path, seed=1, attempt=2)
    with pytest.raises(CheckpointError, match=r"adopted the steps \[2, 1\].*start from step 0"):
        second.checkpointer.restore(known)


def test_going_on_from_an_older_step_than_was_adopted_is_said(
    tmp_path: Path, saved: Trainer
) -> None:
    known = adopted(saved)
    (saved.layout.steps / SECOND).rename(tmp_path / "elsewhere")
    second = Trainer(tmp_path, seed=1, attempt=2)
    assert second.checkpointer.restore(known).step == 1
    assert second.reported("fell_back") == [{"step": 1, "adopted": 2, "vanished": [2]}]


def test_a_rejected_step_leaves_no_tensors_behind_while_the_next_is_read(
    tmp_path: Path, saved: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gc
    import weakref

    seen: list[weakref.ref] = []
    load = Restorer._load

    def note(self: Restorer, offer: dict) -> tuple:
        gc.collect()
        assert all(ref() is None for ref in seen)
        loaded, answer = load(self, offer)
        seen.append(weakref.ref(loaded[0]))
        if offer["step"] == 2:  # as if another rank had found damage
            answer = {"damage": "digest", "node": "b"}
        return loaded, answer

    monkeypatch.setattr(Restorer, "_load", note)
    second = Trainer(tmp_path, seed=1, attempt=2)
    assert second.checkpointer.restore(adopted(saved)).step == 1
    assert len(seen) == 2
