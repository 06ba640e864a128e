"""`ftslurm status`: why an attempt ended, who is blamed, how long it took and what it cost."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ftslurm.errors import RunError
from ftslurm.files import append_record, write_json
from ftslurm.replay.trace import TraceRow, TraceWriter
from ftslurm.run.account import read_account
from ftslurm.run.attempts import (
    STOPPED,
    Attempt,
    Outcome,
    Progress,
    append_event,
    claim,
    write_outcome,
    write_progress,
)
from ftslurm.run.layout import RunLayout
from ftslurm.run.node_memory import FAULT, note_node
from ftslurm.run.spec import RunSpec, to_dict
from ftslurm.run.status import main, read_story, render_story
from ftslurm.run.trace_tail import tokens_at

ROOT = Path(__file__).resolve().parent.parent
NOW = 1_000_000.0
TRACEBACK = ["Traceback (most recent call last):\n", '  File "mine.py", line 7, in train\n',
             "    raise ValueError('boom')\n", "ValueError: boom\n"]  # fmt: skip


@pytest.fixture
def layout(tmp_path):
    """Attempt 1 trained to step 37 and failed on rank 3; attempt 2 goes on from 30."""
    layout = RunLayout(tmp_path / "run-1")
    layout.steps.mkdir(parents=True)
    write_json(layout.run_json, {
        "schema_version": 1, "run_id": "run-1", "scheduler": "slurm",
        "spec": to_dict(RunSpec(steps=60)),
    })  # fmt: skip
    first = begin(layout, at=NOW - 100, steps=range(1, 38))
    tell_error(first, 3, "n2", at=NOW - 60)
    tell_error(first, 0, "n1", at=NOW - 59.8, kind="PeerLost", message="rank 0 lost rank 3")
    (first.root / "launcher.log").write_text(
        "srun: job step started\n"
        "srun: error: n2: task 3: Exited with exit code 1\n"
        "srun: error: n[1-2]: tasks 0-2: Terminated\n"
    )
    append_event(first, "ranks_ended", now=lambda: NOW - 58.5, rc=143)
    append_event(first, "decided", now=lambda: NOW - 58.3, action="restart")
    decide(first, at=NOW - 58.3)
    second = begin(layout, at=NOW - 58, steps=range(31, 41), restored=30)
    append_event(second, "first_step", now=lambda: NOW - 53.5, step=31)
    return layout


def begin(layout, *, at, steps, restored=None):
    number = claim(layout, Attempt(0, "12", 0, ["n1", "n2"], claimed_at=at)).number
    paths = layout.attempt(number)
    append_event(paths, "claimed", now=lambda: at)
    if restored is not None:
        append_event(paths, "restored", now=lambda: at + 4, step=restored)
    trace = TraceWriter(layout.trace_file(number))
    for step in steps:
        trace.append(TraceRow(step, 0.5, step, 100 * step, 0.1))
    trace.close()
    write_progress(paths, Progress(
        step=steps[-1], steps=60, phase="training", restored_step=restored, written_at=at + 39,
    ))  # fmt: skip
    return paths


def tell_error(paths, rank, node, *, at, kind="ValueError", message="boom"):
    write_json(paths.ranks / f"rank-{rank:05d}.json", {
        "schema_version": 1, "rank": rank, "node": node, "step": 37, "at": at, "type": kind,
        "message": message, "traceback": TRACEBACK,
    })  # fmt: skip


def decide(paths, *, at, action="restart", **more):
    write_json(paths.decision_json, {
        "schema_version": 1, "action": action, "reason": "rank 3 failed", "decided_at": at,
        "cause": "code", "confidence": 0.9, "blamed": {"node": "n2", "gpu": None, "rank": 3},
        "evidence": [{"text": "ValueError: boom", "file": "ranks/rank-00003.json", "line": None},
                     {"text": "Exited with exit code 1", "file": "launcher.log", "line": 2}],
        "first_failure": {"rank": 3, "node": "n2", "error": "ValueError: boom", "log": "x"},
        "exclude": [], **more,
    })  # fmt: skip


def shown(layout, *options):
    argv = [sys.executable, "-m", "ftslurm", "status", str(layout.root), *options]
    done = subprocess.run(
        argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_attempt_is_told_with_its_cause_its_price_and_the_parts_of_its_recovery(layout):
    text = render_story(read_story(layout, now=NOW), now=NOW)
    for words in (
        "from step 0 to step 37, failed, 7 steps (700 tokens) lost",
        "restart: rank 3 failed",
        "cause code (90%), blamed: node n2, rank 3; ranks/rank-00003.json: ValueError: boom",
        "failure to first new step 6.5 s: detected +1.5, ranks gone +0.0, decided +0.2, "
        "next srun +0.3, restored +4.0, first step +0.5",
        "2 attempts, 7 steps (700 tokens) trained twice",
    ):
        assert words in text


def test_what_is_printed_and_what_programs_get_are_the_same_numbers(layout):
    told = json.loads(shown(layout, "--json"))
    first = told["attempts"][0]
    assert (first["steps_lost"], first["tokens_lost"], told["tokens_lost"]) == (7, 700, 700)
    assert (
        first["timeline"]["rto_s"] == 6.5 == pytest.approx(sum(first["timeline"]["parts"].values()))
    )
    assert (first["cause"], first["confidence"], first["blamed"]["rank"]) == ("code", 0.9, 3)
    assert first["first_failure"]["traceback"][-1] == "ValueError: boom"
    assert first["evidence"][1] == {
        "text": "Exited with exit code 1", "file": "launcher.log", "line": 2,
    }  # fmt: skip


def test_a_next_attempt_that_trained_nothing_leaves_the_time_unknown(layout):
    layout.trace_file(2).unlink()
    second = layout.attempt(2)
    second.events.unlink()
    text = render_story(read_story(layout, now=NOW), now=NOW)
    assert "failure to first new step unknown: detected +1.5, " in text
    assert "first step unknown" in text


def test_a_preempted_attempt_has_not_failed_and_its_time_counts_from_the_signal(layout):
    first = layout.attempt(1)
    append_event(first, "signal", now=lambda: NOW - 60, signal="SIGUSR1", step=37)
    write_outcome(first, Outcome(STOPPED, 37, 37, "SIGUSR1"))
    text = render_story(read_story(layout, now=NOW), now=NOW)
    assert "asked to leave to first new step 6.5 s: detected +0.0, ranks gone +1.5, " in text


def test_what_a_person_took_to_resume_a_run_is_no_recovery(layout):
    write_outcome(layout.attempt(1), Outcome(STOPPED, 37, 37, order="stop"))
    text = render_story(read_story(layout, now=NOW), now=NOW)
    assert "stopped by the order `stop`" in text and "first new step" not in text


def test_of_an_attempt_that_has_not_trained_yet_no_step_is_told(layout):
    claim(layout, Attempt(0, "12", 1, ["n1", "n2"], claimed_at=NOW - 1))
    text = render_story(read_story(layout, now=NOW), now=NOW)
    assert "attempt 3 (job 12 restart 1, n1,n2): no step, running" in text


def test_evidence_is_named_from_the_attempts_folder_on_however_the_run_is_named(
    layout, monkeypatch
):
    first = layout.attempt(1)
    clue = {"text": "ValueError: boom", "file": str(first.ranks / "rank-00003.json"), "line": None}
    decide(first, at=NOW - 58.3, evidence=[clue])
    monkeypatch.chdir(layout.root.parent)
    text = render_story(read_story(RunLayout(Path("run-1")), now=NOW), now=NOW)
    assert "rank 3; ranks/rank-00003.json: ValueError: boom" in text


@pytest.mark.parametrize("action", ["stop", "restart"])
def test_a_stopped_run_shows_the_end_of_the_first_failing_ranks_traceback(layout, action):
    second = layout.attempt(2)
    tell_error(second, 1, "n1", at=NOW - 10, kind="PeerLost", message="rank 1 lost rank 3")
    tell_error(second, 3, "n2", at=NOW - 9)
    decide(second, at=NOW - 8, action=action)
    text = render_story(read_story(layout, now=NOW), now=NOW)
    told = "attempt 2: rank 3 on n2 failed first at step 37: ValueError: boom" in text
    assert told == ('File "mine.py", line 7' in text) == (action == "stop")


def test_of_a_rank_that_left_no_record_the_end_of_its_log_is_shown(layout):
    second = layout.attempt(2)
    log = second.logs / "rank-3.log"
    log.write_text("words\n" * 5000 + "Fatal Python error: Segmentation fault\n  File mine.py\n")
    told = {"rank": 3, "node": "n2", "error": "left without a word", "log": str(log), "step": 40}
    decide(second, at=NOW - 8, action="stop", first_failure=told)
    text = render_story(read_story(layout, now=NOW), now=NOW)
    assert "rank 3 on n2 failed first at step 40: left without a word" in text
    assert "    Fatal Python error: Segmentation fault\n      File mine.py\n" in text
    assert text.count("words\n") < 10


def test_without_a_decision_the_first_failure_is_the_earliest_by_the_leaders_clock(layout):
    second = layout.attempt(2)
    tell_error(second, 0, "n1", at=NOW - 9.8, kind="RuntimeError", message="closed by peer")
    tell_error(second, 2, "n2", at=NOW - 10 + 90)
    write_json(second.root / "agents.json", {
        "schema_version": 1, "attempt": 2, "leader": "n1", "ranks": {}, "findings": [],
        "nodes": {"n1": {"state": "live", "offset_s": 0.0},
                  "n2": {"state": "live", "offset_s": 90.0}},
    })  # fmt: skip
    failure = read_story(layout, now=NOW).attempts[1].first_failure
    assert (failure.rank, failure.error) == (2, "ValueError: boom")


def test_nodes_that_the_run_keeps_off_are_named_with_the_reason(layout):
    note_node(layout, FAULT, "n2", attempt=1, cause="gpu", why="Xid 79 on gpu 3")
    story = read_story(layout, now=NOW)
    assert story.excluded == {"n2": "since attempt 1, Xid 79 on gpu 3"}
    assert "excluded node n2: since attempt 1, Xid 79 on gpu 3" in render_story(story, now=NOW)


def test_what_the_agents_found_is_told(layout):
    finding = {"kind": "hang", "at": NOW - 59, "since": NOW - 60, "why": "rank 3 is stopped",
               "ranks": [3], "nodes": ["n2"], "acted": True}  # fmt: skip
    write_json(layout.attempt(1).root / "agents.json", {
        "schema_version": 1, "nodes": {}, "ranks": {}, "findings": [finding],
    })  # fmt: skip
    story = read_story(layout, now=NOW)
    assert story.attempts[0].findings == [finding]
    assert "agents: hang: rank 3 is stopped" in render_story(story, now=NOW)
    assert story.attempts[0].timeline.mttd_s == 1.0


def test_a_torn_record_costs_what_it_said_and_not_the_answer(layout):
    for name in ("agents.json", "agents.jsonl", "decision.json"):
        (layout.attempt(1).root / name).write_text('{"schema_ver')
    story = read_story(layout, now=NOW)
    assert (story.attempts[0].ended, story.attempts[0].cause) == ("killed", None)


def test_one_attempts_whole_story_names_every_rank_and_what_was_told_in_order(layout):
    first = layout.attempt(1)
    exits = {"at": NOW - 59.9, "kind": "rank_exit", "node": "n2", "rank": 3, "step": 37}
    append_record(first.root / "agents.jsonl", exits)
    (first.root / "evidence" / "stacks").mkdir(parents=True)
    (first.root / "evidence" / "stacks" / "rank-00003.txt").write_text("x")
    account = read_account(layout, 1)
    assert account.kept == ["evidence/stacks/rank-00003.txt"]
    ranks = {rank.rank: (rank.code, rank.signal, rank.told_by) for rank in account.ranks}
    assert ranks[3] == (1, None, "launcher.log:2")
    assert ranks[0] == ranks[2] == (None, "SIGTERM", "launcher.log:3")
    assert [node.node for node in account.nodes] == ["n1", "n2"]
    kinds = [event["kind"] for event in account.events]
    assert kinds == ["claimed", "error", "rank_exit", "error", "ranks_ended", "decided"]
    text = shown(layout, "--attempt", "1")
    for words in (
        "ValueError: boom",
        "rank 3 on n2 at step 37: exit code 1 (launcher.log:2)",
        "rank 1 on unknown node: SIGTERM",
        "n2 (ranks): unknown",
        "kept: evidence/stacks/rank-00003.txt",
        "ranks_ended rc=143",
    ):
        assert words in text
    told = json.loads(shown(layout, "--attempt", "1", "--json"))
    assert told["timeline"]["rto_s"] == 6.5 and len(told["ranks"]) == 4


def test_spares_and_nodes_that_were_left_out_are_told_apart_from_those_with_ranks(layout):
    number = claim(layout, Attempt(
        0, "13", 0, ["n1", "n3"], claimed_at=NOW, spares=["n4"], excluded={"n2": "Xid 79"},
        tasks_per_node=2, world_size=4,
    )).number  # fmt: skip
    account = read_account(layout, number)
    assert {node.node: node.role for node in account.nodes} == {
        "n1": "ranks", "n3": "ranks", "n4": "spare", "n2": "left out, Xid 79",
    }  # fmt: skip
    assert [(rank.rank, rank.node) for rank in account.ranks] == [
        (0, "n1"), (1, "n1"), (2, "n3"), (3, "n3"),
    ]  # fmt: skip


def test_ranks_that_ended_well_and_ranks_of_which_nothing_is_known_are_told_apart(layout):
    second = layout.attempt(2)
    write_json(second.root / "agents.json", {
        "schema_version": 1, "nodes": {}, "findings": [],
        "ranks": {"0": {"node": "n1", "step": 40}, "1": {"node": "n2", "step": 40}},
    })  # fmt: skip
    assert [rank.told_by for rank in read_account(layout, 2).ranks] == ["nobody", "nobody"]
    append_event(second, "ranks_ended", rc=0)
    ranks = read_account(layout, 2).ranks
    assert [(rank.rank, rank.code, rank.node) for rank in ranks] == [(0, 0, "n1"), (1, 0, "n2")]


def test_an_attempt_that_there_is_not_is_refused_with_those_there_are(layout):
    with pytest.raises(RunError, match="no attempt 7; its attempts are 1 to 2"):
        main([str(layout.root), "--attempt", "7"])


def test_tokens_of_a_step_are_found_without_reading_the_trace(tmp_path):
    path = tmp_path / "attempt-0001.jsonl"
    trace = TraceWriter(path)
    for step in range(1, 5000):
        trace.append(TraceRow(step, 0.5, step, 100 * step, 0.1))
    trace.close()
    for step in (1, 2, 777, 4998, 4999):
        assert tokens_at(path, step) == 100 * step
    assert tokens_at(path, 5000) is tokens_at(path, 0) is None
    assert tokens_at(tmp_path / "none", 1) is None
    with path.open("ab") as stream:
        stream.write(b'{"torn": ')
    assert tokens_at(path, 4999) == 499_900


@pytest.mark.parametrize("attempts", [1, 20])
def test_status_takes_little_more_than_bare_python(layout, attempts, tmp_path):
    """User and system time, printed. A busy machine stretches even that, of both of them."""
    for _ in range(attempts):
        decide(begin(layout, at=NOW, steps=range(31, 33), restored=30), at=NOW)
    kinds = (["-c", "pass"], ["-m", "ftslurm", "status", str(layout.root)])
    rounds = [[cpu_s(argv, tmp_path / "compiled") for argv in kinds] for _ in range(5)]
    bare, ours = (min(taken) for taken in zip(*rounds))
    print(f"{attempts + 2} attempts: {1000 * (ours - bare):.0f} ms of CPU beyond bare python's"
          f" {1000 * bare:.0f}")  # fmt: skip
    assert ours - bare < max(0.25, 12 * bare)


def cpu_s(argv, compiled):
    """Beginning with the second one, nothing of it is compiled anew."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(compiled)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run(
        [sys.executable, *argv], env=environ, capture_output=True, check=True, timeout=60
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
