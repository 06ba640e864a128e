"""What an attempt left in the run directory, read into the values the policy decides on.

Reads only; a record that a crash left torn counts as absent, never as a reason to fail. run.json is
the caller's to read, once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Callable, Optional

from ftslurm.checkpoint.published import PublishedStep, published_steps
from ftslurm.diagnosis.causes import STRAGGLER
from ftslurm.errors import FormatError
from ftslurm.files import is_listed, read_json
from ftslurm.recovery.actions import STOP
from ftslurm.recovery.case import Evidence, PastAttempt, RankFailure
from ftslurm.recovery.exclusion import fault_counts, still_counting, taken_back
from ftslurm.recovery.policy import CAUSE_FAILED
from ftslurm.run.attempts import (
    Outcome,
    claimed_numbers,
    node_of,
    read_attempt,
    read_decision,
    read_events,
    read_outcome,
    read_progress,
)
from ftslurm.run.control import control_files
from ftslurm.run.layout import AttemptLayout, RunLayout
from ftslurm.run.node_memory import NodeEvent, read_node_events
from ftslurm.run.rank_errors import RankErrors, read_rank_errors
from ftslurm.run.record import RunRecord

if TYPE_CHECKING:
    from ftslurm.diagnosis.finding import Finding

MOST_ERRORS, ERRORS_S = 64, 1.0
"""Records of ranks that are read here, and for how long: the nodes are idle, or grace is running.
The rest is heard where the attempt is classified."""

_MESSAGE_CHARACTERS = 300
_SIGNATURE_CHARACTERS = 120
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""Addresses, sizes and ranks differ from one attempt to the next."""

_LEFT_FOR = 10
"""Attempts in a row that may die before a rank of theirs restores; a run has stopped by then."""

ECHO = "PeerLost"
"""Type of a rank's error that only says that another rank is gone."""


def read_evidence(
    layout: RunLayout,
    record: RunRecord,
    number: int,
    *,
    rc: int,
    term: bool,
    settled: Optional[Outcome] = None,
    now: Callable[[], float] = time.time,
) -> Evidence:
    """`settled`: the outcome, where it may not have come to the disk."""
    paths = layout.attempt(number)
    newest, older = [*_committed(layout, number), None, None][:2]
    outcome = settled or _outcome(paths)
    errors = read_rank_errors(paths, within_s=ERRORS_S, most=MOST_ERRORS)
    agents, nodes = _agents(paths), read_node_events(layout)
    back = taken_back(nodes)
    fault_days = record.spec.recovery.node_fault_days
    counting = still_counting(nodes, fault_days=fault_days, now=now())
    named = _named_by_preflight(paths)
    if named and ranks_were_started(paths):
        named = {}
    return Evidence(
        number=number,
        rc=rc,
        term=term,
        done=is_listed(layout.done),
        outcome=outcome,
        progressed=_has_gone_on(layout, record, number, newest),
        committed_step=newest.step if newest else None,
        committed_digest=newest.committed_digest if newest else "",
        committed_before=older.step if older else None,
        logs=str(paths.logs),
        first_failure=_first_failure(layout, record, number, errors, _offsets(agents)),
        order=control_files(layout, record).read_leaving(),
        ranks_signalled=any(event["kind"] == "signal" for event in read_events(paths)),
        is_program=bool(record.spec.program),
        began_at=_newest_adopted(layout, number) or 0,
        step=_last_step(paths, outcome, errors),
        # One that was taken back as too few were left is not given up again for being slow.
        stragglers=tuple(node for node in _stragglers(agents) if node not in back),
        evicted=tuple(node for node in _stragglers(agents, acted=True) if node not in back),
        node_faults=_node_faults(counting, number),
        sick=named,
        preflight_named=bool(named),
    )


