"""`ftslurm status` tells what happened from the run directory alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_step

from ftslurm.errors import RunError
from ftslurm.files import append_record, write_json
from ftslurm.replay.trace import TraceRow, TraceWriter
from ftslurm.run.acts import note_act
from ftslurm.run.attempts import (
    STOPPED,
    AdoptedStep,
    Attempt,
    Outcome,
    Progress,
    append_event,
    claim,
    write_outcome,
    write_progress,
)
from ftslurm.run.jobs import BY_SUBMIT, add_job
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import RunSpec, to_dict
from ftslurm.run.status import read_story, render_story

ROOT = Path(__file__).resolve().parent.parent
NOW = 1_000_000.0


@pytest.fixture
def layout(tmp_path):
    layout = RunLayout(tmp_path / "run-1")
    layout.steps.mkdir(parents=True)
    write_json(layout.run_json, {
        "schema_version": 1, "run_id": "run-1", "scheduler": "slurm",
        "spec": to_dict(RunSpec(steps=60)),
    })  # fmt: skip
    return layout


def attempt(layout, *, restored=None, trained_to=None, written_at=NOW - 10, adopted=()):
    claimed = claim(layout, Attempt(
        number=0, job_id="12", restart_count=len(adopted), nodes=["n1", "n2"],
        claimed_at=NOW - 100, adopted=[AdoptedStep(step, "d") for step in adopted],
    ))  # fmt: skip
    paths = layout.attempt(claimed.number)
    if restored is not None:
        append_event(paths, "restored", step=restored)
    if trained_to is not None:
        trace = TraceWriter(layout.trace_file(claimed.number))
        for step in range((restored or 0) + 1, trained_to + 1):
            trace.append(TraceRow(step, 0.5, step, step, 0.1))
        trace.close()
        write_progress(paths, Progress(
            step=trained_to - 1, steps=60, loss=0.5, tokens_per_s=100.0, restored_step=restored,
            written_at=written_at,
        ))  # fmt: skip
    return paths


def decide(paths, action, reason="because"):
    record = {"schema_version": 1, "action": action, "cause": "failed", "reason": reason}
    write_json(paths.root / "decision.json", record)


def story(layout, now=NOW):
    return read_story(layout, now=now)


def test_a_run_that_nobody_started_says_so(layout):
    assert story(layout).state == "never started"
    assert "never started" in render_story(story(layout), now=NOW)
    layout.submit.mkdir()
    add_job(layout, "70_1", scheduler="slurm", queued_by=BY_SUBMIT, now=lambda: NOW - 90)
    told = render_story(story(layout), now=NOW).splitlines()[0]
    assert told.endswith(": never started; job 70_1 was queued 90 s ago"), told


def test_a_finished_run_is_done_whatever_its_attempts_look_like(layout):
    attempt(layout, trained_to=60)
    write_json(layout.done, {"schema_version": 1})
    assert story(layout).state == "done"


@pytest.mark.parametrize(("action", "state"), [("stop", "stopped"), ("requeued", "waiting")])
def test_the_last_decision_is_the_state(layout, action, state):
    decide(attempt(layout, trained_to=20), action)
    assert story(layout).state == state


def test_a_run_without_a_sign_for_long_is_called_quiet(layout):
    attempt(layout, trained_to=20)
    assert story(layout).state == "running"
    assert story(layout, now=NOW + 1000).state == "quiet"
    assert "17 min ago" in render_story(story(layout, now=NOW + 1000), now=NOW + 1000)


def test_steps_trained_twice_are_the_steps_lost(layout):
    write_outcome(attempt(layout, trained_to=30), Outcome(STOPPED, 30, 30, "SIGUSR1"))
    decide(layout.attempt(1), "requeued")
    attempt(layout, restored=30, trained_to=47)  # killed: no outcome, no decision
    attempt(layout, adopted=[30])  # died before it restored
    attempt(layout, restored=40, trained_to=60, adopted=[30, 40])
    told = story(layout)
    assert [item.steps_lost for item in told.attempts] == [0, 7, 0, 0]
    assert [item.ended for item in told.attempts] == ["stopped", "killed", "killed", "running"]
    assert told.steps_lost == 7
    assert told.last_step == 60


def test_a_step_trained_three_times_is_lost_twice(layout):
    for _ in range(2):
        decide(attempt(layout, restored=10, trained_to=20), "restart")
    attempt(layout, restored=10, trained_to=15)
    assert [item.steps_lost for item in story(layout).attempts] == [10, 5, 0]


def test_the_story_names_nodes_signal_decision_and_committed_steps(layout):
    write_outcome(attempt(layout, trained_to=30), Outcome(STOPPED, 30, 30, "SIGUSR1"))
    decide(layout.attempt(1), "requeued", "stopped on SIGUSR1 at step 30, all committed")
    make_step(layout, 20)
    make_step(layout, 30)
    text = render_story(story(layout), now=NOW)
    for words in ("run-1: waiting", "step 30 of 60", "newest committed step 30", "kept: 20, 30",
                  "attempt 1 (job 12, n1,n2): from step 0 to step 30, stopped on SIGUSR1",
                  "requeued: stopped on SIGUSR1 at step 30, all committed"):  # fmt: skip
        assert words in text


def test_what_a_last_save_was_given_is_told_by_the_ranks_else_by_the_agents(layout):
    paths = attempt(layout, trained_to=30)
    write_outcome(paths, Outcome(STOPPED, 30, 30, "SIGTERM"))
    assert story(layout).attempts[0].deadline is None
    asked = {"at": NOW, "kind": "deadline", "node": "n1", "signal": "SIGTERM"}
    append_record(paths.root / "agents.jsonl", {**asked, "answered": False})
    assert story(layout).attempts[0].deadline is None
    append_record(paths.root / "agents.jsonl", {**asked, "left_s": 60.4, "by": "preempted"})
    assert "stopped on SIGTERM, 60 s for the save (the grace)" in told(layout)
    append_event(paths, "deadline", left_s=14.0, by="submit")
    assert story(layout).attempts[0].deadline == {"left_s": 14.0, "by": "submit"}
    assert "stopped on SIGTERM, 14 s for the save (as at submit)" in told(layout)


def told(layout):
    return render_story(story(layout), now=NOW)


def test_an_attempt_whose_claim_was_cut_short_is_still_told(layout):
    (layout.attempts / "0001").mkdir(parents=True)
    assert "attempt 1 (job ?" in render_story(story(layout), now=NOW)


def test_a_long_trace_is_read_from_its_end_and_a_torn_line_is_passed_over(layout):
    attempt(layout, trained_to=2000)
    with layout.trace_file(1).open("ab") as stream:
        stream.write(b'{"schema_version": 1, "step": 20')
    assert story(layout).attempts[0].last_step == 2000


def test_a_folder_that_is_no_run_is_refused_with_a_hint(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunError, match="no run directory.*ftslurm submit"):
            story(RunLayout(path))


def test_the_json_of_the_verb_carries_a_version(layout):
    decide(attempt(layout, trained_to=20), "stop")
    argv = [sys.executable, "-m", "ftslurm", "status", str(layout.root), "--json"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["schema_version"], record["state"], record["last_step"]) == (1, "stopped", 20)


def test_an_attempt_killed_while_it_was_told_to_leave_did_not_fail(layout):
    record = {"schema_version": 1, "action": "requeued", "cause": "asked_to_leave", "reason": "x"}
    write_json(attempt(layout, trained_to=20).root / "decision.json", record)
    assert story(layout).attempts[0].ended == "killed"


@pytest.mark.parametrize(
    ("order", "action", "state"), [("stop", "ended", "stopped"), ("pause", "paused", "paused")]
)
def test_a_run_that_an_operator_stopped_says_so(layout, order, action, state):
    paths = attempt(layout, trained_to=30)
    write_outcome(paths, Outcome(STOPPED, 30, 30, order=order))
    reason = f"stopped by the order `{order}` at step 30"
    write_json(paths.decision_json, {"schema_version": 1, "action": action, "reason": reason})
    story = read_story(layout, now=NOW)
    assert (story.state, story.attempts[0].ended, story.attempts[0].order) == (
        state, "stopped", order,
    )  # fmt: skip
    assert f"to step 30, stopped by the order `{order}`" in render_story(story, now=NOW)


@pytest.mark.parametrize(
    ("result", "state"),
    [("cancelled", "cancelled"), ("queued", "waiting"), ("paused", "paused"), ("saved", "stopped")],
)
def test_what_a_person_did_counts_until_the_next_attempt_begins(layout, result, state):
    paths = attempt(layout, trained_to=30)
    write_json(paths.decision_json, {"schema_version": 1, "action": "stop", "reason": "x"})
    note_act(layout, "any", "paused", "12", now=lambda: NOW - 200)  # before the attempt
    assert read_story(layout, now=NOW).state == "stopped"
    note_act(layout, "any", result, "12", now=lambda: NOW - 5)
    assert read_story(layout, now=NOW).state == state
