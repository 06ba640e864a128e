"""The parts that a decision's sentence is made of. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from ftslurm.diagnosis.causes import PREEMPTED, TIME_LIMIT, UNKNOWN
from ftslurm.run.attempts import Outcome

if TYPE_CHECKING:
    from ftslurm.recovery.case import Evidence

_WHY = {PREEMPTED: "preempted", TIME_LIMIT: "the time limit is near"}


def progress(evidence: Evidence) -> str:
    return "a change in RUN/resume" if evidence.is_program else "a newly committed step"


def how_it_stopped(evidence: Evidence, outcome: Outcome) -> str:
    asked = f" on {outcome.signal}" if outcome.signal else ""
    if asked and evidence.asked_by in _WHY:
        asked = f"{asked} ({_WHY[evidence.asked_by]})"
    if outcome.order:
        asked = f" by the order `{outcome.order}`"
    if evidence.is_program:
        return f"stopped{asked}"
    if outcome.committed_step == outcome.step:
        return f"stopped{asked} at step {outcome.step}, all committed"
    return f"stopped{asked} at step {outcome.step}, {_from_step(outcome.committed_step)}"


def what_failed(evidence: Evidence) -> str:
    doubt = evidence.finding.doubt if evidence.finding else ""
    return f"{_what_failed(evidence)}; {doubt}" if doubt else _what_failed(evidence)


def _what_failed(evidence: Evidence) -> str:
    said, finding = _said_by_ranks(evidence), evidence.finding
    if finding is None:
        missing = evidence.unclassified
        return f"{said} (of what kind it is could not be told: {missing})" if missing else said
    if finding.cause == UNKNOWN:
        return said
    failure = evidence.first_failure
    # A rank's own error says it best; where a node or the memory gave way, what was found does.
    if failure is not None and failure.signature and finding.blamed_rank == failure.rank:
        return f"{said}, cause {finding.cause}"
    return (
        f"attempt {evidence.number} failed: {finding.sentence}; the logs are in `{evidence.logs}`"
    )


def _said_by_ranks(evidence: Evidence) -> str:
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


def resume_point(evidence: Evidence) -> str:
    if evidence.is_program:
        return "the next attempt starts the program again"
    return f"the next attempt {_from_step(evidence.committed_step)}"


def _from_step(step: Optional[int]) -> str:
    return "begins at step 0" if step is None else f"is to go on from step {step}"


def how_often(failures: int) -> str:
    return "1 failure" if failures == 1 else f"{failures} failures in a row"
