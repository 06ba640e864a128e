"""A claim looks at its nodes, and what is known of them reaches the run's next job."""

import json
from functools import partial

import pytest
from checkpoints import make_step
from fakes.batch_loop import allocated, be_hasty, begin, begin_job, end, stopped

from ftslurm.errors import RunError, SchedulerError
from ftslurm.files import read_json, write_json
from ftslurm.recovery.actions import RESTART
from ftslurm.run.attempts import read_attempt
from ftslurm.run.jobs import BY_PERSON, add_job
from ftslurm.run.node_memory import (
    EXCLUDED,
    FAULT,
    READMITTED,
    RETURNED,
    note_node,
    read_node_events,
)
from ftslurm.scheduler.sbatch import RefusedError


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A run, its queue, and its claim."""
    be_hasty(monkeypatch)
    return partial(allocated, tmp_path)


def decide(layout, number, **told):
    """As recover leaves it; its batch shell did not live to do more."""
    record = {"schema_version": 1, "action": RESTART, "cause": "gpu", "reason": "Xid 79", **told}
    write_json(layout.attempt(number).decision_json, record)


def kinds(layout):
    return [(event.kind, event.node) for event in read_node_events(layout)]


def test_a_spare_is_swapped_in_and_the_attempt_says_who_and_why(make, monkeypatch):
    layout, slurm = make(given=["n1", "n2", "n3"], cluster={"spares": 1})
    assert begin(layout, slurm, monkeypatch).endswith(" n1,n2 2")
    assert read_attempt(layout, 1).spares == ["n3"]
    decide(layout, 1, blamed={"node": "n2", "gpu": "3", "rank": 2})
    assert begin(layout, slurm, monkeypatch).endswith(" n1,n3 2")
    second = read_attempt(layout, 2)
    assert (second.nodes, second.spares) == (["n1", "n3"], [])
    assert second.excluded == {"n2": "is kept out since attempt 1"}
    assert (second.tasks_per_node, second.world_size) == (2, 4)
    assert slurm.done == []


@pytest.mark.parametrize(("told", "noted"), [
    ({"cause": "gpu", "blamed": {"node": "n2"}}, [(FAULT, "n2")]),
    ({"cause": "node", "blamed": {"node": "n2"}}, [(FAULT, "n2")]),
    ({"cause": "code", "blamed": {"node": "n2"}}, []),
    ({"cause": "straggler", "blamed": {"node": "n2"}, "exclude": ["n2"]}, [(EXCLUDED, "n2")]),
    ({"cause": "unknown", "blamed": None, "exclude": []}, []),
    ({"cause": "asked_to_leave"}, []),
])  # fmt: skip
def test_only_a_fault_of_the_node_counts_or_a_decision_that_names_it(
    make, monkeypatch, told, noted
):
    layout, slurm = make(given=["n1", "n2", "n3"])
    begin(layout, slurm, monkeypatch)
    decide(layout, 1, **told)
    begin(layout, slurm, monkeypatch)
    begin(layout, slurm, monkeypatch)
    assert kinds(layout) == noted


def test_people_are_told_of_a_node_that_is_given_up_between_two_attempts(
    make, monkeypatch, tmp_path
):
    told = tmp_path / "told"
    hook = ["/bin/sh", "-c", f"cat >> {told}; echo >> {told}"]
    layout, slurm = make(given=["n1", "n2", "n3", "n4"], cluster={"spares": 2}, on_event=hook)
    begin(layout, slurm, monkeypatch)
    decide(layout, 1, blamed={"node": "n2"}, exclude=["n2"])
    begin(layout, slurm, monkeypatch)
    assert not told.exists(), "recover tells of what it has decided"
    why = "root's look found XID79: the GPU is lost"
    note_node(layout, EXCLUDED, "n3", attempt=2, cause="gpu", why=why)
    for _ in range(2):
        begin(layout, slurm, monkeypatch)
    (message,) = map(json.loads, told.read_text().splitlines())
    assert (message["event"], message["excluded"], message["attempt"]) == ("excluded", ["n3"], 2)
    assert message["reason"] == f"node n3: {why}"


def test_an_allocation_without_another_node_is_requeued_with_the_node_excluded(make, monkeypatch):
    layout, slurm = make()
    begin(layout, slurm, monkeypatch)
    decide(layout, 1, blamed={"node": "n2"})
    slurm.excluded["12"] = ["n9"]  # by an operator
    assert begin(layout, slurm, monkeypatch) == "requeued"
    assert slurm.done == ["requeue", "exclude 12 n2,n9"]
    assert kinds(layout)[-1] == (RETURNED, "n2")
    assert not layout.attempt(2).root.exists()
    slurm.given = ["n1", "n3"]
    assert begin(layout, slurm, monkeypatch).endswith(" n1,n3 2")


def test_a_batch_node_that_is_excluded_is_never_used_even_beside_spares(make, monkeypatch):
    layout, slurm = make(given=["n1", "n2", "n3"], cluster={"spares": 1})
    begin(layout, slurm, monkeypatch)
    decide(layout, 1, blamed={"node": "n1"})
    assert begin(layout, slurm, monkeypatch) == "requeued"
    assert slurm.excluded["12"] == ["n1"]


def test_where_the_list_is_not_kept_a_new_job_brings_it_and_then_the_run_stops(make, monkeypatch):
    layout, slurm = make()
    slurm.keeps_list = False
    begin(layout, slurm, monkeypatch)
    decide(layout, 1, blamed={"node": "n2"})
    assert begin(layout, slurm, monkeypatch) == "requeued"
    slurm.done.clear()
    assert begin(layout, slurm, monkeypatch) == "requeued"
    assert slurm.done == ["sbatch --dependency=afterany:12 --exclude=n2"]
    assert begin_job("13", layout, slurm, monkeypatch) == "requeued"
    with pytest.raises(RunError, match="4 allocations in a row.*ftslurm resume"):
        begin_job("14", layout, slurm, monkeypatch)
    assert slurm.queue == {} and slurm.done[-1] == "forbid 14"
    decision = read_json(layout.attempt(1).decision_json)
    assert (decision["action"], decision["cause"]) == ("stop", "no_place")
    # A person's word begins the count anew.
    add_job(layout, "50", scheduler="slurm", queued_by=BY_PERSON)
    assert begin_job("50", layout, slurm, monkeypatch) == "requeued"


def test_people_are_told_of_a_run_that_stops_between_two_attempts(make, monkeypatch, tmp_path):
    told = tmp_path / "told"
    hook = ["/bin/sh", "-c", f"cat >> {told}; echo >> {told}"]
    layout, slurm = make(on_event=hook)
    begin(layout, slurm, monkeypatch)
    note_node(layout, EXCLUDED, "n2", attempt=0)
    slurm.requeues = SchedulerError("Access/permission denied")
    slurm.answers = [RefusedError("no limit left")]
    with pytest.raises(RunError):
        begin(layout, slurm, monkeypatch)
    (message,) = map(json.loads, told.read_text().splitlines())
    assert (message["event"], message["cause"], message["attempt"]) == ("stop", "no_place", 1)
    assert "no limit left" in message["reason"] and "ftslurm resume" in message["reason"]


def test_where_no_other_job_can_be_queued_the_run_stops_and_says_so(make, monkeypatch):
    layout, slurm = make()
    begin(layout, slurm, monkeypatch)
    note_node(layout, EXCLUDED, "n2", attempt=1)
    slurm.requeues = SchedulerError("Access/permission denied")
    slurm.answers = [RefusedError("no limit left")]
    with pytest.raises(RunError, match="no limit left.*ftslurm resume"):
        begin(layout, slurm, monkeypatch)
    assert read_json(layout.attempt(1).decision_json)["action"] == "stop"


def test_a_run_of_successors_has_the_node_excluded_in_the_one_that_waits(make, monkeypatch):
    layout, slurm = make("resubmit", cluster={"exclude": "n[7-8]"})
    begin(layout, slurm, monkeypatch)
    assert slurm.done == ["sbatch --dependency=singleton,afterany:12"]
    note_node(layout, FAULT, "n2", attempt=1, cause="gpu")
    assert begin(layout, slurm, monkeypatch) == "requeued"
    assert slurm.done[1:] == ["exclude 13 n2,n7,n8"]
    # Of the next one it is an argument.
    slurm.given = ["n1", "n3"]
    assert begin_job("13", layout, slurm, monkeypatch).endswith(" n1,n3 2")
    assert slurm.done[-1].endswith("singleton,afterany:13 --exclude=n2")


def test_recover_requeues_where_a_restart_in_place_has_no_node_to_run_on(make, monkeypatch):
    layout, slurm = make()
    begin(layout, slurm, monkeypatch)
    note_node(layout, EXCLUDED, "n2", attempt=1, cause="straggler")
    decision = end(layout, slurm, rc=1)
    assert decision.action == "requeued" and "n2 is kept out" in decision.reason
    assert read_json(layout.attempt(1).decision_json)["action"] == "requeued"
    assert slurm.done == ["requeue", "exclude 12 n2"]


def test_recover_restarts_in_place_where_a_spare_or_fewer_nodes_do(make, monkeypatch):
    layout, slurm = make(min_nodes=1)
    begin(layout, slurm, monkeypatch)
    note_node(layout, EXCLUDED, "n2", attempt=1)
    assert end(layout, slurm, rc=1).action == "restart"
    assert begin(layout, slurm, monkeypatch).endswith(" n1 1")
    assert read_attempt(layout, 2).world_size == 2
    # Queued again, it asks for all its nodes: nothing has changed the job's own request.
    slurm.given = ["n3", "n4"]
    assert begin(layout, slurm, monkeypatch).endswith(" n3,n4 2")


def test_when_too_many_are_kept_out_the_oldest_is_used_again_and_told(make, monkeypatch, capsys):
    layout, slurm = make(given=["n1", "n2"])
    slurm.serving = ["n1", "n2", "n3"]
    begin(layout, slurm, monkeypatch)
    for node in ("n2", "n3"):
        note_node(layout, EXCLUDED, node, attempt=1)
    assert begin(layout, slurm, monkeypatch).endswith(" n1,n2 2")
    assert "node n2 is used again" in capsys.readouterr().err
    assert kinds(layout)[-1] == (READMITTED, "n2")
    begin(layout, slurm, monkeypatch)
    assert len(kinds(layout)) == 3


def test_a_spare_serves_before_a_node_is_readmitted_and_then_such_a_node_is_the_spare(
    make, monkeypatch
):
    layout, slurm = make(given=["n1", "n2", "n3"], cluster={"spares": 1})
    slurm.serving = ["n1", "n2", "n3"]
    begin(layout, slurm, monkeypatch)
    note_node(layout, EXCLUDED, "n2", attempt=1)
    assert end(layout, slurm, rc=1).action == "restart"
    assert begin(layout, slurm, monkeypatch).endswith(" n1,n3 2")
    assert kinds(layout) == [(EXCLUDED, "n2")]
    # Another job needs three nodes, and there are no others.
    stopped(layout, 2)
    slurm.excluded["12"] = ["n2"]
    assert end(layout, slurm, attempt=2).action == "requeued"
    assert kinds(layout)[-1] == (READMITTED, "n2")
    assert slurm.excluded["12"] == []
    assert begin(layout, slurm, monkeypatch).endswith(" n1,n3 2")
    assert read_attempt(layout, 3).spares == ["n2"]


def test_a_person_who_excludes_nodes_takes_them_from_what_could_serve(make, monkeypatch):
    layout, slurm = make(cluster={"exclude": "n3"})
    slurm.serving = ["n1", "n2", "n3"]
    note_node(layout, EXCLUDED, "n2", attempt=0)
    assert begin(layout, slurm, monkeypatch).endswith(" n1,n2 2")


def test_a_list_that_cannot_be_set_in_time_is_said_and_left_to_the_next_claim(
    make, monkeypatch, capsys
):
    layout, slurm = make()
    begin(layout, slurm, monkeypatch)
    note_node(layout, EXCLUDED, "n2", attempt=1)

    def refuse(job_id, nodes):
        raise SchedulerError("slurmctld does not answer")

    monkeypatch.setattr(slurm, "exclude_nodes", refuse)
    assert end(layout, slurm, rc=1).action == "requeued"
    said = capsys.readouterr().err
    assert "not kept off n2 (slurmctld does not answer)" in said


def test_a_run_goes_back_beyond_the_step_that_its_last_decision_names(make, monkeypatch):
    layout, slurm = make()
    for step in (10, 20, 30):
        make_step(layout, step, run_id="r")
    begin(layout, slurm, monkeypatch)
    decide(layout, 1, cause="numeric", restore_before=20)
    begin(layout, slurm, monkeypatch)
    assert [item.step for item in read_attempt(layout, 2).adopted] == [10]
    begin(layout, slurm, monkeypatch)  # nobody lived to put the others aside
    assert [item.step for item in read_attempt(layout, 3).adopted] == [10]
