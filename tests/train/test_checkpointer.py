"""Saving and restoring on one rank, with real files: what is reported, what is kept, what fails."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.errors import CheckpointError
from ftslurm.run.attempts import AdoptedStep
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import CheckpointSpec
from ftslurm.train.arena import Arena
from ftslurm.train.checkpointer import Checkpointer
from ftslurm.train.distributed import Groups
from ftslurm.train.leaves import StateMismatch
from ftslurm.train.save_facts import SaveFacts
from ftslurm.train.state import TrainState

pytestmark = pytest.mark.torch

POSITION = {"epoch": 0, "samples": 8, "tokens": 64}
DEADLINE_S = 90.0


class Trainer:
    """A run of one rank: model, optimizer, checkpointer and what it reported."""

    def __init__(self, root: Path, *, seed: int = 0, attempt: int = 1, width: int = 6, **spec):
        torch.manual_seed(seed)
        self.layout = RunLayout(root)
        self.model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.events: list[tuple[str, dict]] = []
        self.checkpointer = Checkpointer(
            layout=self.layout,
            spec=CheckpointSpec(**spec),
            facts=SaveFacts("run", 1, {"dp": 1}, 8, 0, torch.__version__, *[None] * 5),
            groups=Groups(0, 1, 0, torch.device("cpu"), None, None, None),
            state=TrainState(self.model, self.optimizer),
            attempt=attempt,
            on_event=lambda kind, facts: self.events.append((kind, facts)),
        )

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 4)).sum().backward()
        self.optimizer.step()

    def save(self, step: int) -> bool:
        """Train, save, wait for the commit."""
        self.train()
        return self.checkpointer.emergency_save(step, POSITION, deadline_s=DEADLINE_S)

    def fail_to_save(self, step: int) -> None:
        self.checkpointer.save(step, POSITION)
        self.checkpointer.close(timeout_s=DEADLINE_S)

    def values(self) -> list[torch.Tensor]:
        moments = [v for s in self.optimizer.state.values() for v in s.values()]
        return [t.detach().clone() for t in (*self.model.parameters(), *moments)]

    def reported(self, kind: str) -> list[dict]:
        return [facts for name, facts in self.events if name == kind]

    def steps(self) -> list[str]:
        return sorted(path.name for path in self.layout.steps.iterdir())


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


def damage(path: Path) -> None:
    """Flip a bit of the first byte of a shard: only reading every byte finds it."""
    shard = next(path.glob("shard-*.bin"))
    data = bytearray(shard.read_bytes())
    data[0] ^= 1
    shard.write_bytes(data)


@pytest.fixture
def gate(monkeypatch):
    """Publishing waits until the gate is opened."""
    opened = threading.Event()
    publish = CheckpointStore.publish

    def wait_and_publish(self, temporary, manifest):
        assert opened.wait(DEADLINE_S)
        return publish(self, temporary, manifest)

    monkeypatch.setattr(CheckpointStore, "publish", wait_and_publish)
    yield opened
    opened.set()


def test_a_saved_step_is_restored_bit_for_bit(tmp_path):
    first = Trainer(tmp_path)
    assert first.save(5)
    second = Trainer(tmp_path, seed=1, attempt=2)
    restored = second.checkpointer.restore(None)
    assert (restored.step, restored.position) == (5, POSITION)
    assert restored.generators_continue
    assert second.checkpointer.committed_step == 5
    assert same(first.values(), second.values())
    assert [facts["step"] for facts in second.reported("restored")] == [5]


def test_values_changed_right_after_save_returns_do_not_reach_the_checkpoint(tmp_path, gate):
    first = Trainer(tmp_path)
    first.train()
    expected = first.values()
    assert first.checkpointer.save(1, POSITION)
    with torch.no_grad():
        for parameter in first.model.parameters():
            parameter.fill_(9.0)
    gate.set()
    first.checkpointer.close(timeout_s=DEADLINE_S)
    second = Trainer(tmp_path, seed=1)
    second.checkpointer.restore(None)
    assert same(expected, second.values())


def test_nothing_saved_is_none_and_a_second_restore_finds_the_newest(tmp_path):
    trainer = Trainer(tmp_path)
    assert trainer.checkpointer.restore(None) is None
    assert trainer.checkpointer.committed_step is None
    assert trainer.save(1) and trainer.save(2)
    assert trainer.checkpointer.restore(None).step == 2


def test_a_step_is_reported_committed_only_after_it_is_published(tmp_path, gate):
    trainer = Trainer(tmp_path)
    trainer.checkpointer.save(1, POSITION)
    trainer.checkpointer.poll()
    assert trainer.checkpointer.committed_step is None
    assert not trainer.reported("committed")
    gate.set()
    trainer.checkpointer.close(timeout_s=DEADLINE_S)
    assert trainer.checkpointer.committed_step == 1
    assert [facts["step"] for facts in trainer.reported("committed")] == [1]


def test_a_save_is_skipped_while_one_is_in_flight_when_the_policy_says_so(tmp_path, gate):
    trainer = Trainer(tmp_path, when_busy="skip")
    assert trainer.checkpointer.save(1, POSITION)
    assert not trainer.checkpointer.save(2, POSITION)
    assert [facts["step"] for facts in trainer.reported("save_skipped")] == [2]
    gate.set()
    trainer.checkpointer.close(timeout_s=DEADLINE_S)
    assert trainer.steps() == ["step-000000000001"]


def test_a_save_waits_for_the_one_in_flight_when_the_policy_says_so(tmp_path, gate):
    trainer = Trainer(tmp_path)
    trainer.checkpointer.save(1, POSITION)
    opener = threading.Timer(0.2, gate.set)
    opener.start()
    assert trainer.checkpointer.save(2, POSITION)
    assert trainer.checkpointer.committed_step == 1
    trainer.checkpointer.close(timeout_s=DEADLINE_S)
    assert trainer.steps() == ["step-000000000001", "step-000000000002"]


def test_an_emergency_save_says_no_when_its_deadline_passes(tmp_path, gate):
    trainer = Trainer(tmp_path)
    assert not trainer.checkpointer.emergency_save(3, POSITION, deadline_s=0.2)
    assert trainer.checkpointer.committed_step is None
    gate.set()
    trainer.checkpointer.close(timeout_s=DEADLINE_S)
    assert trainer.checkpointer.committed_step == 3


def test_an_emergency_save_of_a_committed_step_does_not_write_it_again(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.checkpointer.save(3, POSITION)
    assert trainer.checkpointer.emergency_save(3, POSITION, deadline_s=DEADLINE_S)
    assert trainer.checkpointer.emergency_save(3, POSITION, deadline_s=DEADLINE_S)
    assert len(trainer.reported("committed")) == 1


def test_a_full_disk_fails_the_save_and_leaves_the_step_before_it(tmp_path, monkeypatch):
    trainer = Trainer(tmp_path)
    assert trainer.save(1)
    monkeypatch.setenv("FTSLURM_FAULTS", "enospc@persist:rank=0")
    trainer.fail_to_save(2)
    (failure,) = trainer.reported("save_failed")
    assert (failure["step"], failure["rank"], failure["in_a_row"]) == (2, 0, 1)
    assert "No space left on device" in failure["reason"]
    assert trainer.checkpointer.failed_saves == 1
    assert trainer.checkpointer.committed_step == 1
    assert trainer.steps() == ["step-000000000001"]
    monkeypatch.delenv("FTSLURM_FAULTS")
    assert trainer.save(2)
    assert trainer.checkpointer.committed_step == 2


@pytest.mark.parametrize("point", ["before_commit", "before_rename"])
def test_an_io_error_while_publishing_fails_the_save(tmp_path, monkeypatch, point):
    trainer = Trainer(tmp_path)
    monkeypatch.setenv("FTSLURM_FAULTS", f"eio@{point}")
    assert not trainer.save(1)
    assert "Input/output error" in trainer.reported("save_failed")[0]["reason"]
    assert trainer.steps() == []


def test_too_many_failed_saves_in_a_row_end_the_attempt(tmp_path, monkeypatch):
    trainer = Trainer(tmp_path, max_failed_saves=2)
    monkeypatch.setenv("FTSLURM_FAULTS", "eio@persist")
    trainer.fail_to_save(1)
    monkeypatch.delenv("FTSLURM_FAULTS")
    assert trainer.save(2)
    monkeypatch.setenv("FTSLURM_FAULTS", "eio@persist")
    trainer.fail_to_save(3)
    trainer.fail_to_save(4)
    with pytest.raises(CheckpointError, match="2 saves in a row have failed"):
        trainer.checkpointer.save(5, POSITION)
    assert trainer.checkpointer.committed_step == 2


@pytest.mark.parametrize("name", ["enospc", "edquot", "erofs", "eacces"])
def test_what_no_other_attempt_would_do_better_never_ends_this_one(tmp_path, monkeypatch, name):
    trainer = Trainer(tmp_path, max_failed_saves=1)
    monkeypatch.setenv("FTSLURM_FAULTS", f"{name}@persist")
    for step in (1, 2, 3):
        trainer.fail_to_save(step)
    assert [event["in_a_row"] for event in trainer.reported("save_failed")] == [1, 2, 3]
    monkeypatch.delenv("FTSLURM_FAULTS")
    assert trainer.save(4)


def test_a_last_save_without_space_is_tried_again_until_there_is_some(tmp_path, monkeypatch):
    monkeypatch.setattr("ftslurm.train.checkpointer.RETRY_S", 0.01)
    trainer = Trainer(tmp_path)
    monkeypatch.setenv("FTSLURM_FAULTS", "enospc@persist:step=7:times=3")
    assert trainer.checkpointer.emergency_save(7, POSITION, deadline_s=DEADLINE_S)
    assert len(trainer.reported("save_failed")) == 3
    monkeypatch.setenv("FTSLURM_FAULTS", "enospc@persist:step=8")
    assert not trainer.checkpointer.emergency_save(8, POSITION, deadline_s=0.3)
    monkeypatch.setenv("FTSLURM_FAULTS", "eio@persist:step=9")
    assert not trainer.checkpointer.emergency_save(9, POSITION, deadline_s=DEADLINE_S)
    assert len([1 for event in trainer.reported("save_failed") if event["step"] == 9]) == 1


def test_an_error_of_the_background_thread_is_not_lost(tmp_path, monkeypatch):
    trainer = Trainer(tmp_path)
    monkeypatch.setattr(
        "ftslurm.train.persist.gather_json",
        lambda *_, **__: (_ for _ in ()).throw(RuntimeError("peer")),
    )
    trainer.fail_to_save(1)
    assert "peer" in trainer.reported("save_failed")[0]["reason"]
    with pytest.raises(CheckpointError, match="lost each other"):
        trainer.checkpointer.save(2, POSITION)
    assert not trainer.checkpointer.emergency_save(2, POSITION, deadline_s=1.0)


def test_a_damaged_step_is_set_aside_for_the_one_before(tmp_path):
    first = Trainer(tmp_path)
    assert first.save(1)
    expected = first.values()
    assert first.save(2)
    damage(tmp_path / "checkpoints/steps/step-000000000002")
    second = Trainer(tmp_path, seed=1, attempt=2)
    assert second.checkpointer.restore(None).step == 1
    assert same(expected, second.values())
    assert second.steps() == ["step-000000000001"]
    assert [facts["step"] for facts in second.reported("rejected")] == [2]
    assert list((tmp_path / "checkpoints/quarantine").glob("*/reason.json"))


def test_when_every_step_is_damaged_nothing_moves_and_nothing_starts_over(tmp_path):
    first = Trainer(tmp_path)
    assert first.save(1) and first.save(2)
    for path in first.layout.steps.iterdir():
        damage(path)
    for _ in range(2):
        second = Trainer(tmp_path, seed=1, attempt=2)
        with pytest.raises(CheckpointError, match="does not start from step 0") as caught:
            second.checkpointer.restore(None)
        assert "step 1" in str(caught.value) and "step 2" in str(caught.value)
        assert str(caught.value).endswith("has read them: try another node before")
        assert second.steps() == ["step-000000000001", "step-000000000002"]


def test_another_model_is_an_error_and_no_reason_to_take_an_older_step(tmp_path):
    first = Trainer(tmp_path)
    assert first.save(1) and first.save(2)
    second = Trainer(tmp_path, width=7, attempt=2)
    with pytest.raises(StateMismatch, match="model/0.bias.*expected float32"):
        second.checkpointer.restore(None)
    assert second.steps() == ["step-000000000001", "step-000000000002"]


def test_a_step_published_late_by_an_older_attempt_is_not_restored(tmp_path):
    first = Trainer(tmp_path)
    assert first.save(1)
    (adopted,) = CheckpointStore(RunLayout(tmp_path)).published()
    assert first.save(2)
    second = Trainer(tmp_path, attempt=2)
    restored = second.checkpointer.restore([AdoptedStep(1, adopted.committed_digest)])
    assert restored.step == 1
    assert second.steps() == ["step-000000000001"]


def test_late_steps_of_a_dead_attempt_do_not_keep_a_run_from_starting(tmp_path):
    assert Trainer(tmp_path).save(1)
    second = Trainer(tmp_path, attempt=2)
    assert second.checkpointer.restore([]) is None
    assert second.save(1)


def test_old_steps_go_only_after_newer_ones_have_committed(tmp_path):
    trainer = Trainer(tmp_path, keep_last=2, keep_every_steps=10)
    for step in (10, 11, 12, 13):
        assert trainer.save(step)
    trainer.checkpointer.close(timeout_s=DEADLINE_S)
    assert trainer.steps() == ["step-000000000010", "step-000000000012", "step-000000000013"]


def test_an_emergency_save_does_not_wait_for_the_retention_before_it(tmp_path, monkeypatch):
    trainer = Trainer(tmp_path)
    released = threading.Event()
    asked: list = []

    def retain(*_, should_stop, **__):
        asked.append(should_stop)
        assert released.wait(DEADLINE_S)

    monkeypatch.setattr(CheckpointStore, "retain", retain)
    try:
        assert trainer.save(1)
        assert trainer.checkpointer.emergency_save(2, POSITION, deadline_s=10.0)
        assert [should_stop() for should_stop in asked] == [True]
        trainer.checkpointer.close(timeout_s=0.0, hurry=True)
    finally:
        released.set()
    trainer.checkpointer.close(timeout_s=DEADLINE_S)
    assert [should_stop() for should_stop in asked] == [True, True]


def test_each_step_names_the_one_it_continues_from(tmp_path):
    trainer = Trainer(tmp_path)
    assert trainer.save(1) and trainer.save(2)
    newest, oldest = CheckpointStore(trainer.layout).published()
    manifest = CheckpointStore(trainer.layout).verify(newest.path, full=True).manifest
    assert (manifest.parent.step, manifest.parent.digest) == (1, oldest.committed_digest)


def test_the_arena_is_reused_and_never_overwritten_while_it_is_written_out():
    arena = Arena(pinned=False)
    sources = [torch.arange(100.0), torch.ones(3, 2).t(), torch.tensor(5), torch.zeros(0)]
    copies = arena.stage(sources)
    address, capacity = copies[0].data_ptr(), arena.capacity_bytes
    assert all(torch.equal(a, b) and b.is_contiguous() for a, b in zip(sources, copies))
    arena.hand_over()
    with pytest.raises(AssertionError, match="in use"):
        arena.stage(sources)
    arena.release()
    assert arena.stage(sources)[0].data_ptr() == address
    assert arena.capacity_bytes == capacity


def test_memory_for_the_first_save_is_taken_before_it_is_due(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.train()
    trainer.checkpointer.poll()
    assert trainer.save(1)
    before = trainer.checkpointer._arena.capacity_bytes
    assert trainer.save(2)
    assert trainer.checkpointer._arena.capacity_bytes == before > 0
