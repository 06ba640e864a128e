"""One attempt as a person would tell it: from where to where, how it ended, why, what it cost.

Reads only, and only what is small whatever the number of ranks: `status` tells all attempts of a
run at once. A record that is torn counts as absent.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Optional

from ftslurm.run.attempt_records import (
    ASKED_TO_LEAVE,
    Records,
    claimed_at,
    error_record,
    facts_of,
    read_attempt_records,
    read_error,
)
from ftslurm.run.attempts import PACED, Outcome, Progress, numbers
from ftslurm.run.layout import AttemptLayout, RunLayout
from ftslurm.run.timeline import Late, Timeline, draw, earliest_error, late_words
from ftslurm.run.trace_tail import last_row, tokens_at

MAX_ERRORS_READ = 64
"""Error records looked at where no decision names the first: of 10,000 ranks all take too long."""


_LAST_WORDS_BYTES, _LAST_WORDS_LINES = 4096, 20


@dataclass(frozen=True)
class FirstFailure:
    """The rank that failed first; what it could not say is None or empty."""

    rank: int
    node: Optional[str]
    error: str
    step: Optional[int]
    traceback: list[str]
    """Lines; of a rank that left no record, the last of its log."""
    file: Optional[str]
    """Where its own words are, in the run directory."""


@dataclass(frozen=True)
class AttemptStory:
    number: int
    job_id: str
    restart_count: int
    nodes: list[str]
    claimed_at: Optional[float]
    restored_step: Optional[int]
    """None: it began at step 0, or never got so far."""
    last_step: Optional[int]
    """Steps applied when it ended, or by now; None also for a program's."""
    committed_step: Optional[int]
    """Newest step it committed itself."""
    ended: str
    """finished | stopped | failed | killed | running"""
    signal: Optional[str]
    order: Optional[str]
    """stop | pause: an operator's, which it obeyed."""
    action: Optional[str]
    """Word of the decision that followed; None: there was none (yet)."""
    reason: str
    steps_lost: int
    """Trained here and trained again by a later attempt."""
    tokens_lost: int
    cause: Optional[str]
    """As decided; None: nobody has said."""
    confidence: Optional[float]
    blamed: Optional[dict[str, Any]]
    """node, gpu, rank; None: nobody in particular."""
    evidence: list[dict[str, Any]]
    """text, file (in the attempt's folder), line; the decisive ones, best first."""
    exclude: list[str]
    """Nodes the decision keeps the run off."""
    first_failure: Optional[FirstFailure]
    timeline: Timeline
    findings: list[dict[str, Any]]
    """Of the node agents."""
    late: Optional[Late]
    """What a leftover of it still wrote when the next attempt had begun."""
    asked_by: Optional[str] = None
    """preempted | time_limit | signal: why the ranks were asked to leave, as
    the scheduler had it then; None: they were not, or nobody could say."""
    pace: Optional[dict[str, Any]] = None
    """The interval between saves as last chosen, and what from; None: it is fixed."""
    deadline: Optional[dict[str, Any]] = None
    """left_s: seconds that its last save was given; by: preempted | time_limit | ending, as Slurm
    said when the signal came, or submit, as was frozen then. None: no signal, or nobody has
    said."""


def read_attempt_stories(layout: RunLayout, *, is_program: bool) -> list[AttemptStory]:
    """Of all attempts, in order."""
    claimed = numbers(layout)
    records = [read_attempt_records(layout, number) for number in claimed]
    stories = [
        _story(layout, number, here, following, is_program=is_program)
        for number, here, following in zip(claimed, records, [*records[1:], None])
    ]
    return _with_losses(layout, stories)


def first_failure(here: Records, following: Optional[Records]) -> Optional[FirstFailure]:
    """The rank that the decision names; where there is none, the earliest that left a record."""
    told = here.decision.get("first_failure") or {}
    rank = told.get("rank")
    if rank is None:
        rank = (here.decision.get("blamed") or {}).get("rank")
    record = None if rank is None else error_record(here, int(rank))
    if rank is None and not here.decision:
        some = islice(here.paths.ranks.glob("rank-*.json"), MAX_ERRORS_READ)
        errors = [record for path in some if (record := read_error(path)) is not None]
        found = earliest_error(errors, here.clocks, until=claimed_at(following))
        record = None if found is None else dict(found)
    if record is not None:
        return _failure_of(record, here.paths)
    if rank is None or not told:
        return None
    return FirstFailure(
        rank=int(rank),
        node=told.get("node"),
        error=str(told.get("error", "unknown")),
        step=told.get("step"),
        traceback=_last_words(told.get("log")),
        file=told.get("log"),
    )


def _last_words(log: Optional[str]) -> list[str]:
    """Of a rank that was ended before it could write why: what faulthandler, or a library, said."""
    if log is None or not Path(log).is_file():
        return []
    with Path(log).open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _LAST_WORDS_BYTES))
        text = stream.read().decode(errors="replace")
    return text.splitlines()[-_LAST_WORDS_LINES:]


