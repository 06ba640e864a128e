"""What a known cause adds to the count of failures: budgets, nodes, ways back, waits."""

from dataclasses import replace

import pytest
from fakes.recovering import PLAIN

from ftslurm.diagnosis import causes
from ftslurm.diagnosis.finding import Clue, Finding
from ftslurm.errors import RANK_NEVER_RETRY
from ftslurm.recovery.budgets import backoff_s
from ftslurm.recovery.case import PastAttempt, RankFailure
from ftslurm.recovery.policy import decide
from ftslurm.run.attempts import STOPPED, Outcome
from ftslurm.run.spec import RecoverySpec

SAVED = Outcome(STOPPED, step=45, committed_step=45, signal="SIGUSR1")


def found(cause, *, node=None, gpu=None, rank=2, confidence=0.9, sentence="so it was"):
    clue = Clue("log", "the line", file="rank-2.log", line=7)
    return Finding(cause, confidence, rank, node, gpu, [clue], sentence)


def failed(number, cause, *, step=37, signature="ValueError: bad loss", **more):
    return PastAttempt(number, True, more.pop("progressed", False), cause, signature, step, **more)


BUG = RankFailure(
    2, "n3", "ValueError: bad loss", "/runs/r/rank-2.log", step=37, signature="ValueError: bad loss"
)
FIRST = replace(PLAIN, committed_step=30, committed_before=20, began_at=30, step=37)


def decided(cause, history=(), rules=None, finding=None, **changes):
    changes = {"first_failure": BUG if cause == causes.CODE else None, **changes}
    evidence = replace(FIRST, finding=finding or found(cause), **changes)
    return decide(list(history), evidence, rules or RecoverySpec())


def test_the_record_carries_cause_confidence_blame_and_the_lines_that_decided():
    decision = decided("gpu", finding=found("gpu", node="n3", gpu="0000:0f:00", sentence="Xid 79"))
    assert (decision.action, decision.cause, decision.confidence) == ("restart", "gpu", 0.9)
    assert vars(decision.blamed) == {"node": "n3", "gpu": "0000:0f:00", "rank": 2}
    assert [vars(clue) for clue in decision.evidence] == [
        {"text": "the line", "file": "rank-2.log", "line": 7}
    ]
    assert "Xid 79" in decision.reason and decision.is_failure


def test_without_a_finding_the_old_rules_decide_and_say_so():
    late = replace(PLAIN, unclassified="it took longer than 11 s")
    decision = decide([failed(1, "failed"), failed(2, "failed")], late, RecoverySpec())
    assert (decision.action, decision.cause) == ("restart", "failed")
    assert "it took longer than 11 s" in decision.reason
    assert decide([failed(i, "failed") for i in (1, 2, 3)], late, RecoverySpec()).action == "stop"


@pytest.mark.parametrize("cause", ["preempted", "time_limit"])
def test_a_preemption_and_a_time_limit_cost_nothing_however_many(cause):
    history = [PastAttempt(i, False, False, cause) for i in range(1, 30)]
    decision = decided(cause, history, step=None)
    assert (decision.action, decision.failures_in_a_row) == ("requeued", 0)
    assert not decision.is_failure and decision.wait_s == 0


@pytest.mark.parametrize("cause", ["cancelled_user", "cancelled_admin"])
def test_a_cancelled_job_stops_the_run_and_is_no_failure_of_it(cause):
    decision = decided(cause)
    assert (decision.action, decision.cause, decision.is_failure) == ("stop", cause, False)
    assert decided(cause, finding=found(cause, confidence=0.3)).action == "restart"


@pytest.mark.parametrize(("history", "changes", "action", "says"), [
    ([], {}, "restart", "rank 2 on n3 failed first"),
    ([failed(3, "code")], {}, "stop", "the same error came at the same step, 37, as in attempt 3"),
    # Also where the first one had committed a step before it met the bug.
    ([failed(3, "code", progressed=True)], {}, "stop", "as in attempt 3"),
    # And where a preemption lies between.
    ([failed(2, "code"), PastAttempt(3, False, False, "asked_to_leave")], {}, "stop", "attempt 2"),
    ([failed(3, "code", step=36)], {}, "restart", ""),
    ([failed(3, "code", signature="KeyError: 'x'")], {}, "restart", ""),
    # Before step 1: nothing of the run has ever been trained.
    ([], {"first_failure": replace(BUG, step=0), "step": 0, "began_at": 0, "committed_step": None},
     "stop", "no step was trained before it"),
    ([], {"first_failure": replace(BUG, step=None), "step": None, "committed_step": None},
     "stop", "no step was trained before it"),
    # On a node that came later the environment may be what is wrong.
    ([], {"first_failure": replace(BUG, step=30), "step": 30}, "restart", ""),
    ([failed(1, "node", step=5)], {"first_failure": replace(BUG, step=0), "step": 0,
                                   "committed_step": None}, "restart", ""),
])  # fmt: skip
def test_a_bug_stops_after_one_confirmation_and_at_once_before_step_1(
    history, changes, action, says
):
    decision = decided("code", history, **changes)
    assert (decision.action, decision.cause) == (action, "code")
    assert says in decision.reason
    if action == "stop":
        assert "mend the program and submit again" in decision.reason


