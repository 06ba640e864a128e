"""What follows an attempt, decided from values alone: evidence and history in, one decision out.

Pure. The rules are read from the top, the first that applies wins; every stop says in one sentence
what a person should do. What a known cause adds to a failure is in budgets.py; without one (the
attempt could not be classified) the count of failures alone decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Optional

from ftslurm.diagnosis.causes import (
    CANCELLED_ADMIN,
    CANCELLED_USER,
    CODE,
    NODE,
    PREEMPTED,
    STRAGGLER,
    TIME_LIMIT,
    UNKNOWN,
)
from ftslurm.errors import RANK_NEVER_RETRY
from ftslurm.recovery import budgets
from ftslurm.recovery.actions import DONE, ENDED, PAUSED, REQUEUED, RESTART, STOP
from ftslurm.recovery.case import Blamed, Decision, DecisiveLine, Evidence, PastAttempt
from ftslurm.recovery.sentences import (
    how_it_stopped,
    how_often,
    progress,
    resume_point,
    what_failed,
)
from ftslurm.run.attempts import FAILED, FINISHED, STOPPED, Outcome
from ftslurm.run.control import PAUSE
from ftslurm.run.spec import RecoverySpec

if TYPE_CHECKING:
    from ftslurm.diagnosis.finding import Finding

# Causes of its own, beside those of causes.py: the class of what ended the attempt.
CAUSE_FINISHED = "finished"
CAUSE_ASKED = "asked_to_leave"
CAUSE_ORDERED = "ordered"
CAUSE_FAILED = "failed"
"""It failed, and nobody could say of what."""
CAUSE_NEVER_RETRY = "never_retry"
CAUSE_NOT_STARTED = "not_started"
CAUSE_FORGOTTEN = "start_forgotten"
"""slurmctld was killed before it had written down that it had started the job (within 5 s)."""
CAUSE_STANDSTILL = "standstill"

_CANCELLED = frozenset({CANCELLED_USER, CANCELLED_ADMIN})
_SAY_NO_MORE = _CANCELLED | {CODE, UNKNOWN, PREEMPTED, TIME_LIMIT}
"""Of an attempt that no retry can mend."""


def decide(history: Sequence[PastAttempt], evidence: Evidence, rules: RecoverySpec) -> Decision:
    """`history`: the earlier attempts, oldest first."""
    decision = _with_finding(_by_outcome(history, evidence, rules), evidence)
    if decision.action in (RESTART, REQUEUED):
        decision = _keeping_out(decision, evidence, rules)
    return decision if evidence.order is None else obey(decision, evidence.order)


def obey(decision: Decision, order: str) -> Decision:
    """`order`, stop or pause, goes before going on, and stop before pause."""
    goes_on = decision.action in (RESTART, REQUEUED)
    if not (goes_on or (decision.action == PAUSED and order != PAUSE)):
        return decision
    return dataclasses.replace(
        decision,
        action=PAUSED if order == PAUSE else ENDED,
        cause=CAUSE_ORDERED,
        reason=f"{decision.reason}; the order `{order}` keeps the run from going on until "
        "`ftslurm resume`",
        is_failure=False,
        wait_s=0.0,
    )


def _keeping_out(decision: Decision, evidence: Evidence, rules: RecoverySpec) -> Decision:
    """Whatever ended the attempt, sick nodes stay behind, and stragglers if that is asked for."""
    slow = evidence.stragglers if rules.evict != "report" else ()
    sick = evidence.sick if rules.max_node_faults else {}
    exclude = tuple(dict.fromkeys((*decision.exclude, *slow, *sick)))
    if not exclude:
        return decision
    named = ", ".join(f"{node} ({sick[node]})" if node in sick else node for node in exclude)
    reason = f"{decision.reason}, without {named} from now on"
    return dataclasses.replace(decision, exclude=exclude, sick=sick, reason=reason)


def _with_finding(decision: Decision, evidence: Evidence) -> Decision:
    """What was found out goes on record with every decision it was known for."""
    finding = evidence.finding
    if finding is None:
        return decision
    blamed = Blamed(finding.blamed_node, finding.blamed_gpu, finding.blamed_rank)
    return dataclasses.replace(
        decision,
        confidence=finding.confidence,
        blamed=None if blamed == Blamed(None, None, None) else blamed,
        evidence=tuple(DecisiveLine(clue.text, clue.file, clue.line) for clue in finding.clues),
    )


def _by_outcome(
    history: Sequence[PastAttempt], evidence: Evidence, rules: RecoverySpec
) -> Decision:
    outcome = evidence.outcome
    if evidence.done or (outcome is not None and outcome.result == FINISHED):
        return Decision(DONE, CAUSE_FINISHED, "the run has finished")
    if outcome is not None and outcome.result == STOPPED and outcome.order is not None:
        return _after_order(evidence, outcome)
    if outcome is not None and outcome.result == STOPPED:
        if outcome.committed_step != outcome.step and not evidence.progressed:
            return _after_unsaved_stop(history, evidence, outcome, rules.max_failures)
        if evidence.evicted and not evidence.term:
            return _after_eviction(evidence, outcome)
        return Decision(REQUEUED, CAUSE_ASKED, how_it_stopped(evidence, outcome))
    if evidence.term:
        return Decision(REQUEUED, CAUSE_ASKED, f"the job was told to end; {resume_point(evidence)}")
    if evidence.controller_away:
        return Decision(
            RESTART, CAUSE_NOT_STARTED, "no rank was started because slurmctld does not answer"
        )
    if evidence.start_forgotten:
        return Decision(
            REQUEUED, CAUSE_FORGOTTEN, "slurmctld has forgotten that it has started this job"
        )
    if evidence.preflight_named:
        action = REQUEUED if evidence.limit_is_near else RESTART  # and nothing has failed
        return Decision(action, NODE, f"no rank was started; {resume_point(evidence)}")
    if _never_retry(evidence):
        return Decision(
            STOP,
            _cause_of_no_retry(evidence.finding),
            f"the same start would fail the same way: {what_failed(evidence)}; mend the cause and "
            "submit again",
        )
    finding = evidence.finding
    if finding is not None and finding.cause in (PREEMPTED, TIME_LIMIT):
        reason = f"{finding.sentence}; {resume_point(evidence)}"
        return Decision(REQUEUED, finding.cause, reason)
    if finding is not None and finding.cause in _CANCELLED and finding.confidence >= budgets.SURE:
        return Decision(STOP, finding.cause, f"{finding.sentence}; submit again if that was wrong")
    return _after_failure(history, evidence, rules)


def _cause_of_no_retry(finding: Optional[Finding]) -> str:
    """The rank's word says that a retry is of no use, what was found says why."""
    if finding is None or finding.confidence < budgets.SURE or finding.cause in _SAY_NO_MORE:
        return CAUSE_NEVER_RETRY
    return finding.cause


