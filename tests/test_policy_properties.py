"""What holds of the decision between attempts whatever has happened before: drawn histories."""

from dataclasses import replace

import pytest
from fakes.recovering import PLAIN
from hypothesis import given, settings
from hypothesis import strategies as st

from ftslurm.diagnosis import causes
from ftslurm.diagnosis.finding import Clue, Finding
from ftslurm.errors import RANK_FAILED, RANK_NEVER_RETRY, RANK_STOPPED
from ftslurm.recovery.actions import DONE, ENDED, PAUSED, REQUEUED, RESTART, STOP
from ftslurm.recovery.case import PastAttempt, RankFailure
from ftslurm.recovery.exclusion import excluded_now, too_many
from ftslurm.recovery.policy import decide
from ftslurm.run.attempts import FAILED, FINISHED, STOPPED, Outcome
from ftslurm.run.node_memory import EXCLUDED, FAULT, READMITTED, NodeEvent
from ftslurm.run.spec import RecoverySpec

NODES = ("n1", "n2", "n3", "n4")
NAMED = ("code", "data", "checkpoint", "oom_gpu")
UNNAMED = ("oom_host", "unknown", "hang", "capacity", "storage", "network_transient")
# How a stop's sentence tells a person what to do.
DO = ("submit again", "let the run go on", "ftslurm resume")

steps = st.none() | st.integers(0, 60)
signatures = st.none() | st.sampled_from(["ValueError: #", "RuntimeError: x"])
pasts = st.builds(
    PastAttempt,
    number=st.just(0),
    failed=st.booleans(),
    progressed=st.booleans(),
    cause=st.sampled_from([*causes.MEANING, "failed", "asked_to_leave"]),
    signature=signatures,
    step=steps,
    blamed_node=st.none() | st.sampled_from(NODES),
    skipped=st.booleans(),
    ended_run=st.booleans(),
    program_fault=st.sampled_from(["", "XID31"]),
)
outcomes = st.none() | st.builds(
    Outcome,
    result=st.sampled_from([FINISHED, STOPPED, FAILED]),
    step=st.integers(0, 60),
    committed_step=steps,
    retry=st.booleans(),
    order=st.sampled_from([None, None, "stop", "pause"]),
    signal=st.sampled_from([None, "SIGUSR1"]),
)
findings = st.none() | st.builds(
    Finding,
    cause=st.sampled_from(list(causes.MEANING)),
    confidence=st.floats(0.05, 0.99),
    blamed_rank=st.none() | st.integers(0, 3),
    blamed_node=st.none() | st.sampled_from(NODES),
    blamed_gpu=st.none(),
    clues=st.just([Clue("log", "the line", file="rank-2.log", line=7)]),
    sentence=st.just("so it was"),
    program_fault=st.sampled_from(["", "XID31"]),
    is_of_one_node=st.booleans(),
)
rules = st.builds(
    RecoverySpec,
    max_failures=st.integers(0, 4),
    max_node_faults=st.integers(0, 3),
    on_nan=st.sampled_from(["stop", "rollback", "skip"]),
    evict=st.sampled_from(["report", "exclude", "now"]),
    backoff_s=st.floats(0, 60),
    backoff_max_s=st.floats(60, 600),
    budgets=st.dictionaries(st.sampled_from(list(causes.MEANING)), st.integers(0, 5), max_size=4),
)


@st.composite
def cases(draw):
    """(history, evidence, rules)."""
    history = [
        replace(one, number=i + 1) for i, one in enumerate(draw(st.lists(pasts, max_size=12)))
    ]
    committed = draw(steps)
    failure = draw(signatures)
    first = failure and RankFailure(2, "n3", failure, "/log", draw(steps), failure)
    evidence = replace(
        PLAIN,
        number=len(history) + 1,
        rc=draw(st.sampled_from([0, 1, RANK_FAILED, RANK_NEVER_RETRY, RANK_STOPPED, 137, 143])),
        term=draw(st.booleans()),
        done=draw(st.sampled_from([False, False, False, True])),
        outcome=draw(outcomes),
        progressed=draw(st.booleans()),
        committed_step=committed,
        committed_before=None if not committed else draw(st.none() | st.integers(0, committed - 1)),
        began_at=draw(st.integers(0, 60)),
        step=draw(steps),
        first_failure=first or None,
        finding=draw(findings),
        order=draw(st.sampled_from([None, None, None, "stop", "pause"])),
        ranks_signalled=draw(st.booleans()),
        limit_is_near=draw(st.booleans()),
        is_program=draw(st.booleans()),
        stragglers=tuple(draw(st.lists(st.sampled_from(NODES), unique=True, max_size=2))),
        node_faults=draw(st.dictionaries(st.sampled_from(NODES), st.integers(0, 4))),
        sick=draw(st.dictionaries(st.sampled_from(NODES), st.just("XID79 of gpu3"), max_size=2)),
    )
    return history, evidence, draw(rules)


