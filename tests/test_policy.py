"""Each rule of the decision between attempts, one row a rule; and what a stop tells a person."""

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from fakes.recovering import PLAIN

from ftslurm.diagnosis.finding import Finding
from ftslurm.errors import RANK_NEVER_RETRY, RANK_STOPPED
from ftslurm.recovery.case import PastAttempt, RankFailure
from ftslurm.recovery.policy import decide
from ftslurm.run.attempts import FAILED, FINISHED, STOPPED, Outcome
from ftslurm.run.spec import RecoverySpec

FAILURE = RankFailure(rank=2, node="n3", error="ValueError: bad loss", log="/runs/r/rank-2.log")


def outcome(result, *, step=45, committed=45, **more):
    return Outcome(result=result, step=step, committed_step=committed, **more)


def past(*words):
    """`f` failed, `s` stopped; a capital letter: it committed a step."""
    return [PastAttempt(i + 1, word in "fF", word in "FS") for i, word in enumerate(words)]


@pytest.mark.parametrize(("changes", "action", "cause"), [
    ({"done": True, "rc": 0}, "done", "finished"),
    ({"done": True, "rc": 143, "term": True}, "done", "finished"),
    ({"outcome": outcome(FINISHED), "rc": 137}, "done", "finished"),
    ({"outcome": outcome(STOPPED), "rc": RANK_STOPPED}, "requeued", "asked_to_leave"),
    ({"outcome": outcome(STOPPED), "rc": 143, "term": True}, "requeued", "asked_to_leave"),
    ({"outcome": outcome(STOPPED, committed=40), "rc": 75}, "requeued", "failed"),
    ({"outcome": outcome(STOPPED, committed=40), "rc": 75, "progressed": True},
     "requeued", "asked_to_leave"),
    ({"term": True, "rc": 143}, "requeued", "asked_to_leave"),
    ({"rc": RANK_NEVER_RETRY}, "stop", "never_retry"),
    ({"outcome": outcome(FAILED, retry=False), "rc": 143}, "stop", "never_retry"),
    ({"outcome": outcome(FAILED), "rc": 1}, "restart", "failed"),
    ({"rc": 1}, "restart", "failed"),
    ({"rc": 137}, "restart", "failed"),
    ({"rc": 0}, "restart", "failed"),
    ({"rc": RANK_STOPPED}, "restart", "failed"),
    ({"rc": 143, "ranks_signalled": True}, "requeued", "failed"),
    ({"rc": 138, "limit_is_near": True}, "requeued", "failed"),
    ({"rc": 1, "controller_away": True}, "restart", "not_started"),
])  # fmt: skip
def test_the_first_rule_that_applies_decides(changes, action, cause):
    decision = decide([], replace(PLAIN, **changes), RecoverySpec(max_failures=3))
    assert (decision.action, decision.cause) == (action, cause)
    assert decision.reason


@pytest.mark.parametrize(("cause", "confidence", "told"), [
    ("checkpoint", 0.9, "checkpoint"),
    ("checkpoint", 0.4, "never_retry"),
    ("code", 0.9, "never_retry"),
    ("preempted", 0.9, "never_retry"),
])  # fmt: skip
def test_a_stop_that_the_rank_asks_for_has_the_cause_that_was_found(cause, confidence, told):
    finding = Finding(cause, confidence, 0, "n1", None, [], "so it was")
    decision = decide([], replace(PLAIN, rc=RANK_NEVER_RETRY, finding=finding), RecoverySpec())
    assert (decision.action, decision.cause) == ("stop", told)


@pytest.mark.parametrize(("before", "progressed", "action", "failures"), [
    ("", False, "restart", 1),
    ("ff", False, "restart", 3),
    ("fff", False, "stop", 4),
    ("fff", True, "restart", 0),
    ("ffF", False, "restart", 1),  # a failure that committed a step begins the count anew
    ("ffS", False, "restart", 1),
    ("fsfsf", False, "stop", 4),  # preemptions in between neither count nor clear
    ("sssss", False, "restart", 1),
    ("FFFFF", True, "restart", 0),
])  # fmt: skip
def test_failures_count_until_a_step_is_committed(before, progressed, action, failures):
    decision = decide(
        past(*before), replace(PLAIN, progressed=progressed), RecoverySpec(max_failures=3)
    )
    assert (decision.action, decision.failures_in_a_row) == (action, failures)


