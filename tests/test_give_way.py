"""A job that is ended in favour of the run's next one, by its own batch loop or by a member of its
agents: never taken for a person's cancel, neither by its own shell nor by the next job."""

import dataclasses

import pytest
from checkpoints import make_step
from fakes.batch_loop import OWN, begin, begin_job, end, make_run
from fakes.slurm_queue import Slurm

from ftslurm.agent.succession import note_loss
from ftslurm.errors import RunError
from ftslurm.files import read_json
from ftslurm.recovery import next_job
from ftslurm.recovery.keep_out import known_exclusions, remember
from ftslurm.recovery.next_job import move_on
from ftslurm.recovery.own_job import OwnJob
from ftslurm.run.attempts import Attempt, claim, read_events
from ftslurm.run.node_memory import EXCLUDED, FAULT, note_node, read_node_events
from ftslurm.run.record import read_record
from ftslurm.run.spec import ClusterSpec, RecoverySpec, RunSpec


@pytest.fixture(autouse=True)
def signals_stay(monkeypatch):
    """This process is no verb's."""
    monkeypatch.setattr("ftslurm.recovery.recover.outlive_requeue", lambda: None)
    monkeypatch.setattr("ftslurm.recovery.successor.KEEP_OUT_S", 0.1)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A run on two nodes whose job 12 has begun attempt 1, its queue, and that job as its members
    know it."""

    def make(**recovery):
        spec = RunSpec(
            cluster=ClusterSpec(nodes=2), recovery=RecoverySpec(agents=False, **recovery)
        )
        layout, slurm = make_run(tmp_path, "requeue", spec=spec), Slurm()
        begin(layout, slurm, monkeypatch)
        job = OwnJob.of(layout, read_record(layout), slurm, OWN)
        return layout, slurm, dataclasses.replace(job, submit=slurm.sbatch, sleep=lambda s: None)

    return make


def gave_way(layout, number):
    return [event["kind"] for event in read_events(layout.attempt(number))].count("gave_way")


def give_next_job(layout, slurm, job):
    """What a member does for batch node n1, as succession.py does it."""
    note_loss(job, "n1", "n1, the batch node, is lost")
    queued = move_on(job, without=["n1"])
    slurm.gone.add("12")
    return queued


@pytest.mark.parametrize("term", [True, False])
def test_the_shell_of_a_job_that_has_given_way_decides_nothing(make, term):
    layout, slurm, job = make()
    queued = give_next_job(layout, slurm, job)
    written = layout.attempt(1).decision_json.read_bytes()
    slurm.requeues = False  # it is being torn down
    decision = end(layout, slurm, rc=143, term=term)
    assert decision.action == "requeued"
    assert list(slurm.queue) == [queued]
    assert layout.attempt(1).decision_json.read_bytes() == written


def test_nor_does_one_that_has_claimed_another_attempt_meanwhile(make, monkeypatch):
    layout, slurm, job = make()
    queued = give_next_job(layout, slurm, job)
    with pytest.raises(RunError, match="job 12 has given way"):
        begin(layout, slurm, monkeypatch)
    claim(layout, Attempt(0, "12", 0, ["n1", "n2"], 0.0))  # in the same moment
    slurm.requeues = False
    assert end(layout, slurm, attempt=2, rc=143, term=True).action == "requeued"
    assert list(slurm.queue) == [queued]


def test_a_job_that_slurm_has_queued_again_since_decides_for_itself(make, monkeypatch):
    layout, slurm, job = make()
    give_next_job(layout, slurm, job)
    slurm.gone.clear()
    again = {**OWN, "SLURM_RESTART_COUNT": "1"}
    slurm.given = ["n3", "n4"]
    assert begin(layout, slurm, monkeypatch, again).startswith("go 2 ")
    assert end(layout, slurm, attempt=2, rc=78, environ=again).action == "stop"
    assert slurm.queue == {}


def test_the_way_is_noted_with_an_attempt_that_the_agents_have_not_been_told_of(make, monkeypatch):
    layout, slurm, job = make()
    make_step(layout, 10, run_id="r")
    begin(layout, slurm, monkeypatch)  # attempt 2; its batch node dies before it can tell
    queued = give_next_job(layout, slurm, job)
    assert (gave_way(layout, 1), gave_way(layout, 2)) == (0, 1)
    assert read_json(layout.attempt(2).decision_json)["action"] == "requeued"
    slurm.given = ["n3", "n4"]
    assert begin_job(queued, layout, slurm, monkeypatch).startswith("go 3 ")


def test_a_way_that_was_noted_with_an_older_attempt_counts_for_the_next_job(make, monkeypatch):
    layout, slurm, job = make()
    queued = give_next_job(layout, slurm, job)
    claim(layout, Attempt(0, "12", 0, ["n1", "n2"], 0.0))  # not seen by the one who has noted it
    slurm.given = ["n3", "n4"]
    assert begin_job(queued, layout, slurm, monkeypatch).startswith("go 3 ")


def test_a_job_whose_way_cannot_be_noted_is_not_cancelled_until_it_can(make, monkeypatch):
    layout, slurm, job = make()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(next_job, "append_event", full)
        with pytest.raises(OSError, match="No space"):
            move_on(job, without=["n1"])
    assert slurm.done == ["sbatch --exclude=n1"]
    assert move_on(job, without=["n1"]) == "13"
    assert slurm.done == ["sbatch --exclude=n1", "cancel 12"] and gave_way(layout, 1) == 1


def test_where_the_next_job_has_begun_already_no_other_is_queued(make, monkeypatch):
    layout, slurm, job = make()
    assert give_next_job(layout, slurm, job) == "13"
    slurm.given, slurm.done[:] = ["n3", "n4"], []
    begin_job("13", layout, slurm, monkeypatch)
    faults = read_node_events(layout)
    assert give_next_job(layout, slurm, job) == "13"
    assert slurm.done == ["cancel 12"] and read_node_events(layout) == faults


def test_nor_where_it_runs_and_has_not_come_to_claim(make):
    layout, slurm, job = make()
    assert give_next_job(layout, slurm, job) == "13"
    del slurm.queue["13"]
    slurm.running.add("13")
    slurm.done.clear()
    assert give_next_job(layout, slurm, job) == "13"
    assert slurm.done == ["cancel 12"]


@pytest.mark.parametrize(("max_node_faults", "excluded"), [(1, ["n1"]), (0, []), (3, [])])
def test_a_lost_batch_node_is_kept_out_by_the_number_of_its_faults(
    make, monkeypatch, max_node_faults, excluded
):
    layout, slurm, job = make(max_node_faults=max_node_faults)
    queued = give_next_job(layout, slurm, job)
    # The next job starts without it in any case: it would wait for it.
    assert slurm.excluded[queued] == ["n1"]
    assert read_json(layout.attempt(1).decision_json)["exclude"] == excluded
    slurm.given = ["n2", "n3"]
    assert begin_job(queued, layout, slurm, monkeypatch).startswith("go 2 ")
    assert [(one.kind, one.node) for one in read_node_events(layout)] == [(FAULT, "n1")]
    assert list(known_exclusions(job)) == excluded


def test_a_node_at_fault_is_noted_once_and_not_as_excluded_by_decision(make):
    layout, _, job = make(max_node_faults=2)
    told = {"cause": "gpu", "reason": "Xid 79", "blamed": {"node": "n2"}, "exclude": ["n2", "n5"]}
    remember(layout, 1, told)
    remember(layout, 1, told)
    kinds = [(one.kind, one.node) for one in read_node_events(layout)]
    assert kinds == [(FAULT, "n2"), (EXCLUDED, "n5")]
    assert list(known_exclusions(job)) == ["n5"]


@pytest.mark.parametrize("listed", [None, ["n1", "n2", "n3"]])
def test_a_node_that_slurm_has_no_more_is_not_named_to_it(make, monkeypatch, listed):
    layout, slurm, job = make()
    for node in ("old7", "n2"):
        note_node(layout, FAULT, node, attempt=1, cause="gpu")
    slurm.listed = listed
    names = "n2" if listed else "n2,old7"
    assert end(layout, slurm, rc=1).action == "requeued"
    assert slurm.done == ["requeue", f"exclude 12 {names}"]
    move_on(job, without=[])
    assert f"sbatch --exclude={names}" in slurm.done
    # It stays kept out, should it come back.
    assert list(known_exclusions(job)) == ["old7", "n2"]