def _story(
    layout: RunLayout,
    number: int,
    here: Records,
    following: Optional[Records],
    *,
    is_program: bool,
) -> AttemptStory:
    claim, decision = here.claim, here.decision
    committed = [int(event["step"]) for event in here.events if event["kind"] == "committed"]
    last_step = _last_step(layout.trace_file(number), here.outcome, here.progress)
    failure = first_failure(here, following)
    ranks = {0} if failure is None else {0, failure.rank}
    errors = [found for rank in ranks if (found := error_record(here, rank))]
    first = [record for record in errors if failure and record["rank"] == failure.rank]
    facts = facts_of(here, following, first)
    return AttemptStory(
        number=number,
        job_id=claim.job_id if claim else "?",
        restart_count=claim.restart_count if claim else 0,
        nodes=claim.nodes if claim else [],
        claimed_at=claim.claimed_at if claim else None,
        restored_step=_restored_step(here.events, here.progress),
        last_step=None if is_program else last_step,
        committed_step=max(committed, default=None),
        ended=_how_it_ended(here.outcome, decision, following),
        signal=_signal(here.events, here.outcome),
        order=here.outcome.order if here.outcome else None,
        action=decision.get("action"),
        reason=str(decision.get("reason", "")),
        steps_lost=0,
        tokens_lost=0,
        cause=decision.get("cause"),
        confidence=decision.get("confidence"),
        blamed=decision.get("blamed"),
        evidence=[_placed(here, clue) for clue in decision.get("evidence") or []],
        exclude=list(decision.get("exclude") or []),
        first_failure=failure,
        timeline=draw(facts),
        findings=list(here.agents.get("findings", [])),
        late=late_words(facts, errors, last_sign_at=here.trained_at),
        asked_by=decision.get("asked_by"),
        pace=_pace(here.events),
        deadline=_deadline([*here.agent_events, *here.events]),
    )


def _placed(here: Records, clue: dict[str, Any]) -> dict[str, Any]:
    """With its file named from the attempt's folder on."""
    file, folder = clue.get("file"), here.paths.root.absolute()
    if file and folder in Path(file).parents:
        return {**clue, "file": str(Path(file).relative_to(folder))}
    return clue


def _failure_of(record: dict[str, Any], paths: AttemptLayout) -> FirstFailure:
    rank, message = int(record["rank"]), str(record.get("message", ""))
    kind = str(record.get("type", "unknown"))
    lines = "".join(record.get("traceback") or []).splitlines()
    return FirstFailure(
        rank=rank,
        node=record.get("node"),
        error=f"{kind}: {message}" if message else kind,
        step=record.get("step"),
        traceback=lines,
        file=str(paths.ranks / f"rank-{rank:05d}.json"),
    )


def _restored_step(events: Sequence[dict[str, Any]], progress: Optional[Progress]) -> Optional[int]:
    for event in reversed(events):
        if event["kind"] == "restored" and event.get("step") is not None:
            return int(event["step"])
    return progress.restored_step if progress else None


def _last_step(
    trace: Path, outcome: Optional[Outcome], progress: Optional[Progress]
) -> Optional[int]:
    """The highest of what is on record: progress lags, an outcome may be missing."""
    row = last_row(trace)
    known = [row["step"] if row else None]
    known.append(outcome.step if outcome else None)
    known.append(progress.step if progress else None)
    return max((step for step in known if step is not None), default=None)


def _how_it_ended(
    outcome: Optional[Outcome], decision: dict[str, Any], following: Optional[Records]
) -> str:
    if outcome is not None:
        return outcome.result
    if not decision:
        # Its batch shell was killed with it (end of grace, lost node): nobody decided.
        return "running" if following is None else "killed"
    # Told to leave, its ranks were gone before they could say how far they had come.
    return "killed" if decision.get("cause") in ASKED_TO_LEAVE else "failed"


def _signal(events: Sequence[dict[str, Any]], outcome: Optional[Outcome]) -> Optional[str]:
    if outcome is not None and outcome.signal:
        return outcome.signal
    for event in events:
        if event["kind"] == "signal":
            return str(event.get("signal") or event.get("name") or "signal")
    return None


def _pace(events: Sequence[dict[str, Any]]) -> Optional[dict[str, Any]]:
    chosen = [event for event in events if event["kind"] == PACED]
    return {name: value for name, value in chosen[-1].items() if name != "kind"} if chosen else None


def _deadline(events: Sequence[dict[str, Any]]) -> Optional[dict[str, Any]]:
    """The ranks' own word before the agents': of a program there is no other."""
    told = [event for event in events if event["kind"] == "deadline" and "left_s" in event]
    return {name: told[-1][name] for name in ("left_s", "by")} if told else None


def _with_losses(layout: RunLayout, attempts: list[AttemptStory]) -> list[AttemptStory]:
    told = []
    for place, attempt in enumerate(attempts):
        later = attempts[place + 1 :]
        lost = overlap(trained(attempt), [trained(item) for item in later])
        tokens = 0
        if lost:
            end, begin = (attempt.last_step or 0), (attempt.last_step or 0) - lost
            tokens = tokens_between(layout, attempts, begin, end)
        told.append(dataclasses.replace(attempt, steps_lost=lost, tokens_lost=tokens))
    return told


def trained(attempt: AttemptStory) -> range:
    """Steps that the attempt trained, 1 for the first of a run."""
    return range((attempt.restored_step or 0) + 1, (attempt.last_step or 0) + 1)


def overlap(steps: range, others: Sequence[range]) -> int:
    """How many of `steps` are in at least one of `others`."""
    count, position = 0, steps.start
    for other in sorted(others, key=lambda item: item.start):
        low, high = max(position, other.start), min(steps.stop, other.stop)
        if low < high:
            count += high - low
            position = high
    return count


def tokens_between(
    layout: RunLayout, attempts: Sequence[AttemptStory], begin: int, end: int
) -> int:
    """Consumed from one step to another; 0 where no trace tells."""
    before = 0 if begin == 0 else _tokens(layout, attempts, begin)
    after = _tokens(layout, attempts, end)
    return 0 if before is None or after is None else after - before


def _tokens(layout: RunLayout, attempts: Sequence[AttemptStory], step: int) -> Optional[int]:
    """What the run had consumed at a step."""
    for attempt in attempts:
        if step in trained(attempt):
            tokens = tokens_at(layout.trace_file(attempt.number), step)
            if tokens is not None:
                return tokens
    return None
