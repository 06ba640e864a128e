"""`ftslurm recover` finds out what ended an attempt, acts on it, waits, and tells people."""

import json
import os
import signal
import time

import pytest
from checkpoints import make_step
from fakes.recovering import FakeScheduler, begin, decide, make_layout, rank_error

from ftslurm.errors import PREFLIGHT_NAMED, RANK_NEVER_RETRY
from ftslurm.files import read_json, write_json
from ftslurm.recovery.claim import claim_attempt
from ftslurm.run.attempts import STOPPED, Outcome, write_outcome
from ftslurm.run.control import control_files
from ftslurm.run.record import read_record
from ftslurm.run.skipped import read_skips


@pytest.fixture
def layout(tmp_path):
    return make_layout(tmp_path)


def test_the_cause_the_blame_and_the_deciding_lines_are_on_record(layout):
    paths = begin(layout)
    rank_error(paths, 0, 5.0, "rank 0 lost another rank", kind="PeerLost")
    rank_error(paths, 3, 9.0, "no such key", kind="KeyError", node="n2")
    decide(layout)
    record = read_json(paths.decision_json)
    assert (record["cause"], record["is_failure"]) == ("code", True)
    assert record["confidence"] > 0.5 and record["blamed"]["rank"] == 3
    assert record["evidence"][0]["file"].endswith("rank-00003.json")
    assert (record["signature"], record["step"]) == ("KeyError: no such key", 3)


def test_the_same_error_at_the_same_step_is_found_again_over_attempts(layout):
    for attempt, address in ((1, "0x7f00"), (2, "0x7fff")):
        rank_error(
            begin(layout, adopted=[2]), 3, 9.0, f"no key in <object at {address}>", "KeyError"
        )
        decision = decide(layout, attempt=attempt)
    assert decision.action == "stop"
    assert "the same error came at the same step, 3, as in attempt 1" in decision.reason


@pytest.mark.parametrize("broken", ["raises", "hangs"])
def test_a_classification_that_fails_or_is_slow_leaves_it_to_the_old_rules(
    layout, monkeypatch, broken
):
    rank_error(begin(layout), 1, 5.0, "bad loss")

    def gather(*_, **__):
        if broken == "hangs":
            time.sleep(30)
        raise ZeroDivisionError("of its own")

    monkeypatch.setattr("ftslurm.diagnosis.clues.gather", gather)
    monkeypatch.setattr("ftslurm.diagnosis.find.DEADLINE_S", 0.2)
    monkeypatch.setattr("ftslurm.diagnosis.find.MARGIN_S", 0.1)
    begun = time.monotonic()
    decision = decide(layout)
    assert time.monotonic() - begun < 20
    assert (decision.action, decision.cause, decision.confidence) == ("restart", "failed", None)
    assert "rank 1 on n1 failed first" in decision.reason
    assert {"raises": "ZeroDivisionError: of its own", "hangs": "longer than"}[broken] in (
        decision.reason
    )


@pytest.mark.parametrize(("term", "alive", "action", "cause"), [
    (False, True, "requeued", "node"),  # there is no spare
    (True, True, "requeued", "asked_to_leave"),
    (False, False, "restart", "not_started"),
])  # fmt: skip
def test_what_a_preflight_has_named_is_kept_off_whatever_else_there_is(
    layout, monkeypatch, term, alive, action, cause
):
    def gather(*_, **__):
        raise AssertionError("asked")

    monkeypatch.setattr("ftslurm.diagnosis.clues.gather", gather)
    record = read_json(layout.run_json)
    write_json(layout.run_json, {**record, "scheduler": "slurm"})
    paths = begin(layout)
    (paths.logs / "rank-0.log").unlink()
    write_json(paths.preflight_json, {"schema_version": 1, "at": 5.0, "bad": {"n2": "too slow"}})
    scheduler = FakeScheduler(alive=[alive, True])
    rc = 143 if term else PREFLIGHT_NAMED
    decision = decide(layout, scheduler, rc=rc, term=term, sleep=lambda s: None)
    assert (decision.action, decision.cause) == (action, cause), decision.reason
    assert decision.exclude == ("n2",) and "n2 (too slow)" in decision.reason
    assert not decision.is_failure


def test_in_a_grace_period_nothing_is_classified(layout, monkeypatch):
    def gather(*_, **__):
        raise AssertionError("asked")

    monkeypatch.setattr("ftslurm.diagnosis.clues.gather", gather)
    begin(layout)
    assert "asked" not in decide(layout, rc=143, term=True).reason


def patient(layout, **rules):
    record = read_json(layout.run_json)
    record["spec"]["recovery"].update(rules)
    write_json(layout.run_json, record)