def with_finding(evidence: Evidence, finding: Optional[Finding], why_none: str) -> Evidence:
    """What was found has the last word on who failed first: it has heard all ranks, and knows an
    echo from a cause. Pure."""
    evidence = dataclasses.replace(
        evidence,
        finding=finding,
        unclassified=why_none,
        sick={**evidence.sick, **(finding.sick if finding is not None else {})},
    )
    root = finding.clues[0] if finding is not None and finding.clues else None
    if finding is None or root is None or root.rank is None or root.rank != finding.blamed_rank:
        return evidence
    # Of a program the rank itself knows only how it ended; its log may say why.
    is_of_program = root.kind == "log" and evidence.is_program
    first = evidence.first_failure
    is_known = first is not None and first.rank == root.rank and not is_of_program
    if is_known or not (root.kind == "rank_error" or is_of_program):
        return evidence
    failure = RankFailure(
        root.rank,
        root.node or "unknown node",
        " ".join(root.text.split())[:_MESSAGE_CHARACTERS],
        log=f"{evidence.logs}/rank-{root.rank}.log",
        step=root.step,
    )
    failure = dataclasses.replace(failure, signature=_signature(failure.error))
    return dataclasses.replace(evidence, first_failure=failure)


def has_gone_on(layout: RunLayout, record: RunRecord, number: int) -> bool:
    """Whether the newest attempt, `number`, has brought the run forward."""
    newest = next(iter(_committed(layout, number)), None)
    return _has_gone_on(layout, record, number, newest)


def _has_gone_on(
    layout: RunLayout, record: RunRecord, number: int, newest: Optional[PublishedStep]
) -> bool:
    if record.spec.program:
        from ftslurm.program.progress import has_progressed  # late: few runs are programs

        return has_progressed(layout, number)
    return _is_newer(newest.step if newest else None, _newest_adopted(layout, number))


def read_history(layout: RunLayout, record: RunRecord, number: int) -> list[PastAttempt]:
    """Attempts before `number`, oldest first; one that was cut off in its claim had no ranks."""
    earlier = [past for past in claimed_numbers(layout) if past < number]
    progressed = _progressed_between(layout, record, [*earlier, number])
    return [
        _past_attempt(past, read_decision(layout.attempt(past)), progress)
        for past, progress in zip(earlier, progressed)
    ]


def _past_attempt(number: int, decision: dict[str, Any], progressed: bool) -> PastAttempt:
    cause = decision.get("cause", "")
    return PastAttempt(
        number=number,
        # Records of before there was a word for it.
        failed=decision.get("is_failure", cause == CAUSE_FAILED),
        progressed=progressed,
        cause=cause,
        signature=decision.get("signature"),
        step=decision.get("step"),
        blamed_node=(decision.get("blamed") or {}).get("node"),
        skipped=bool(decision.get("skip_steps")),
        ended_run=decision.get("action") == STOP,
        program_fault=decision.get("program_fault", ""),
    )


def _progressed_between(
    layout: RunLayout, record: RunRecord, attempts: Sequence[int]
) -> list[bool]:
    """For each attempt but the last: whether the next one began further on."""
    if record.spec.program:
        from ftslurm.program.progress import progressed_between  # late, as above

        return progressed_between(layout, attempts)
    adopted = [_newest_adopted(layout, attempt) for attempt in attempts]
    return [_is_newer(after, before) for before, after in zip(adopted, adopted[1:])]


def _committed(layout: RunLayout, number: int) -> list[PublishedStep]:
    """Newest first, without those that a decision before has gone back behind: they lie there until
    the first rank of the next attempt puts them aside, which it may not live to do."""
    left = set()
    for past in [past for past in claimed_numbers(layout) if past < number][-_LEFT_FOR:]:
        decision = read_decision(layout.attempt(past))
        if decision.get("restore_before") is not None:
            left.add(decision.get("committed_digest"))
    return [item for item in published_steps(layout) if item.committed_digest not in left]


def ranks_were_started(paths: AttemptLayout) -> bool:
    """The launcher makes a rank's log before the rank runs."""
    return any(paths.logs.iterdir())


def _named_by_preflight(paths: AttemptLayout) -> dict[str, str]:
    try:
        bad = read_json(paths.preflight_json).get("bad") or {}
        return {str(node): str(what) for node, what in bad.items()}
    except (OSError, FormatError, AttributeError):
        return {}


