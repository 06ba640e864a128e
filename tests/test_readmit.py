"""`ftslurm resume RUN --readmit NODES`: nodes that a run keeps off are used again."""

import json

import pytest
from fakes.operated import CANCELLED, HELD, QUEUED, RUNNING, make_layout, make_run, quick, train

from ftslurm.errors import UsageError
from ftslurm.files import write_json
from ftslurm.operate import resume
from ftslurm.operate.resume import resume as resume_run
from ftslurm.run.node_memory import BY_PERSON, EXCLUDED, FAULT, READMITTED, note_node
from ftslurm.run.node_memory import read_node_events as read
from ftslurm.run.status import render_story
from ftslurm.run.story import read_story


@pytest.fixture
def layout(tmp_path):
    """A run that keeps off n2 and n3."""
    layout = make_layout(tmp_path)
    train(layout)
    note_node(layout, FAULT, "n2", attempt=1, cause="gpu", why="Xid 79")
    note_node(layout, EXCLUDED, "n3", attempt=1, cause="straggler", why="slow")
    return layout


@pytest.fixture
def submitted(monkeypatch):
    """The nodes that each new job is kept off."""
    calls = []

    def submit_again(layout, scheduler, *, exclude):
        calls.append(exclude)
        return "71"

    monkeypatch.setattr(resume, "submit_again", submit_again)
    return calls


def kept_off(layout):
    return sorted(read_story(layout, now=1e10).excluded)


def test_a_new_job_is_not_kept_off_a_node_that_was_readmitted(layout, submitted):
    answer = resume_run(make_run(layout, CANCELLED), readmit=["n2"], sleep=quick)
    assert submitted == [["n3"]]
    assert answer.result == "queued" and "from the next attempt on: n2" in answer.text
    last = read(layout)[-1]
    assert (last.kind, last.node, last.cause) == (READMITTED, "n2", BY_PERSON)


def test_a_job_that_waits_already_is_no_longer_kept_off_it(layout, submitted):
    run = make_run(layout, QUEUED)
    run.scheduler.excluded["7"] = ["n2", "n3", "n9"]  # n9 by an operator
    assert resume_run(run, readmit=["n2", "n3"], sleep=quick).result == "waiting"
    assert run.scheduler.excluded == {"7": ["n9"]} and submitted == []


def test_a_held_job_is_no_longer_kept_off_it_before_it_is_released(layout, submitted):
    run = make_run(layout, HELD)
    run.scheduler.excluded["7"] = ["n2", "n3"]
    assert resume_run(run, readmit=["n3"], sleep=quick).result == "released"
    assert run.scheduler.excluded == {"7": ["n2"]}


def test_a_run_that_trains_may_use_it_from_its_next_attempt_on(layout, submitted):
    answer = resume_run(make_run(layout, RUNNING), readmit=["n2"], sleep=quick)
    assert answer.result == "running" and "from the next attempt on: n2" in answer.text
    assert read(layout)[-1].kind == READMITTED and submitted == []


def test_one_wrong_name_readmits_nothing_and_says_what_could_be(layout, submitted):
    before = read(layout)
    with pytest.raises(UsageError, match="does not keep off node n8; it keeps off n2, n3"):
        resume_run(make_run(layout, CANCELLED), readmit=["n2", "n8"], sleep=quick)
    assert read(layout) == before and submitted == []


def test_a_fault_that_the_batch_shell_did_not_live_to_note_is_forgiven_too(layout, submitted):
    decision = {"action": "restart", "cause": "gpu", "blamed": {"node": "n4"}, "reason": "Xid 48"}
    write_json(layout.attempt(1).decision_json, {"schema_version": 1, **decision})
    resume_run(make_run(layout, CANCELLED), readmit=["n4"], sleep=quick)
    assert submitted == [["n2", "n3"]]


def test_names_are_written_as_slurm_writes_them(layout, submitted, monkeypatch, capsys):
    run = make_run(layout, CANCELLED)
    monkeypatch.setattr(resume, "open_run", lambda name: run)
    assert resume.main(["main-1", "--readmit", "n[2-3]", "--json"]) == 0
    assert submitted == [[]] and json.loads(capsys.readouterr().out)["result"] == "queued"


def test_what_is_held_against_a_node_is_forgotten_in_a_week(layout, submitted):
    told = render_story(read_story(layout, now=read(layout)[0].at + 6 * 86_400), now=0.0)
    assert "excluded node n2" in told and "excluded node n3" in told and "--readmit" in told
    assert kept_off(layout) == []
