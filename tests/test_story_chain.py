"""What `ftslurm status` tells of a real run without Slurm and torch: one rank raises, one is
killed, and the run finishes all the same."""

import json
import time

import pytest
from fakes.chain import STEPS, Chain, ftslurm

FAULTS = "eio@step:rank=1:step=17:attempt=1;kill@step:rank=1:step=23:attempt=2"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Its text, its attempts, and how long all of it took."""
    chain, began = Chain(tmp_path_factory.mktemp("chain")), time.time()
    run = chain.submit(faults=FAULTS)
    chain.wait("COMPLETED")
    took_s = time.time() - began
    text = ftslurm("status", str(run.layout.root), cwd="/").stdout
    print(text)
    record = json.loads(ftslurm("status", str(run.layout.root), "--json", cwd="/").stdout)
    return text, record["attempts"], took_s


def test_an_exception_is_dated_blamed_and_priced(told):
    raised = told[1][0]
    assert (raised["first_failure"]["rank"], raised["first_failure"]["step"]) == (1, 17)
    assert "fault injected at step" in raised["first_failure"]["traceback"][-1]
    assert (raised["steps_lost"], raised["last_step"]) == (7, 17)
    line = raised["timeline"]
    assert line["failed_by"] == "error record of rank 1"
    assert None not in line["parts"].values()
    assert sum(line["parts"].values()) == pytest.approx(line["rto_s"], abs=0.01)
    assert 0 < line["rto_s"] < told[2] and 0 <= line["mttd_s"] <= line["rto_s"]


def test_a_killed_rank_is_dated_by_the_last_step_on_record(told):
    killed = told[1][1]
    assert killed["first_failure"]["rank"] == 1
    assert killed["timeline"]["failed_by"] == "the last step on record, after which it came"
    assert 0 < killed["timeline"]["rto_s"] < told[2]
    assert killed["steps_lost"] == 3


def test_the_attempt_that_finished_has_nothing_to_recover_from(told):
    last = told[1][2]
    assert (last["ended"], last["last_step"], last["timeline"]["rto_s"]) == (
        "finished",
        STEPS,
        None,
    )
    assert told[0].count("to first new step") == 2
