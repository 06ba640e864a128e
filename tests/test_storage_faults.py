"""A file system that stumbles: every kind of file access fails for a while, and the run ends as if
nothing had happened. Torch-free; test_restore.py and test_checkpointer.py have the torch half."""

import json

import pytest
from fakes.chain import Chain
from fakes.project import RANK, Run

from ftslurm.run.attempts import numbers, read_events
from ftslurm.run.layout import step_name, temporary_name

STORAGE_RANK = RANK.with_name("storage_rank.py")

WRITTEN = ["attempt.json", "decision.json", "index-00001.json", "manifest.json", "COMMITTED"]

# Passing errors of every primitive, in each process twice: batch loop, ranks and all.
STUMBLES = [
    "estale@read_file:times=2",
    "eio@read_file:name=run.json:times=3",
    *(f"estale@write_file:name={name}:times=2" for name in WRITTEN),
    "etimedout@make_folder:times=2",
    "estale@list_folder:times=2",
    "eio@rename:times=2",
    "estale@read_step:times=2",
    "enoent@read_step:name=manifest.json:times=4",
    "eio@read_shard:times=2",
]
# Errors that outlast all patience.
SAVES = ["eio@persist:step=10:rank=1", f"eio@rename:name={temporary_name(20, 1)}"]
NO_JOURNAL = "eio@append:name=events.jsonl"
RESTORES = [
    "kill@step:rank=1:step=17:attempt=1",
    "eio@read_shard:attempt=2:rank=1",
    "eio@list_folder:attempt=3:rank=0:name=steps",
]


class StorageChain(Chain):
    def __init__(self, folder):
        super().__init__(folder)
        (self.folder / "tests" / "fakes" / "storage_rank.py").write_bytes(STORAGE_RANK.read_bytes())

    def run_with(self, faults):
        entry = "entry=rank:tests.fakes.storage_rank:main"
        self.beacon = self.folder / "beacon.json"
        shown = f"+user.beacon={self.beacon}"
        return self.submit(entry, shown, "recovery.max_failures=4", faults=faults)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Run:
    chain = StorageChain(tmp_path_factory.mktemp("undisturbed"))
    run = chain.run_with("")
    chain.wait("COMPLETED")
    return run


def test_errors_that_pass_cost_nothing_but_time(tmp_path, undisturbed):
    chain = StorageChain(tmp_path)
    run = chain.run_with(";".join(["kill@step:rank=1:step=17:attempt=1", *STUMBLES]))
    chain.wait("COMPLETED")
    assert run.decisions() == ["restart", "done"], run.says()
    assert (run.digest, run.losses) == (undisturbed.digest, undisturbed.losses)
    events = [event for n in numbers(run.layout) for event in read_events(run.layout.attempt(n))]
    assert not [event for event in events if event["kind"] in ("save_failed", "rejected")]
    assert [event["step"] for event in events if event["kind"] == "restored"] == [10]


def test_a_save_that_fails_and_a_journal_that_takes_no_line_cost_no_bit(tmp_path, undisturbed):
    chain = StorageChain(tmp_path)
    run = chain.run_with(";".join([*SAVES, NO_JOURNAL]))
    chain.wait("COMPLETED")
    assert run.decisions() == ["done"], run.says()
    assert (run.digest, run.losses) == (undisturbed.digest, undisturbed.losses)
    assert [step.name for step in run.layout.steps.iterdir()] == [step_name(30)]
    assert json.loads(chain.beacon.read_text())["failed"] == 2


def test_a_step_that_cannot_be_read_for_two_attempts_is_read_by_the_third(tmp_path, undisturbed):
    chain = StorageChain(tmp_path)
    run = chain.run_with(";".join(RESTORES))
    chain.wait("COMPLETED")
    assert run.decisions() == ["restart", "restart", "restart", "done"], run.says()
    assert (run.digest, run.losses) == (undisturbed.digest, undisturbed.losses)
    assert not run.layout.quarantine.exists()
    assert run.steps_trained_twice == 7