@given(cases())
@settings(max_examples=200, deadline=None)
def test_every_decision_is_whole_and_the_same_history_gives_the_same_one(case):
    history, evidence, spec = case
    decision = decide(history, evidence, spec)
    assert decide(list(history), replace(evidence), spec) == decision
    assert decision.action in (DONE, RESTART, REQUEUED, STOP, ENDED, PAUSED)
    assert decision.reason and "\n" not in decision.reason
    assert 0 <= decision.wait_s <= spec.backoff_max_s
    assert decision.wait_s == 0 or decision.action == RESTART
    if decision.action == STOP:
        assert any(words in decision.reason for words in DO), decision.reason
    if decision.action in (RESTART, REQUEUED):
        assert evidence.order is None and not evidence.done
    if decision.restore_before is not None:
        # Never behind the oldest: then nothing but step 0 would be left.
        assert evidence.committed_before is not None
    if not spec.max_node_faults and spec.evict == "report":
        assert decision.exclude == ()


@given(cases(), st.integers(0, 4))
@settings(max_examples=100, deadline=None)
def test_no_failure_without_progress_goes_beyond_what_the_budgets_allow(case, max_failures):
    history, evidence, spec = case
    spec = replace(spec, max_failures=max_failures)
    decision = decide(history, evidence, spec)
    most = max([max_failures, *spec.budgets.values()])
    if decision.is_failure and decision.failures_in_a_row > most:
        assert decision.action in (STOP, ENDED, PAUSED)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_program_with_a_fault_ends_though_it_changes_its_folder_each_time(data):
    """What it does as it starts looks like progress; between the attempts come preemptions."""
    spec = RecoverySpec(max_failures=data.draw(st.integers(0, 4)))
    cause = data.draw(st.sampled_from((*NAMED, *UNNAMED, "failed")))
    confidence = data.draw(st.floats(0.2, 0.9))
    allowed = 2 * max(1, spec.max_failures, spec.budgets.get(cause, 0))
    history, failures = [], 0
    while failures <= allowed:
        number = len(history) + 1
        if data.draw(st.booleans()):
            history.append(PastAttempt(number, False, cause in NAMED, "preempted"))
            continue
        failures += 1
        decision = decide(history, program_end(number, cause, confidence), spec)
        assert decision.action == RESTART or failures > allowed, decision.reason
        # Of what has no name, each end has words of its own.
        signature = "ValueError: #" if cause in NAMED else f"{number}"
        was = decision.cause
        if was in ("oom_host", "unknown"):  # it is not always seen
            was = data.draw(st.sampled_from(["oom_host", "unknown"]))
        history.append(PastAttempt(number, decision.is_failure, True, was, signature, None))
    assert decision.action == STOP and "RUN/resume" in decision.reason, decision.reason


@pytest.mark.parametrize("cause", [*UNNAMED, "failed"])
def test_a_program_that_gets_on_between_preemptions_goes_on_whatever_comes_now_and_then(cause):
    spec, history = RecoverySpec(), []
    for _ in range(20):
        history.append(PastAttempt(len(history) + 1, False, True, "preempted"))
        number = len(history) + 1
        assert decide(history, program_end(number, cause, 0.9), spec).action == RESTART
        history.append(PastAttempt(number, True, True, cause, f"{number}"))


def test_a_program_that_gets_on_goes_on_however_many_nodes_it_loses():
    history = [PastAttempt(n, True, True, "node", None, None) for n in range(1, 40)]
    assert decide(history, program_end(40, "node", 0.9), RecoverySpec()).action == RESTART


@pytest.mark.parametrize("other", ["RuntimeError: another", None])
def test_a_program_that_fails_now_so_and_now_so_goes_on_while_it_gets_on(other):
    history = [
        PastAttempt(n, True, True, "code", "ValueError: #" if n % 3 else other, None)
        for n in range(1, 40)
    ]
    assert decide(history, program_end(40, "code", 0.4), RecoverySpec()).action == RESTART
    person = [PastAttempt(n, True, True, "code", "ValueError: #", ended_run=n == 8)
              for n in range(1, 10)]  # fmt: skip
    assert decide(person, program_end(10, "code", 0.4), RecoverySpec()).action == RESTART


def program_end(number, cause, confidence):
    first = RankFailure(0, "n1", "ValueError: 7", "/log", signature="ValueError: #")
    return replace(
        PLAIN,
        number=number,
        is_program=True,
        progressed=True,
        committed_step=None,
        first_failure=first,
        # Nobody could say.
        finding=None if cause == "failed" else Finding(cause, confidence, 0, "n1", None, [], "so"),
    )


events = st.builds(
    NodeEvent,
    kind=st.sampled_from([FAULT, FAULT, EXCLUDED, READMITTED]),
    node=st.sampled_from(NODES),
    attempt=st.integers(1, 9),
    at=st.just(1.0),
    cause=st.just("node"),
    why=st.just("it was lost"),
)


@given(
    st.lists(events, max_size=20),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sets(st.sampled_from(NODES)),
)
@settings(max_examples=150, deadline=None)
def test_so_many_nodes_stay_that_the_job_can_start_where_there_are_so_many(
    told, max_node_faults, needed, serving
):
    out = excluded_now(told, max_node_faults=max_node_faults)
    given_up = too_many(out, serving=serving, needed=needed)
    left = serving - ({one.node for one in out} - {one.node for one in given_up})
    assert len(left) >= min(needed, len(serving)) or len(serving) < needed
    # No more than it takes: a bad node that is not needed stays out.
    if given_up:
        assert len(left) == needed
