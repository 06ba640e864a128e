"""A node that fails a run is kept out of it, on real Slurm, by ranks without torch.

The ranks on the nodes that `user.sick` names fail as on a broken GPU, in every attempt and job.
"""

from __future__ import annotations

import json

import pytest
from fakes.project import slow
from lab import Lab
from sick_runs import SickRun

from ftslurm.run.attempts import read_decision
from ftslurm.run.node_memory import EXCLUDED, FAULT, READMITTED, RETURNED

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PATIENT = {"kill_wait_s": 15}
"""Of the cluster: the shell of a busy node lives until it has said what it has to say."""


def test_a_spare_of_the_allocation_stands_in_for_a_node_that_fails(lab: Lab) -> None:
    run = SickRun(lab, "spare", "cluster.spares=1", sick="n2")
    run.end_as("COMPLETED")
    first, second = run.attempts
    assert (first.nodes, first.spares) == (["n1", "n2"], ["n3"]), run.says()
    assert (second.nodes, second.spares) == (["n1", "n3"], []), run.says()
    assert list(second.excluded) == ["n2"] and second.restart_count == 0
    assert run.run.decisions() == ["restart", "done"], run.says()
    assert read_decision(run.run.layout.attempt(1))["blamed"]["node"] == "n2"
    assert run.kinds()[0] == (FAULT, "n2")


def test_a_node_is_kept_out_of_every_later_job_once_its_budget_is_used_up(lab: Lab) -> None:
    lab.change_settings(**PATIENT)
    run = SickRun(lab, "budget", "recovery.max_node_faults=2", *slow(3), sick="n2")
    run.wait_for_requeue()
    assert run.excluded_by_slurm() == "n2", run.says()
    assert [one.nodes for one in run.attempts] == [["n1", "n2"]] * 2, run.says()
    assert run.kinds()[:2] == [(FAULT, "n2")] * 2
    lab.hasten(run.job_id)
    run.wait_for_training(3)
    # Queued again by somebody else, the job keeps its list.
    lab.run_as(lab.user, ["scontrol", "requeue", run.job_id])
    lab.hasten(run.job_id)
    assert run.excluded_by_slurm() == "n2"
    run.end_as("COMPLETED")
    assert all("n2" not in one.nodes for one in run.attempts[2:]), run.says()
    assert len(run.attempts) == 4 and RETURNED not in [kind for kind, _ in run.kinds()]


@pytest.mark.full
def test_a_waiting_job_is_given_a_node_back_that_somebody_readmits(lab: Lab) -> None:
    lab.change_settings(**PATIENT)
    run = SickRun(lab, "readmitted", sick="n2")
    run.wait_for_requeue()
    assert run.excluded_by_slurm() == "n2", run.says()
    root = str(run.run.layout.root)
    told = json.loads(run.ftslurm("resume", root, "--readmit", "n[2]", "--json"))
    assert told["result"] == "waiting" and "n2" in told["text"]
    assert run.excluded_by_slurm() == "(null)", run.says()
    assert run.kinds()[-1] == (READMITTED, "n2")
    assert "excluded node" not in run.ftslurm("status", root)


@pytest.mark.full
def test_where_the_shell_is_killed_before_it_can_say_so_the_next_claim_obeys(lab: Lab) -> None:
    run = SickRun(lab, "late", "recovery.agents=false", sick="n2", faults="hang@requeued")
    run.wait_for_requeue()
    assert run.excluded_by_slurm() == "(null)", run.says()
    run.wait_for_return()
    run.wait_for_requeue(2)
    assert run.excluded_by_slurm() == "n2", run.says()
    lab.hasten(run.job_id)
    run.end_as("COMPLETED")
    first, second = run.attempts
    assert first.nodes == ["n1", "n2"] and "n2" not in second.nodes, run.says()


@pytest.mark.full
def test_the_batch_node_dies_in_that_moment_and_the_node_is_kept_out_all_the_same(
    lab: Lab,
) -> None:
    lab.change_settings(kill_wait_s=60)  # so long the job is COMPLETING
    run = SickRun(lab, "dies", "recovery.agents=false", sick="n2", faults="hang@requeued")
    run.wait_for_decisions(["requeued"])
    lab.wait_for_state(run.job_id, ["COMPLETING"], 40)
    lab.kill("n1")
    try:
        run.wait_for_return(timeout_s=150)  # of n2 and n3: the batch script ran on n2 itself
        run.wait_for_requeue(2)
        assert run.excluded_by_slurm() == "n2", run.says()
        lab.hasten(run.job_id)
        run.end_as("COMPLETED")
    finally:
        lab.start("n1")
    first, second = run.attempts
    assert (first.nodes, second.nodes) == (["n1", "n2"], ["n3", "n4"]), run.says()


@pytest.mark.full
def test_with_no_node_in_its_place_a_run_goes_on_with_fewer_and_grows_back(lab: Lab) -> None:
    lab.change_settings(**PATIENT)
    run = SickRun(lab, "elastic", "recovery.min_nodes=1", *slow(2), sick="n2")
    run.wait_for_training(2)
    run.preempt()
    run.end_as("COMPLETED")
    first, second, third = run.attempts
    assert [one.world_size for one in (first, second, third)] == [4, 2, 4], run.says()
    assert second.nodes == ["n1"] and list(second.excluded) == ["n2"]
    assert len(third.nodes) == 2 and "n2" not in third.nodes, run.says()
    assert run.run.decisions() == ["restart", "requeued", "done"], run.says()


@pytest.mark.full
def test_the_oldest_exclusion_is_given_up_where_the_job_could_never_start(lab: Lab) -> None:
    nodes = "cluster.nodes=4"
    run = SickRun(lab, "too-many", nodes, "recovery.max_failures=2", sick="n2")
    run.end_as("FAILED")
    kinds = run.kinds()
    assert (EXCLUDED, "n2") in kinds or (FAULT, "n2") in kinds
    assert "readmitted" in [kind for kind, _ in kinds], run.says()


@pytest.mark.full
def test_a_job_that_is_queued_again_without_a_wait_is_kept_off_the_node_too(lab: Lab) -> None:
    if lab.version < (25, 11):
        pytest.skip("Slurm before 25.11 has no --requeue=expedite")
    lab.change_settings(expedited_requeue=True, **PATIENT)
    run = SickRun(lab, "expedited", sick="n2")
    run.end_as("COMPLETED")
    assert run.run.decisions() == ["requeued", "done"], run.says()
    assert "n2" not in run.attempts[1].nodes
    assert RETURNED not in [kind for kind, _ in run.kinds()], run.says()