def test_a_crash_without_a_word_is_known_again_by_how_it_came():
    crash = replace(found("code"), signature="segmentation fault")
    silent = replace(BUG, signature=None, step=None)
    history = [failed(3, "code", signature="segmentation fault of rank 2")]
    assert decided("code", history, finding=crash, first_failure=silent).action == "stop"
    assert decided("code", history, finding=crash, first_failure=silent, step=36).action == (
        "restart"
    )
    other = replace(crash, blamed_rank=1)
    assert decided("code", history, finding=other, first_failure=silent).action == "restart"


def test_a_guess_does_not_end_a_run_at_once():
    unsure = found("code", confidence=0.3)
    start = {"first_failure": replace(BUG, step=0), "step": 0, "committed_step": None}
    assert decided("code", finding=unsure, **start).action == "restart"


@pytest.mark.parametrize("unsure", [{"confidence": 0.45}, {"is_of_one_node": True}])
def test_a_start_that_fails_so_that_it_may_pass_is_confirmed_once(unsure):
    # A download that failed; a file that one node alone does not see.
    finding = replace(found("code"), **unsure)
    start = {"first_failure": replace(BUG, step=None), "step": None, "committed_step": None,
             "committed_before": None, "began_at": 0}  # fmt: skip
    assert decided("code", finding=finding, **start).action == "restart"
    again = decided("code", [failed(3, "code", step=None)], finding=finding, **start)
    assert again.action == "stop" and "at the same step, 0, as in attempt 3" in again.reason


def test_an_error_of_unknown_kind_stops_once_it_comes_again_where_steps_are_trained():
    again = [failed(3, "unknown")]
    assert decided("unknown", again, first_failure=BUG).action == "stop"
    # In a start, much looks alike that passes.
    start = replace(BUG, step=30)
    assert decided("unknown", [failed(3, "unknown", step=30)], first_failure=start).action == (
        "restart"
    )


@pytest.mark.parametrize("cause", ["oom_host", "oom_gpu"])
@pytest.mark.parametrize(("history", "changes", "action"), [
    ([], {}, "restart"),
    ([], {"step": None, "committed_step": None, "began_at": 0}, "stop"),
    ([], {"step": 0, "committed_step": None, "began_at": 0}, "stop"),
    # In a restore: the run has trained before, so that something else took the memory.
    ([], {"step": 30}, "restart"),
    ([], {"step": None}, "restart"),
    (["again"], {"step": 30}, "stop"),
    (["again"], {}, "stop"),
    (["again"], {"progressed": True}, "restart"),  # it got further: a leak, not a batch
])  # fmt: skip
def test_memory_that_was_too_small_is_not_tried_blindly(cause, history, changes, action):
    decision = decided(cause, [failed(3, cause) for _ in history], **changes)
    assert (decision.action, decision.cause) == (action, cause)
    if action == "stop":
        assert {"oom_host": "cluster.mem", "oom_gpu": "micro_batch_size"}[cause] in decision.reason


@pytest.mark.parametrize(("cause", "tries"), [("code", 3), ("oom_host", 1), ("numeric", 1)])
def test_of_a_program_no_steps_are_known_so_it_is_never_stopped_at_once(cause, tries):
    def after(count):
        history = [failed(i, cause, step=None) for i in range(1, count)]
        nothing = {"step": None, "committed_step": None, "committed_before": None, "began_at": 0}
        first = replace(BUG, step=None)
        return decided(cause, history, is_program=True, first_failure=first, **nothing).action

    assert [after(count) for count in range(1, tries + 2)] == ["restart"] * tries + ["stop"]


@pytest.mark.parametrize(("cause", "tries"), [
    ("hang", 2), ("network_transient", 5), ("storage", 3), ("data", 1), ("checkpoint", 1),
    ("capacity", 1), ("node", 3), ("gpu", 3), ("straggler", 3), ("unknown", 3),
])  # fmt: skip
def test_each_cause_is_tried_as_often_as_its_budget_says(cause, tries):
    def after(count):
        history = [failed(i, cause, signature=None, step=30 + i) for i in range(1, count)]
        return decided(cause, history)

    assert [after(count).action for count in range(1, tries + 2)] == ["restart"] * tries + ["stop"]
    assert after(tries + 1).reason.rstrip().endswith(("submit again", "let the run go on"))