def test_every_key_of_recovery_is_in_its_default_preset_which_says_what_it_is():
    path = Path(__file__).parents[1] / "conf" / "recovery" / "default.yaml"
    told = set(re.findall(r"^(?:#   )?([a-z_]+):", path.read_text(), re.MULTILINE))
    assert {key.name for key in fields(RecoverySpec)} <= told


def test_with_no_failures_allowed_the_first_one_stops():
    assert decide([], PLAIN, RecoverySpec(max_failures=0)).action == "stop"
    assert (
        decide([], replace(PLAIN, progressed=True), RecoverySpec(max_failures=0)).action
        == "restart"
    )


def test_a_stop_names_the_first_failing_rank_its_log_and_what_to_do():
    decision = decide(
        past("f"), replace(PLAIN, first_failure=FAILURE), RecoverySpec(max_failures=1)
    )
    assert decision.action == "stop"
    for words in ("2 failures in a row", "rank 2 on n3", "ValueError: bad loss", FAILURE.log,
                  "recovery.max_failures is 1", "mend the cause and submit again"):  # fmt: skip
        assert words in decision.reason


def test_a_stop_without_any_word_of_a_rank_names_the_logs():
    decision = decide([], replace(PLAIN, rc=137), RecoverySpec(max_failures=0))
    assert "code 137" in decision.reason and PLAIN.logs in decision.reason


def test_the_reason_of_a_requeue_tells_the_step_that_the_next_attempt_starts_from():
    late = replace(PLAIN, outcome=outcome(STOPPED, step=45, committed=40, signal="SIGTERM"))
    assert decide([], late, RecoverySpec(max_failures=3)).reason == (
        "stopped on SIGTERM at step 45, is to go on from step 40"
    )
    saved = replace(PLAIN, outcome=outcome(STOPPED, signal="SIGUSR1"))
    assert decide([], saved, RecoverySpec(max_failures=3)).reason == (
        "stopped on SIGUSR1 at step 45, all committed"
    )
    none = replace(PLAIN, term=True, committed_step=None)
    assert "begins at step 0" in decide([], none, RecoverySpec(max_failures=3)).reason


def test_stops_that_never_save_end_the_run_and_say_what_to_change():
    late = replace(
        PLAIN, outcome=outcome(STOPPED, step=45, committed=40, signal="SIGUSR1", reason="too slow")
    )
    assert decide(past(*"ff"), late, RecoverySpec(max_failures=3)).action == "requeued"
    stop = decide(past(*"fff"), late, RecoverySpec(max_failures=3))
    assert (stop.action, stop.failures_in_a_row) == ("stop", 4)
    assert "too slow" in stop.reason and "cluster.signal_lead_s" in stop.reason


@pytest.mark.parametrize(("changes", "order", "action"), [
    ({"rc": 1}, "stop", "ended"),
    ({"rc": 1}, "pause", "paused"),
    ({"term": True, "rc": 143}, "stop", "ended"),
    ({"outcome": outcome(STOPPED), "rc": RANK_STOPPED}, "pause", "paused"),
    ({"outcome": outcome(STOPPED, order="pause"), "rc": RANK_STOPPED}, "stop", "ended"),
    ({"outcome": outcome(STOPPED, order="stop"), "rc": RANK_STOPPED}, "pause", "ended"),
    ({"rc": RANK_NEVER_RETRY}, "stop", "stop"),
    ({"done": True, "rc": 0}, "stop", "done"),
])  # fmt: skip
def test_a_run_does_not_go_on_against_an_order_that_no_rank_lived_to_obey(changes, order, action):
    decision = decide([], replace(PLAIN, order=order, **changes), RecoverySpec(max_failures=3))
    assert decision.action == action
    assert action in ("stop", "done") or "ftslurm resume" in decision.reason
