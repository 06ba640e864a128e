"""The whole chain without Slurm and without torch: submit, batch loop, ranks, recovery, status."""

import json

import pytest
from fakes.chain import STEPS, Chain, ftslurm, wait_for
from fakes.project import slow

from ftslurm.files import read_json
from ftslurm.run.attempts import read_progress


def status(run):
    return json.loads(ftslurm("status", str(run.layout.root), "--json", cwd="/").stdout)


@pytest.fixture
def chain(tmp_path):
    return Chain(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    chain = Chain(tmp_path_factory.mktemp("undisturbed"))
    run = chain.submit()
    chain.wait("COMPLETED")
    assert run.decisions() == ["done"]
    assert sorted(run.losses) == list(range(1, STEPS + 1))
    return run


def test_a_run_that_is_told_to_leave_ends_as_if_nothing_had_happened(chain, undisturbed):
    run = chain.submit(*slow())

    def trains():
        progress = read_progress(run.layout.attempt(1))
        return progress is not None and progress.step > 0

    wait_for(trains, run.says)
    chain.scheduler.signal_ranks(chain.job_id, "USR1")
    chain.wait("COMPLETED")
    assert run.decisions() == ["requeued", "done"]
    assert (run.digest, run.losses) == (undisturbed.digest, undisturbed.losses)
    assert run.steps_trained_twice == 0
    told = status(run)
    assert (told["state"], told["steps_lost"]) == ("done", 0)
    first, second = told["attempts"]
    assert (first["ended"], first["signal"]) == ("stopped", "SIGUSR1")
    assert second["restored_step"] == first["last_step"] == first["committed_step"]
    assert second["restart_count"] == 1


# Where each attempt is killed, and the step from which the next one goes on.
DEATHS = [
    ("kill@step:rank=1:step=17", 10),
    ("kill@staged:rank=0:step=20", 10),
    ("kill@persist:rank=1:step=20", 10),
    ("kill@before_commit:step=20", 10),
    ("kill@before_rename:step=20", 10),
    ("kill@after_rename:step=20", 20),
    ("kill@restored:rank=1", 20),
]


def test_a_death_costs_the_steps_since_the_last_commit_and_nothing_else(chain, undisturbed):
    faults = ";".join(f"{where}:attempt={i}" for i, (where, _) in enumerate(DEATHS, start=1))
    run = chain.submit(f"recovery.max_failures={len(DEATHS)}", faults=faults)
    chain.wait("COMPLETED")
    assert run.decisions() == ["restart"] * len(DEATHS) + ["done"], run.says()
    assert (run.digest, run.losses) == (undisturbed.digest, undisturbed.losses)
    told = status(run)
    restored = [attempt["restored_step"] for attempt in told["attempts"]]
    assert restored == [None, *(step for _, step in DEATHS)]
    assert told["steps_lost"] == run.steps_trained_twice > 0


def test_a_crash_loop_stops_the_run_with_a_sentence(chain):
    run = chain.submit("recovery.max_failures=1", faults="exit@step:rank=1:step=3")
    chain.wait("FAILED")
    assert run.decisions() == ["restart", "stop"], run.says()
    reason = read_json(run.layout.attempt(2).root / "decision.json")["reason"]
    assert "2 failures in a row" in reason and "rank 1" in reason and "submit again" in reason
    assert status(run)["state"] == "stopped"
    assert "stop: 2 failures in a row" in ftslurm("status", str(run.layout.root), cwd="/").stdout
