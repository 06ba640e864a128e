"""What follows an attempt, decided from values alone: evidence and history in, one decision out.

Pure. The rules are read from the top, the first that applies wins; every stop says in one sentence
what a person should do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from ftslurm.errors import RANK_NEVER_RETRY
from ftslurm.run.attempts import FAILED, FINISHED, STOPPED, Outcome
from ftslurm.run.control import PAUSE

# Actions: the words that `ftslurm recover` prints and the batch script acts on.
DONE = "done"
RESTART = "restart"
REQUEUED = "requeued"
"""Asked for: the run's next job is queued, under the same id or as a successor."""
PAUSED = "paused"
"""By an operator's order: queued, and held until somebody resumes the run."""
ENDED = "ended"
"""By an operator's order: not queued again, nothing has failed."""
STOP = "stop"

# Causes: the class of what ended the attempt, kept in its decision.
CAUSE_FINISHED = "finished"
CAUSE_ASKED = "asked_to_leave"
CAUSE_ORDERED = "ordered"
CAUSE_FAILED = "failed"
CAUSE_NEVER_RETRY = "never_retry"
CAUSE_NOT_STARTED = "not_started"
CAUSE_STANDSTILL = "standstill"


@dataclass(frozen=True)
class RankFailure:
    """The first rank that left a word on why it failed."""

    rank: int
    node: str
    error: str
    """Type and message."""
    log: str
    """Path of the rank's log."""


@dataclass(frozen=True)
class PastAttempt:
    """What counts of an earlier attempt."""

    number: int
    failed: bool
    """It ended by a failure; preemptions, time limits and lost nodes are none."""
    progressed: bool
    """A step was committed in it."""


@dataclass(frozen=True)
class Evidence:
    """What an attempt left behind."""

    number: int
    rc: int
    """Exit code of the launcher: the highest of all ranks'."""
    term: bool
    """The batch shell was told to end: end of grace, requeue or time limit."""
    done: bool
    """The run's DONE exists."""
    outcome: Optional[Outcome]
    progressed: bool
    committed_step: Optional[int]
    """Newest committed step of the run now."""
    logs: str
    """Folder of the ranks' logs."""
    first_failure: Optional[RankFailure] = None
    order: Optional[str] = None
    """stop | pause: an operator's order that no rank has carried out."""
    ranks_signalled: bool = False
    """The ranks noted a stop signal."""
    limit_is_near: bool = False
    """The warn signal before the time limit is due or was sent, between attempts to nobody."""
    limit_passed: Optional[bool] = None
    """The time limit is behind us, by the clock; None: it is not known."""
    controller_away: bool = False
    """No rank was started, and slurmctld does not answer."""
    is_program: bool = False
    """The run is a program of the user's own: of steps nothing is known."""


@dataclass(frozen=True)
class Decision:
    action: str
    cause: str
    reason: str
    """One sentence; for STOP it says what a person should do."""
    failures_in_a_row: int = 0
    """Failures without a newly committed step, this attempt included."""


def decide(history: Sequence[PastAttempt], evidence: Evidence, *, max_failures: int) -> Decision:
    """`history`: the earlier attempts, oldest first."""
    decision = _by_outcome(history, evidence, max_failures)
    order = evidence.order
    goes_on = decision.action in (RESTART, REQUEUED)
    if order is None or not (goes_on or (decision.action == PAUSED and order != PAUSE)):
        return decision
    return Decision(
        PAUSED if order == PAUSE else ENDED,
        CAUSE_ORDERED,
        f"{decision.reason}; the order `{order}` keeps the run from going on until `ftslurm "
        "resume`",
        decision.failures_in_a_row,
    )


def _by_outcome(history: Sequence[PastAttempt], evidence: Evidence, max_failures: int) -> Decision:
    outcome = evidence.outcome
    if evidence.done or (outcome is not None and outcome.result == FINISHED):
        return Decision(DONE, CAUSE_FINISHED, "the run has finished")
    if outcome is not None and outcome.result == STOPPED and outcome.order is not None:
        return _after_order(evidence, outcome)
    if outcome is not None and outcome.result == STOPPED:
        if outcome.committed_step == outcome.step or evidence.progressed:
            return Decision(REQUEUED, CAUSE_ASKED, _stopped(evidence, outcome))
        return _after_unsaved_stop(history, evidence, outcome, max_failures)
    if evidence.term:
        return Decision(
            REQUEUED, CAUSE_ASKED, f"the job was told to end; {_resume_point(evidence)}"
        )
    if evidence.controller_away:
        return Decision(
            RESTART, CAUSE_NOT_STARTED, "no rank was started because slurmctld does not answer"
        )
    if _never_retry(evidence):
        return Decision(
            STOP,
            CAUSE_NEVER_RETRY,
            f"the same start would fail the same way: {_what_failed(evidence)}; mend the cause and "
            "submit again",
        )
    return _after_failure(history, evidence, max_failures)