def test_a_guessed_cause_spends_no_budget_of_its_own():
    weak = found("capacity", confidence=0.4)
    history = [failed(i, "capacity", signature=None, step=30 + i) for i in (2, 3)]
    assert decided("capacity", history, finding=weak).action == "restart"
    assert decided("capacity", history).action == "stop"
    rules = RecoverySpec(budgets={"unknown": 0})  # that nothing is known is no guess
    assert decided("unknown", rules=rules, finding=found("unknown", confidence=0.2)).action == (
        "stop"
    )


def test_a_budget_of_its_own_is_named_in_the_stop_and_on_every_decision():
    rules = RecoverySpec(budgets={"hang": 0})
    stop = decided("hang", rules=rules, progressed=True)
    assert stop.action == "stop" and "recovery.budgets.hang is 0" in stop.reason
    assert decided("hang").budget == "1 failure of cause hang, recovery.budgets.hang is 2"


def test_failures_of_several_causes_still_count_together():
    history = [failed(i, cause) for i, cause in enumerate(("node", "hang", "gpu"), start=1)]
    decision = decided("storage", history)
    assert decision.action == "stop" and "4 failures in a row" in decision.reason


def test_a_person_who_lets_a_stopped_run_go_on_gives_it_new_tries():
    history = [failed(i, "storage", signature=None, step=30 + i) for i in range(1, 5)]
    assert decided("storage", history).action == "stop"
    history[-1] = replace(history[-1], ended_run=True)
    decision = decided("storage", history)
    assert (decision.action, decision.failures_in_a_row) == ("restart", 1)


# --- nodes ---


@pytest.mark.parametrize(("cause", "allowed", "faults", "past_ones", "excluded"), [
    ("node", 1, {}, [], True),
    ("gpu", 1, {}, [], True),
    ("node", 2, {}, [], False),
    ("node", 2, {"n3": 1}, [], True),
    ("node", 2, {"n1": 5}, [], False),
    ("node", 0, {"n3": 9}, [], False),  # 0: never
    ("hang", 1, {}, [], False),
    ("hang", 1, {}, [failed(3, "hang", blamed_node="n3")], True),  # the same node twice
    ("hang", 1, {}, [failed(3, "hang", blamed_node="n1")], False),
    ("code", 1, {"n3": 3}, [], False),
    ("oom_host", 1, {}, [], False),
])  # fmt: skip
def test_a_node_gets_no_further_attempt_after_so_many_faults_of_its_own(
    cause, allowed, faults, past_ones, excluded
):
    rules = RecoverySpec(max_node_faults=allowed)
    finding = found(cause, node="n3")
    decision = decided(cause, past_ones, rules, finding, node_faults=faults)
    assert decision.exclude == (("n3",) if excluded else ())
    assert ("without n3 from now on" in decision.reason) == excluded


def test_a_node_is_not_kept_out_on_a_guess():
    assert decided("node", finding=found("node", node="n3", confidence=0.3)).exclude == ()


@pytest.mark.parametrize(("past_node", "excluded"), [("n0", ("n0",)), ("n1", ())])
def test_a_doubtful_fault_that_comes_to_the_same_node_again_is_the_nodes_own(past_node, excluded):
    dead_driver = found("gpu", node="n0", confidence=0.4)
    history = [failed(3, "gpu", signature=None, blamed_node=past_node)]
    assert decided("gpu", history, finding=dead_driver).exclude == excluded


@pytest.mark.parametrize("cause", ["network_transient", "storage"])
def test_what_passes_is_the_nodes_own_once_its_kernel_tells_of_it_twice(cause):
    told = found(cause, node="n3")
    history = [failed(3, cause, signature=None, blamed_node="n3")]
    assert decided(cause, finding=told).exclude == ()
    assert decided(cause, history, finding=told).exclude == ("n3",)


@pytest.mark.parametrize(("evict", "excluded"), [
    ("report", ()), ("next", ("n4",)), ("now", ("n4",)),
])  # fmt: skip
def test_a_straggler_is_left_behind_at_the_next_attempt_if_that_is_asked_for(evict, excluded):
    rules = RecoverySpec(evict=evict)
    saved = replace(PLAIN, outcome=SAVED, rc=75, stragglers=("n4",))
    assert decide([], saved, rules).exclude == excluded
    stopped = replace(PLAIN, rc=RANK_NEVER_RETRY, stragglers=("n4",))
    assert decide([], stopped, rules).exclude == ()


