"""What the cause of a failure adds to the count of failures: how often it is tried again, from
where, and on which nodes no more.

Pure. A cause that says nothing leaves the decision to the count; none ever allows more attempts
than the larger of recovery.max_failures and its own budget. A failure is counted against its cause
from the last newly committed step on, and a place that the run has not yet got past counts as the
same one, so that going back over it does not begin the count anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from ftslurm.diagnosis.causes import (
    CAPACITY,
    CHECKPOINT,
    CODE,
    DATA,
    GPU,
    HANG,
    NETWORK_TRANSIENT,
    NODE,
    NODE_FAULTS,
    NUMERIC,
    OOM_GPU,
    OOM_HOST,
    STORAGE,
    UNKNOWN,
)
from ftslurm.recovery.exclusion import are_enough
from ftslurm.run.spec import RecoverySpec
from ftslurm.run.wording import format_count

if TYPE_CHECKING:
    from ftslurm.diagnosis.finding import Finding
    from ftslurm.recovery.case import Evidence, PastAttempt

SURE = 0.5
"""Confidence below which a finding alone neither ends a run early nor keeps a node out of it."""

_MEND = "mend the cause and submit again"
_ADVICE = {
    CODE: "mend the program and submit again",
    OOM_GPU: "lower optim.micro_batch_size, or spread the model over more GPUs, and submit again",
    OOM_HOST: "ask for more cluster.mem, or for fewer data.num_workers, and submit again",
    NUMERIC: "lower optim.lr, look at the batches of these steps, or pass over them by "
    "recovery.on_nan=skip, and submit again",
    STORAGE: "have the file system looked at, then let the run go on",
    CAPACITY: "make room or have the quota raised, then let the run go on",
    NETWORK_TRANSIENT: "have the network between the nodes looked at, then let the run go on",
    HANG: "look into the attempt's evidence/stacks for the rank that is elsewhere than the others, "
    "mend the cause and submit again",
    NODE: "have the node looked at, then let the run go on",
    GPU: "have the GPU looked at, then let the run go on",
    DATA: "mend the data, or build it anew, and submit again",
    CHECKPOINT: "look at the checkpoints with `ftslurm verify`, then let the run go on",
}

# It may pass by itself, so that even the first retry is worth a wait.
_PASSING = frozenset({NETWORK_TRANSIENT, STORAGE})
# One of these may hit any node, and a doubtful fault be none; the same node twice is its own.
_TWICE_IS_THE_NODE = frozenset({HANG, NETWORK_TRANSIENT, STORAGE, *NODE_FAULTS})
# A program that fails alike at one place fails there for ever.
_REPEATABLE = frozenset({CODE, DATA, CHECKPOINT, UNKNOWN})
_SURE_TO_REPEAT = frozenset({CODE, DATA, CHECKPOINT, OOM_GPU})
# Who was killed for its memory may leave no sign of it.
_KILLED = frozenset({OOM_HOST, UNKNOWN})


@dataclass(frozen=True)
class CauseVerdict:
    """What is particular to the cause; all empty: nothing."""

    stop: str = ""
    """Why there is no further attempt."""
    otherwise: str = ""
    """From where the next attempt goes on, if not from the newest committed step."""
    restore_before: Optional[int] = None
    skip_steps: Optional[tuple[int, int]] = None
    exclude: tuple[str, ...] = ()
    advice: str = _MEND
    budget: str = ""


def judge(
    history: Sequence[PastAttempt], evidence: Evidence, rules: RecoverySpec, cause: str
) -> CauseVerdict:
    """`evidence` is that of a failure, `cause` what it goes on record with."""
    finding = evidence.finding
    if finding is None:
        return CauseVerdict(_ends_alike(history, evidence, rules, cause))
    if finding.cause == NUMERIC and evidence.step is not None and not evidence.is_program:
        return _numeric(history, evidence, rules, bad_step=evidence.step)
    times, allowed = _times(history, evidence, cause), rules.budgets.get(cause)
    stop = ""
    if cause in _REPEATABLE:
        stop = _comes_again(history, evidence, rules, finding)
    elif cause in (OOM_GPU, OOM_HOST) and _never_trained(history, evidence):
        stop = f"{cause} before the run's first step, so the next attempt would end there as well"
    if not stop:
        stop = _ends_alike(history, evidence, rules, cause)
    # Of what is only guessed, the failures of all causes together are counted.
    counts = cause == UNKNOWN or (cause != CODE and finding.confidence >= SURE)
    if not stop and counts and allowed is not None and times > allowed:
        stop = (
            f"{format_count(times, 'failure')} of cause {cause} without a newly committed step, "
            f"recovery.budgets.{cause} is {allowed}"
        )
    budget = f"{format_count(times, 'failure')} of cause {cause}"
    if allowed is not None:
        budget += f", recovery.budgets.{cause} is {allowed}"
    return CauseVerdict(
        stop,
        exclude=_excluded(history, evidence, rules, finding),
        advice=_ADVICE.get(cause, _MEND),
        budget=budget,
    )


def identity(evidence: Evidence) -> tuple[Optional[str], Optional[int]]:
    """By what a failure is known again, and at which step: what the rank has said, or, of one that
    crashed without a word, how it did."""
    failure, finding = evidence.first_failure, evidence.finding
    if failure is not None and failure.signature is not None:
        return failure.signature, evidence.step if failure.step is None else failure.step
    if finding is not None and finding.cause == CODE:
        return f"{finding.signature} of rank {finding.blamed_rank}", evidence.step
    return None, evidence.step


def backoff_s(failures_in_a_row: int, cause: str, rules: RecoverySpec) -> float:
    """Nothing for a failure after progress, or for a first one that will not pass by waiting."""
    turns = failures_in_a_row - (0 if cause in _PASSING else 1)
    if turns < 1:
        return 0.0
    # Far above any sensible cap, and below what a float can hold.
    return min(rules.backoff_max_s, rules.backoff_s * 2.0 ** min(turns - 1, 60))


def _times(history: Sequence[PastAttempt], evidence: Evidence, cause: str) -> int:
    """Failures of this cause with no newly committed step between them, this one included."""
    if evidence.progressed:
        return 1
    return 1 + sum(past.failed and past.cause == cause for past in _without_progress(history))


def _without_progress(history: Sequence[PastAttempt]) -> Iterator[PastAttempt]:
    """Newest first, back to the one that last committed a step, or that ended the run."""
    for past in reversed(history):
        if past.ended_run:
            return
        yield past  # its failure came after what it committed
        if past.progressed:
            return


def _comes_again(
    history: Sequence[PastAttempt], evidence: Evidence, rules: RecoverySpec, finding: Finding
) -> str:
    """Why the same would come again; empty: it need not."""
    never_trained = _never_trained(history, evidence)
    told_by_all = finding.confidence >= SURE and not finding.is_of_one_node
    if finding.cause == CODE and told_by_all and never_trained:
        return "no step was trained before it, so the same start would fail the same way"
    named = _named_again(history, evidence, rules, finding)
    if named:
        return named
    signature, step = identity(evidence)
    if signature is None or (step is None and not never_trained):
        return ""
    # In a start, much that passes looks alike: a peer that is late, a port that is taken.
    if finding.cause == UNKNOWN and (step or 0) <= evidence.began_at:
        return ""
    same = [
        past.number
        for past in history
        if past.failed and past.signature == signature and (past.step or 0) == (step or 0)
    ]
    if not same or len(same) < rules.budgets.get(finding.cause, 1):
        return ""
    return f"the same error came at the same step, {step or 0}, as in attempt {same[-1]}"


def _ends_alike(
    history: Sequence[PastAttempt], evidence: Evidence, rules: RecoverySpec, cause: str
) -> str:
    """Of a program no steps are known, and one that writes into RUN/resume as it starts seems to
    get on each time: many ends alike in a row are one fault, whatever has changed there. An error
    that the program names is told by that, what has no name by its cause; that it got on until the
    scheduler ended it then speaks for it."""
    if not (evidence.is_program and evidence.progressed) or cause in NODE_FAULTS:
        return ""  # without a change all failures are counted
    signature, _ = identity(evidence)
    is_named = signature is not None and cause in _SURE_TO_REPEAT
    causes = _KILLED if cause in _KILLED else {cause}
    count = 1
    for past in reversed(history):
        is_alike = past.signature == signature if is_named else past.cause in causes
        got_on = past.progressed and not past.failed and not is_named
        if past.ended_run or got_on or (past.failed and not is_alike):
            break
        count += past.failed
    if count <= 2 * max(1, rules.max_failures, rules.budgets.get(cause, 0)):
        return ""
    told = " or ".join(sorted(causes))
    what = "the same error has ended" if is_named else f"failures of cause {told} have ended"
    return (
        f"{what} {count} attempts in a row, so what the program changes in RUN/resume is not taken "
        "for progress any more"
    )


def _named_again(
    history: Sequence[PastAttempt], evidence: Evidence, rules: RecoverySpec, finding: Finding
) -> str:
    """A kernel that faults does so at whatever step; a GPU's own word on it is the same each time.
    Counted like the failures of a cause."""
    fault = finding.program_fault
    if not fault or finding.cause != CODE or evidence.progressed:
        return ""
    same = [past for past in _without_progress(history) if past.program_fault == fault]
    if not same or len(same) < rules.budgets.get(CODE, 1):
        return ""
    return f"the GPU names the same fault of the program, {fault}, as in attempt {same[0].number}"


def _never_trained(history: Sequence[PastAttempt], evidence: Evidence) -> bool:
    if evidence.is_program:
        return False  # nobody knows
    steps = [evidence.committed_step, evidence.step, *(past.step for past in history)]
    return not any(steps)


def _numeric(
    history: Sequence[PastAttempt], evidence: Evidence, rules: RecoverySpec, *, bad_step: int
) -> CauseVerdict:
    """Back by one committed step more than usual, then over the batches or not at all."""
    newest, older = evidence.committed_step, evidence.committed_before
    # The oldest that is left is never given up: nothing but step 0 would be behind it.
    goes_back = newest is not None and older is not None
    begin = (older if goes_back else newest) or 0
    before = [
        past
        for past in history
        if past.failed and past.cause == NUMERIC and (past.step or 0) > (newest or 0)
    ]
    allowed = rules.budgets.get(NUMERIC, rules.max_failures)
    failures = format_count(len(before) + 1, "failure")
    budget = f"{failures} of cause numeric at this place, recovery.on_nan is "
    verdict = CauseVerdict(
        otherwise=_whence(begin, goes_back=goes_back),
        restore_before=newest if goes_back else None,
        advice=_ADVICE[NUMERIC],
        budget=f"{budget}{rules.on_nan}",
    )
    place = f"between step {begin} and step {bad_step}"
    if rules.on_nan == "stop":
        return _stopped(verdict, "the loss cannot be trained on, and recovery.on_nan is stop")
    if len(before) < allowed:
        return verdict
    if rules.on_nan == "rollback":
        return _stopped(verdict, f"the loss went wrong again {place} after going back")
    if any(past.skipped for past in before):
        return _stopped(verdict, f"the loss went wrong again {place} after passing over batches")
    return CauseVerdict(
        otherwise=f"{verdict.otherwise}, and passes over the batches of steps {begin + 1} to "
        f"{bad_step}",
        restore_before=verdict.restore_before,
        skip_steps=(begin + 1, bad_step),
        advice=verdict.advice,
        budget=verdict.budget,
    )


def _whence(begin: int, *, goes_back: bool) -> str:
    if goes_back:
        return f"the next attempt goes back to step {begin}, one committed step before the newest"
    return f"the next attempt goes on from step {begin}, no older one is there to go back to"


def _stopped(verdict: CauseVerdict, why: str) -> CauseVerdict:
    return CauseVerdict(why, advice=verdict.advice, budget=verdict.budget)


def _excluded(
    history: Sequence[PastAttempt], evidence: Evidence, rules: RecoverySpec, finding: Finding
) -> tuple[str, ...]:
    node = finding.blamed_node
    if node is None:
        return ()
    if finding.cause in NODE_FAULTS and finding.confidence >= SURE:
        faults = evidence.node_faults.get(node, 0) + 1
    elif finding.cause in _TWICE_IS_THE_NODE:
        faults = sum(
            past.failed and past.cause == finding.cause and past.blamed_node == node
            for past in history
        )
    else:
        return ()
    return (node,) if are_enough(faults, rules.max_node_faults) else ()