def _after_order(evidence: Evidence, outcome: Outcome) -> Decision:
    """An operator's word counts, whether the save has committed or not: the reason says which."""
    action = PAUSED if outcome.order == PAUSE else ENDED
    return Decision(
        action, CAUSE_ORDERED, f"{_stopped(evidence, outcome)}; `ftslurm resume` lets the run go on"
    )


def _after_unsaved_stop(
    history: Sequence[PastAttempt], evidence: Evidence, outcome: Outcome, max_failures: int
) -> Decision:
    """Asked to leave, with nothing newly committed: the next attempt would train the same steps."""
    count = _failures_in_a_row(history, evidence)
    if count <= max_failures:
        return Decision(REQUEUED, CAUSE_FAILED, _stopped(evidence, outcome), count)
    return Decision(
        STOP,
        CAUSE_FAILED,
        f"{_count(count)} without a newly committed step, recovery.max_failures is {max_failures}: "
        f"{_stopped(evidence, outcome)} ({outcome.reason}); the save does not fit into the time "
        "that is left after the signal: save more often (checkpoint.interval_steps), ask for a "
        "longer cluster.signal_lead_s, or look at the storage, and submit again",
        count,
    )


def _after_failure(
    history: Sequence[PastAttempt], evidence: Evidence, max_failures: int
) -> Decision:
    count = _failures_in_a_row(history, evidence)
    if count > max_failures:
        return Decision(
            STOP,
            CAUSE_FAILED,
            f"{_count(count)} without {_progress(evidence)}, recovery.max_failures is "
            f"{max_failures}: {_what_failed(evidence)}; mend the cause and submit again",
            count,
        )
    what = f"{_what_failed(evidence)}; {_resume_point(evidence)}"
    # A restart in place would end with the allocation, a moment later.
    if evidence.ranks_signalled:
        return Decision(
            REQUEUED, CAUSE_FAILED, f"asked to leave, the ranks did not save in time: {what}", count
        )
    if evidence.limit_is_near:
        return Decision(REQUEUED, CAUSE_FAILED, f"{what}; the time limit is near", count)
    return Decision(RESTART, CAUSE_FAILED, what, count)


def _failures_in_a_row(history: Sequence[PastAttempt], evidence: Evidence) -> int:
    """Failures since a step was last committed. An attempt that was merely asked to leave neither
    counts nor clears: a crash loop between two preemptions is still one."""
    if evidence.progressed:
        return 0
    count = 1
    for attempt in reversed(history):
        if attempt.progressed:
            break
        count += attempt.failed
    return count


def _never_retry(evidence: Evidence) -> bool:
    outcome = evidence.outcome
    if outcome is not None and outcome.result == FAILED and not outcome.retry:
        return True
    return evidence.rc == RANK_NEVER_RETRY


def _progress(evidence: Evidence) -> str:
    return "a change in RUN/resume" if evidence.is_program else "a newly committed step"


def _stopped(evidence: Evidence, outcome: Outcome) -> str:
    asked = f" on {outcome.signal}" if outcome.signal else ""
    if outcome.order:
        asked = f" by the order `{outcome.order}`"
    if evidence.is_program:
        return f"stopped{asked}"
    if outcome.committed_step == outcome.step:
        return f"stopped{asked} at step {outcome.step}, all committed"
    return f"stopped{asked} at step {outcome.step}, {_from_step(outcome.committed_step)}"


def _what_failed(evidence: Evidence) -> str:
    failure = evidence.first_failure
    if failure is not None:
        return (
            f"rank {failure.rank} on {failure.node} failed first in attempt {evidence.number} "
            f"({failure.error}), its log is `{failure.log}`"
        )
    if evidence.outcome is not None and evidence.outcome.reason:
        return (
            f"attempt {evidence.number} failed ({evidence.outcome.reason}), the logs are in "
            f"`{evidence.logs}`"
        )
    return (
        f"attempt {evidence.number} ended with code {evidence.rc} and no rank said why (killed "
        f"from outside, or out of memory), the logs are in `{evidence.logs}`"
    )


def _resume_point(evidence: Evidence) -> str:
    if evidence.is_program:
        return "the next attempt starts the program again"
    return f"the next attempt {_from_step(evidence.committed_step)}"


def _from_step(step: Optional[int]) -> str:
    return "begins at step 0" if step is None else f"goes on from step {step}"


def _count(failures: int) -> str:
    return "1 failure" if failures == 1 else f"{failures} failures in a row"
