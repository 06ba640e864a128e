"""A claim asks the agents of its job which nodes are lost, or not clean of the attempts before."""

from functools import partial
from types import SimpleNamespace

import pytest
from fakes.batch_loop import OWN, allocated, be_hasty, begin, begin_job, own_job

from ftslurm.errors import RunError
from ftslurm.files import read_json, write_json
from ftslurm.recovery import ask_agents
from ftslurm.recovery.actions import REQUEUED
from ftslurm.recovery.case import Decision
from ftslurm.recovery.next_job import act, move_on
from ftslurm.run.attempts import read_attempt
from ftslurm.run.node_memory import FAULT, RETURNED, read_node_events
from ftslurm.scheduler.sbatch import UnclearError


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A run, its queue, and its claim."""
    be_hasty(monkeypatch)
    return partial(allocated, tmp_path)


def kinds(layout):
    return [(event.kind, event.node) for event in read_node_events(layout)]


class Leader:
    """Answers as the agents' leader of a job does."""

    def __init__(self, monkeypatch, *, states, leftover=None, held=None):
        self.states, self.leftover, self.asked = states, leftover or {}, []
        self.held, self.unseen = held or {}, []
        monkeypatch.setattr(ask_agents, "_ask", self.answer)

    def answer(self, job, question, timeout_s):
        self.asked.append(question)
        lost = [name for name, state in self.states.items() if state in ("lost", "busy")]
        return {
            "nodes": {"nodes": {name: {"state": state} for name, state in self.states.items()}},
            "clear": {
                "leftover": self.leftover,
                "held": self.held,
                "unseen": self.unseen,
                "lost": lost,
            },
        }.get(question["ask"])


def test_the_agents_are_asked_before_the_ranks_start_and_told_when_they_do(make, monkeypatch):
    layout, slurm = make(given=["n1", "n2", "n3"], cluster={"spares": 1})
    told = Leader(monkeypatch, states={"n1": "live", "n2": "live", "n3": "live"})
    begin(layout, slurm, monkeypatch)
    begin(layout, slurm, monkeypatch)
    assert [question["ask"] for question in told.asked] == [
        "nodes", "begin", "nodes", "clear", "begin",
    ]  # fmt: skip
    assert told.asked[3] == {"ask": "clear", "attempt": 1}
    assert told.asked[-1] == {
        "ask": "begin", "attempt": 2, "nodes": ["n1", "n2"], "tasks_per_node": 2,
    }  # fmt: skip


def test_a_lost_node_and_one_that_is_not_clean_are_replaced(make, monkeypatch):
    layout, slurm = make(given=["n1", "n2", "n3", "n4", "n5"], cluster={"spares": 3})
    begin(layout, slurm, monkeypatch)
    states = {"n1": "live", "n2": "lost", "n3": "live", "n4": "busy", "n5": "live"}
    Leader(monkeypatch, states=states, leftover={"n3": [77], "n1": []})
    assert begin(layout, slurm, monkeypatch).endswith(" n1,n5 2")
    left_out = read_attempt(layout, 2).excluded
    assert "pids 77" in left_out["n3"] and "does not answer" in left_out["n2"]
    assert kinds(layout) == [(FAULT, "n2")]  # the others have no fault yet


@pytest.mark.parametrize("by", ["process 7 (has ended)", "no process that is there"])
def test_a_node_whose_gpus_keep_their_memory_is_replaced_and_has_a_fault_if_it_is_known_whose_it_is(
    make, monkeypatch, by
):
    layout, slurm = make(given=["n1", "n2", "n3"], cluster={"spares": 1})
    begin(layout, slurm, monkeypatch)
    held = {"n2": {"0000:1b:00": f"70.0 GiB are taken by {by}"}}
    Leader(monkeypatch, states={"n1": "live", "n2": "live", "n3": "live"}, held=held)
    assert begin(layout, slurm, monkeypatch).endswith(" n1,n3 2")
    assert "GPU 0000:1b:00: 70.0 GiB" in read_attempt(layout, 2).excluded["n2"]
    told = [(event.kind, event.node, event.cause) for event in read_node_events(layout)]
    assert told == ([(FAULT, "n2", "gpu")] if "7" in by else [])


def test_gpus_whose_memory_nobody_has_are_given_back_three_times_and_then_the_run_stops(
    make, monkeypatch
):
    layout, slurm = make("resubmit")
    begin(layout, slurm, monkeypatch)
    held = {"n2": {"0000:1b:00": "70.0 GiB are taken by no process that is there"}}
    Leader(monkeypatch, states={"n1": "live", "n2": "live"}, held=held)
    for job_id in ("13", "14", "15"):
        assert begin_job(job_id, layout, slurm, monkeypatch) == "requeued"
    with pytest.raises(RunError, match="4 allocations in a row.*memory of its GPUs back"):
        begin_job("16", layout, slurm, monkeypatch)
    assert kinds(layout) == [(RETURNED, "n2")] * 3, "it is no fault of the node's"
    assert slurm.queue == {}
    assert read_json(layout.attempt(1).decision_json)["cause"] == "no_place"