def _newest_adopted(layout: RunLayout, number: int) -> Optional[int]:
    """None also for an attempt whose claim was cut short."""
    try:
        attempt = read_attempt(layout, number)
    except (FileNotFoundError, FormatError):
        return None
    # One that could not be read is most likely damaged, and then nothing to be measured by.
    return max((item.step for item in attempt.adopted if item.digest), default=None)


def _is_newer(step: Optional[int], than: Optional[int]) -> bool:
    return step is not None and (than is None or step > than)


def _outcome(paths: AttemptLayout) -> Optional[Outcome]:
    try:
        return read_outcome(paths)
    except FormatError:
        return None


def _first_failure(
    layout: RunLayout,
    record: RunRecord,
    number: int,
    errors: RankErrors,
    offsets_s: Mapping[str, float],
) -> Optional[RankFailure]:
    """Earliest by the leader's clock that is no echo; else the one rank that left no word."""
    paths = layout.attempt(number)
    own = [told for _, told in errors.records if told["type"] != ECHO]
    if own:
        return _told_failure(paths, min(own, key=lambda one: _told_at(one, offsets_s)))
    if errors.unread:
        return None
    attempt, spec = read_attempt(layout, number), record.spec
    tasks = attempt.tasks_per_node or spec.cluster.tasks_per_node
    world = range(attempt.world_size or spec.world_size)
    silent = sorted(set(world) - {int(told["rank"]) for _, told in errors.records})
    if not errors.records or len(silent) != 1:
        return None
    node = node_of(attempt.nodes, silent[0], tasks) or "unknown node"
    error = "left without a word: killed from outside, or out of memory"
    return _failure(paths, silent[0], node, error)


def _told_at(record: Mapping[str, Any], offsets_s: Mapping[str, float]) -> float:
    return float(record["at"]) - offsets_s.get(str(record["node"]), 0.0)


def _told_failure(paths: AttemptLayout, record: dict[str, Any]) -> RankFailure:
    message = " ".join(str(record["message"]).split())[:_MESSAGE_CHARACTERS]
    error = f"{record['type']}: {message}" if message else str(record["type"])
    failure = _failure(paths, int(record["rank"]), str(record["node"]), error)
    return dataclasses.replace(failure, step=record.get("step"), signature=_signature(error))


def _signature(error: str) -> str:
    return _NUMBER.sub("#", error)[:_SIGNATURE_CHARACTERS]


def _last_step(
    paths: AttemptLayout, outcome: Optional[Outcome], errors: RankErrors
) -> Optional[int]:
    """What any rank has said; a rank that was killed leaves only what rank 0 wrote down a second
    ago."""
    said = [record.get("step") for _, record in errors.records]
    said.append(None if outcome is None else outcome.step)
    with contextlib.suppress(FormatError):
        progress = read_progress(paths)
        said.append(None if progress is None else progress.step)
    return max((step for step in said if step is not None), default=None)


def _agents(paths: AttemptLayout) -> dict[str, Any]:
    try:
        return read_json(paths.agents_json)
    except (FileNotFoundError, FormatError):
        return {}


def _offsets(agents: Mapping[str, Any]) -> dict[str, float]:
    """Node -> how far its clock is ahead of the leader's, where that was measured."""
    rows = agents.get("nodes", {}).items()
    return {node: float(row["offset_s"]) for node, row in rows if row.get("offset_s") is not None}


def _stragglers(agents: Mapping[str, Any], *, acted: bool = False) -> tuple[str, ...]:
    """Nodes that the agents have named; `acted`: those because of which they have ended it."""
    findings = agents.get("findings", [])
    named = [
        one for one in findings if one.get("kind") == STRAGGLER and (one.get("acted") or not acted)
    ]
    return tuple(sorted({node for one in named for node in one.get("nodes", [])}))


def _node_faults(events: Sequence[NodeEvent], number: int) -> dict[str, int]:
    """Before attempt `number`: an agent may have noted its fault by now."""
    return fault_counts([event for event in events if event.attempt != number])


def _failure(paths: AttemptLayout, rank: int, node: str, error: str) -> RankFailure:
    return RankFailure(rank, node, error, log=str(paths.logs / f"rank-{rank}.log"))
