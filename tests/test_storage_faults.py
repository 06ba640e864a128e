"""A file system that stumbles: every kind of file access fails for a while, and the run ends as if
nothing had happened. Torch-free; test_restore.py and test_checkpointer.py have the torch half."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from fakes.chain import Chain
from fakes.project import RANK

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


def undisturbed(folder):
    return played(folder, "")


def stumbling(folder):
    return played(folder, ";".join(["kill@step:rank=1:step=17:attempt=1", *STUMBLES]))


def unsaved(folder):
    return played(folder, ";".join([*SAVES, NO_JOURNAL]))


def unread(folder):
    return played(folder, ";".join(RESTORES))


def played(folder, faults):
    folder.mkdir()
    chain = StorageChain(folder)
    chain.run_with(faults)
    chain.wait("COMPLETED")
    return chain


@pytest.fixture(scope="module")
def chains(tmp_path_factory):
    """All at once, since they mostly wait; a test takes its own, and with it what went wrong."""
    folder = tmp_path_factory.mktemp("chains")
    scenarios = (undisturbed, stumbling, unsaved, unread)
    with ThreadPoolExecutor(len(scenarios)) as pool:
        yield {each.__name__: pool.submit(each, folder / each.__name__) for each in scenarios}


def ended(chains, name):
    """The run's chain, and whether it ended as the undisturbed one."""
    chain, other = chains[name].result(), chains["undisturbed"].result().run
    assert (chain.run.digest, chain.run.losses) == (other.digest, other.losses)
    return chain, chain.run


def test_errors_that_pass_cost_nothing_but_time(chains):
    _, run = ended(chains, "stumbling")
    assert run.decisions() == ["restart", "done"], run.says()
    events = [event for n in numbers(run.layout) for event in read_events(run.layout.attempt(n))]
    assert not [event for event in events if event["kind"] in ("save_failed", "rejected")]
    assert [event["step"] for event in events if event["kind"] == "restored"] == [10]


def test_a_save_that_fails_and_a_journal_that_takes_no_line_cost_no_bit(chains):
    chain, run = ended(chains, "unsaved")
    assert run.decisions() == ["done"], run.says()
    assert [step.name for step in run.layout.steps.iterdir()] == [step_name(30)]
    assert json.loads(chain.beacon.read_text())["failed"] == 2


def test_a_step_that_cannot_be_read_for_two_attempts_is_read_by_the_third(chains):
    _, run = ended(chains, "unread")
    assert run.decisions() == ["restart", "restart", "restart", "done"], run.says()
    assert not run.layout.quarantine.exists()
    assert run.steps_trained_twice == 7