def _after_order(evidence: Evidence, outcome: Outcome) -> Decision:
    """An operator's word counts, whether the save has committed or not: the reason says which."""
    action = PAUSED if outcome.order == PAUSE else ENDED
    return Decision(
        action,
        CAUSE_ORDERED,
        f"{how_it_stopped(evidence, outcome)}; `ftslurm resume` lets the run go on",
    )


def _after_eviction(evidence: Evidence, outcome: Outcome) -> Decision:
    """The allocation lives on: another of its nodes takes the place, if it has one."""
    action = REQUEUED if evidence.limit_is_near else RESTART
    slow = ", ".join(evidence.evicted)
    return Decision(
        action, STRAGGLER, f"{slow} held the others up: {how_it_stopped(evidence, outcome)}"
    )


def _after_unsaved_stop(
    history: Sequence[PastAttempt], evidence: Evidence, outcome: Outcome, max_failures: int
) -> Decision:
    """Asked to leave, with nothing newly committed: the next attempt would train the same steps."""
    count = _failures_in_a_row(history, evidence)
    if count <= max_failures:
        stopped = how_it_stopped(evidence, outcome)
        return Decision(REQUEUED, CAUSE_FAILED, stopped, count, is_failure=True)
    return Decision(
        STOP,
        CAUSE_FAILED,
        f"{how_often(count)} without a newly committed step, recovery.max_failures is "
        f"{max_failures}: {how_it_stopped(evidence, outcome)} ({outcome.reason}); the save does "
        "not fit into the time that is left after the signal: save more often "
        "(checkpoint.interval_steps), ask for a longer cluster.signal_lead_s, or look at the "
        "storage, and submit again",
        count,
        is_failure=True,
    )


def _after_failure(
    history: Sequence[PastAttempt], evidence: Evidence, rules: RecoverySpec
) -> Decision:
    count = _failures_in_a_row(history, evidence)
    cause = evidence.finding.cause if evidence.finding else CAUSE_FAILED
    verdict = budgets.judge(history, evidence, rules, cause)
    decision = Decision(
        STOP, cause, "", count, is_failure=True, budget=verdict.budget, exclude=verdict.exclude
    )
    what = what_failed(evidence)
    if verdict.stop:
        return dataclasses.replace(decision, reason=f"{verdict.stop}: {what}; {verdict.advice}")
    if count > max(rules.max_failures, rules.budgets.get(cause, 0)):
        reason = (
            f"{how_often(count)} without {progress(evidence)}, recovery.max_failures is "
            f"{rules.max_failures}: {what}; {verdict.advice}"
        )
        return dataclasses.replace(decision, reason=reason)
    decision = dataclasses.replace(
        decision,
        action=RESTART,
        restore_before=verdict.restore_before,
        skip_steps=verdict.skip_steps,
        reason=f"{what}; {verdict.otherwise or resume_point(evidence)}",
    )
    # A restart in place would end with the allocation, a moment later.
    if evidence.ranks_signalled:
        reason = f"asked to leave, the ranks did not save in time: {decision.reason}"
    elif evidence.limit_is_near:
        reason = f"{decision.reason}; the time limit is near"
    else:
        return _after_a_wait(decision, budgets.backoff_s(count, cause, rules))
    return dataclasses.replace(decision, action=REQUEUED, reason=reason)


def _after_a_wait(decision: Decision, wait_s: float) -> Decision:
    if wait_s == 0:
        return decision
    reason = f"{decision.reason}, in {wait_s:.0f} s"
    return dataclasses.replace(decision, reason=reason, wait_s=wait_s)


def _failures_in_a_row(history: Sequence[PastAttempt], evidence: Evidence) -> int:
    """Failures since a step was last committed, or a person let the run go on. An attempt that was
    merely asked to leave neither counts nor clears: a crash loop between two preemptions is still
    one."""
    if evidence.progressed:
        return 0
    count = 1
    for attempt in reversed(history):
        if attempt.progressed or attempt.ended_run:
            break
        count += attempt.failed
    return count


def _never_retry(evidence: Evidence) -> bool:
    outcome = evidence.outcome
    if outcome is not None and outcome.result == FAILED and not outcome.retry:
        return True
    return evidence.rc == RANK_NEVER_RETRY