def test_ranks_that_left_because_of_a_straggler_are_started_again_at_once_without_it():
    slow = {"outcome": SAVED, "stragglers": ("n4",)}
    slow = replace(PLAIN, rc=75, evicted=("n4",), ranks_signalled=True, **slow)
    decision = decide([], slow, RecoverySpec(evict="now"))
    assert (decision.action, decision.cause, decision.exclude) == ("restart", "straggler", ("n4",))
    assert not decision.is_failure and "n4 held the others up" in decision.reason
    late = replace(slow, limit_is_near=True)
    assert decide([], late, RecoverySpec(evict="now")).action == "requeued"
    preempted = replace(slow, term=True)
    assert decide([], preempted, RecoverySpec(evict="now")).cause == "asked_to_leave"


def test_evictions_with_nothing_committed_are_failures_and_come_to_an_end():
    unsaved = replace(SAVED, committed_step=40)
    slow = replace(PLAIN, rc=75, outcome=unsaved, evicted=("n4",), stragglers=("n4",))
    history, actions = [], []
    for number in range(1, 5):
        decision = decide(history, slow, RecoverySpec(evict="now"))
        history.append(PastAttempt(number, decision.is_failure, False, decision.cause))
        actions.append(decision.action)
    assert actions == ["requeued"] * 3 + ["stop"]


# --- a loss that cannot be trained on ---

NAN = {"first_failure": None, "committed_step": 30, "committed_before": 20, "step": 37}


def numeric(history=(), on_nan="rollback", **changes):
    return decided("numeric", history, RecoverySpec(on_nan=on_nan), **{**NAN, **changes})


def test_a_bad_loss_goes_back_one_committed_step_further():
    decision = numeric()
    assert (decision.action, decision.restore_before) == ("restart", 30)
    assert "goes back to step 20" in decision.reason and decision.skip_steps is None


def test_the_only_committed_step_is_not_given_up():
    decision = numeric(committed_before=None)
    assert (decision.action, decision.restore_before) == ("restart", None)
    assert "goes on from step 30" in decision.reason


def test_a_bad_loss_at_the_same_place_stops_though_steps_were_committed_on_the_way():
    again = numeric([failed(3, "numeric")], progressed=True)
    assert again.action == "stop"
    assert "between step 20 and step 37" in again.reason and "optim.lr" in again.reason


def test_a_place_that_the_run_has_got_past_is_another_one():
    further = numeric([failed(3, "numeric")], committed_step=40, committed_before=30, step=45)
    assert (further.action, further.restore_before) == ("restart", 40)


def test_if_asked_for_the_second_time_passes_over_the_batches_and_the_third_stops():
    second = numeric([failed(2, "numeric")], "skip")
    assert (second.action, second.restore_before) == ("restart", 30)
    assert second.skip_steps == (21, 37) and "steps 21 to 37" in second.reason
    third = numeric([failed(2, "numeric"), failed(3, "numeric", skipped=True)], "skip")
    assert third.action == "stop" and "after passing over batches" in third.reason


def test_or_it_stops_at_once():
    assert numeric((), "stop").action == "stop"


# --- the wait ---


@pytest.mark.parametrize(("failures", "cause", "wait_s"), [
    (0, "node", 0), (1, "node", 0), (2, "node", 5), (3, "node", 10), (4, "node", 20),
    (9, "node", 300), (5000, "node", 300), (0, "storage", 0), (1, "storage", 5),
    (2, "network_transient", 10), (2, "failed", 5),
])  # fmt: skip
def test_the_wait_doubles_with_each_failure_in_a_row_up_to_a_cap(failures, cause, wait_s):
    assert backoff_s(failures, cause, RecoverySpec()) == wait_s


def test_in_a_grace_period_and_near_the_limit_nobody_waits():
    twice = [failed(3, "node", signature=None)]
    assert decided("node", twice).wait_s == 5
    for hurry in ({"ranks_signalled": True}, {"limit_is_near": True}):
        decision = decided("node", twice, **hurry)
        assert (decision.action, decision.wait_s) == ("requeued", 0)


def test_an_order_goes_before_a_wait_and_keeps_what_was_found():
    decision = decided("node", [failed(3, "node")], order="pause", finding=found("node", node="n3"))
    assert (decision.action, decision.cause, decision.wait_s) == ("paused", "ordered", 0)
    assert decision.exclude == ("n3",) and not decision.is_failure


EVERY_CAUSE = [cause for cause in causes.MEANING if cause not in ("preempted", "time_limit")]


@pytest.mark.parametrize("cause", EVERY_CAUSE)
def test_every_stop_tells_a_person_what_to_do(cause):
    history = [failed(i, cause, signature=None, step=30 + i) for i in range(1, 9)]
    decision = decided(cause, history)
    assert decision.action == "stop"
    assert any(word in decision.reason for word in ("submit again", "let the run go on"))