def test_after_the_second_failure_the_restart_waits(layout):
    patient(layout, backoff_s=3.0)
    slept = []
    for attempt in (1, 2):
        begin(layout)
        decision = decide(layout, attempt=attempt, sleep=slept.append)
    assert (decision.action, decision.wait_s) == ("restart", 3.0)
    assert sum(slept) == 3.0
    assert read_json(layout.attempt(2).decision_json)["wait_s"] == 3.0


def test_a_wait_ends_when_the_job_is_told_to_end_and_the_run_is_queued_again(layout):
    patient(layout, backoff_s=300.0)
    begin(layout)
    decide(layout)
    begin(layout)
    scheduler, slept = FakeScheduler(), []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    decision = decide(layout, scheduler, attempt=2, sleep=sleep)
    assert (decision.action, len(slept)) == ("requeued", 3)
    assert "while it waited, the job was told to end" in decision.reason
    assert scheduler.requeued == ["12"]
    assert read_json(layout.attempt(2).decision_json)["action"] == "requeued"
    assert signal.getsignal(signal.SIGTERM) == before


def test_so_it_does_when_the_end_comes_near_without_a_signal(layout):
    patient(layout, backoff_s=10.0)
    begin(layout)
    decide(layout)
    begin(layout)
    scheduler = FakeScheduler(end_at=time.time() + 4000)

    def sleep(seconds):
        scheduler.end_at = time.time() + 10  # a preemption whose first signal is for ranks alone

    decision = decide(layout, scheduler, attempt=2, sleep=sleep)
    assert decision.action == "requeued" and "about to end" in decision.reason
    assert scheduler.requeued == ["12"]


def test_an_order_that_comes_while_it_waits_is_obeyed_at_once(layout):
    patient(layout, backoff_s=300.0)
    begin(layout)
    decide(layout)
    begin(layout)
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        control_files(layout, read_record(layout)).give("stop")

    decision = decide(layout, attempt=2, sleep=sleep)
    assert (decision.action, len(slept)) == ("ended", 1)
    assert read_json(layout.attempt(2).decision_json)["action"] == "ended"
    assert control_files(layout, read_record(layout)).read_leaving() is None


def test_a_step_that_was_gone_back_behind_is_no_progress_while_it_still_lies_there(layout):
    make_step(layout, 1)
    paths = begin(layout, adopted=[1])
    make_step(layout, 2)
    rank_error(paths, 0, 9.0, "the loss of step 3 is nan", kind="NumericError")
    decision = decide(layout)
    assert (decision.cause, decision.restore_before) == ("numeric", 2)
    # The next attempt dies before its first rank can put step 2 aside.
    begin(layout, adopted=[1])
    decision = decide(layout, attempt=2, rc=137)
    assert decision.failures_in_a_row == 2 and "is to go on from step 1" in decision.reason


def test_batches_to_pass_over_are_noted_before_the_next_attempt(layout):
    patient(layout, on_nan="skip")
    make_step(layout, 1)
    for attempt in (1, 2):
        paths = begin(layout, adopted=[1])
        rank_error(paths, 0, 9.0, "the loss of step 3 is nan", kind="NumericError")
        decision = decide(layout, attempt=attempt)
    assert decision.skip_steps == (2, 3)
    # Noted by the claim, which also follows a shell that died here, a full disk, or a pause.
    assert read_skips(layout) == []
    for _ in range(2):
        claim_attempt(layout, {"SLURM_JOB_ID": "12"})
        assert read_skips(layout) == [(2, 3)]


def test_people_are_told_of_a_stop_with_the_same_reason_as_on_record(layout, tmp_path):
    told = tmp_path / "told"
    hook = tmp_path / "hook.sh"
    hook.write_text(f"#!/bin/sh\ncat > {told}\n")
    hook.chmod(0o755)
    patient(layout, on_event=[str(hook)])
    begin(layout)
    decide(layout, rc=RANK_NEVER_RETRY)
    message = json.loads(told.read_text())
    assert message["event"] == "stop"
    assert message["reason"] == read_json(layout.attempt(1).decision_json)["reason"]


def test_a_straggler_that_the_agents_acted_on_is_left_behind(layout):
    patient(layout, evict="now")
    paths = begin(layout)
    write_outcome(paths, Outcome(STOPPED, step=20, committed_step=20, signal="SIGUSR1"))
    finding = {"kind": "straggler", "nodes": ["n2"], "ranks": [3], "why": "slow", "acted": True}
    write_json(paths.root / "agents.json", {"schema_version": 1, "findings": [finding]})
    scheduler = FakeScheduler()
    decision = decide(layout, scheduler, rc=75)
    assert (decision.cause, decision.exclude) == ("straggler", ("n2",))
    assert decision.action == "requeued"  # of two nodes and no spare
    assert (scheduler.requeued, scheduler.excluded) == (["12"], ["n2"])