def test_what_agents_are_not_shown_of_gpus_the_nodes_looks_at_themselves_tell(make, monkeypatch):
    layout, slurm = make(given=["n1", "n2", "n3"], cluster={"spares": 1})
    begin(layout, slurm, monkeypatch)
    looks = layout.attempt(1).looks
    looks.mkdir(parents=True)
    write_json(looks / "n1.json", {"schema_version": 1, "held": {}})
    held = {"0000:1b:00": "70.0 GiB are taken by process 7 (has ended)"}
    write_json(looks / "n2.json", {"schema_version": 1, "held": held})
    told = Leader(monkeypatch, states={"n1": "live", "n2": "live", "n3": "live"})
    told.unseen = ["n1", "n2", "n3"]
    assert begin(layout, slurm, monkeypatch).endswith(" n1,n3 2")
    assert kinds(layout) == [], "nobody has looked since"


@pytest.mark.parametrize("change", [{"job_id": "11"}, {"restart_count": 3}])
def test_a_look_of_another_job_or_before_a_requeue_leaves_no_node_out(make, monkeypatch, change):
    layout, slurm = make(given=["n1", "n2", "n3"], cluster={"spares": 1})
    begin(layout, slurm, monkeypatch)
    path = layout.attempt(1).attempt_json
    write_json(path, {**read_json(path), **change})
    layout.attempt(1).looks.mkdir(parents=True)
    held = {"0000:1b:00": "70.0 GiB are taken by process 7 (has ended)"}
    write_json(layout.attempt(1).looks / "n2.json", {"schema_version": 1, "held": held})
    told = Leader(monkeypatch, states={"n1": "live", "n2": "live", "n3": "live"})
    told.unseen = ["n1", "n2", "n3"]
    assert begin(layout, slurm, monkeypatch).endswith(" n1,n2 2")


def test_a_node_that_was_too_busy_to_answer_is_asked_once_more(make, monkeypatch):
    layout, slurm = make()
    begin(layout, slurm, monkeypatch)
    told = Leader(monkeypatch, states={"n1": "live", "n2": "busy"})
    answer = told.answer

    def answer_later(job, question, timeout_s):
        said = answer(job, question, timeout_s)
        if question["ask"] == "clear":
            told.states["n2"] = "live"
        return said

    monkeypatch.setattr(ask_agents, "_ask", answer_later)
    assert begin(layout, slurm, monkeypatch).endswith(" n1,n2 2")
    assert kinds(layout) == []


def test_a_node_without_agent_is_used_only_where_there_is_no_other(make, monkeypatch):
    layout, slurm = make(given=["n1", "n2", "n3"], cluster={"spares": 1})
    Leader(monkeypatch, states={"n1": "live", "n2": "gone", "n3": "live"})
    assert begin(layout, slurm, monkeypatch).endswith(" n1,n3 2")
    Leader(monkeypatch, states={"n1": "gone", "n2": "gone", "n3": "gone"})
    assert begin(layout, slurm, monkeypatch).endswith(" n1,n2 2")


@pytest.mark.parametrize("continue_by", ["requeue", "resubmit"])
def test_with_a_lost_node_a_new_job_does_not_wait_for_the_end_of_this_one(
    make, monkeypatch, continue_by
):
    layout, slurm = make(continue_by)
    begin(layout, slurm, monkeypatch)
    Leader(monkeypatch, states={"n1": "live", "n2": "lost"})
    slurm.done.clear()
    assert begin(layout, slurm, monkeypatch) == "requeued"
    new = "13" if continue_by == "requeue" else "14"
    assert slurm.done[0].startswith("sbatch ") and "afterany" not in slurm.done[0]
    assert slurm.done[0].endswith("--exclude=n2")
    assert slurm.done[-1] == "cancel 12" and list(slurm.queue) == [new]
    # It is not taken for one whose run somebody has cancelled.
    slurm.gone.add("12")
    slurm.given = ["n3", "n4"]
    Leader(monkeypatch, states={})
    assert begin_job(new, layout, slurm, monkeypatch).endswith(" n3,n4 2")


def test_a_job_that_moves_on_takes_what_a_person_has_queued(make, monkeypatch):
    layout, slurm = make()
    begin(layout, slurm, monkeypatch)
    slurm.queue["40"] = ""
    assert move_on(own_job(layout, slurm), without=["n2"]) == "40"
    assert slurm.done == ["exclude 40 n2", "cancel 12"]


def test_recover_queues_a_new_job_beside_one_that_holds_a_lost_node(make, monkeypatch):
    layout, slurm = make()
    begin(layout, slurm, monkeypatch)
    Leader(monkeypatch, states={"n1": "live", "n2": "lost"})
    decision = Decision(REQUEUED, "node", "n2 is lost", exclude=("n2",))
    told = []

    def amend(decided):
        told.append((decided.reason, list(slurm.done)))
        return decided

    act(own_job(layout, slurm), OWN, SimpleNamespace(number=1), decision, amend)
    assert slurm.done == ["sbatch --exclude=n2", "cancel 12"]
    # On record before the job is cancelled, and its shell with it.
    assert told == [("n2 is lost, job 13 is next, this one would wait for the node that is lost",
                     ["sbatch --exclude=n2"])]  # fmt: skip


def test_a_lost_answer_makes_no_second_job_beside_the_first(make, monkeypatch):
    layout, slurm = make()
    begin(layout, slurm, monkeypatch)
    slurm.answers = [UnclearError("sbatch lost its connection")]
    assert move_on(own_job(layout, slurm), without=["n2"]) == "13"
    assert list(slurm.queue) == ["13"] and slurm.done[-1] == "cancel 12"
