"""From the records of an attempt to its time line: what came when, who says so, what it cost.

Pure: records in, values out; no clock, no files. A moment that no record tells is None, never
guessed, and so is a part that two clocks contradict. Times are those of the attempt's batch node,
where journal and leader write; what another node has dated is put right by that node's measured
offset, and left out where its clock cannot be right.

failed -> detected -> ranks gone -> decided -> next srun -> restored -> first step
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

MOMENTS = ("failed", "detected", "gone", "decided", "launched", "restored", "first_step")
"""In the order in which they come."""

SLACK_S = 2.0
"""How far rank 0's latest word, and what is noted beside it, may be off what it tells of."""

LATE_S = 0.25
"""How much later than the next claim is late: two nodes' clocks agree no better than that."""

LAST_WORD = "the last step on record, after which it came"
ASKED = "the ranks were asked to leave"

RANK_EXIT = "rank_exit"
"""An agent's event: a rank of its node is gone."""
DEADLY_FINDINGS = ("hang", "node_lost", "leader_lost")
BATCH_KINDS = (
    "claimed", "ranks_ended", "decided", "told", "requeue_asked", "gave_way",
)  # fmt: skip
"""Journal lines of the batch loop's verbs; all others are of a rank."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Clocks:
    """How far each node's clock is ahead of the leader's (agents.json, `offset_s`)."""

    offsets_s: Mapping[str, float] = field(default_factory=dict)

    def corrected(self, node: Optional[str], at: float) -> float:
        """On the leader's clock; as it stands where the node's offset was not measured."""
        return at - self.offsets_s.get(node or "", 0.0)


@dataclass(frozen=True)
class Facts:
    """What is on record of one attempt and of how the next one began."""

    events: Sequence[Record] = ()
    """Journal."""
    findings: Sequence[Record] = ()
    """Of the node agents."""
    agent_events: Sequence[Record] = ()
    """In the order in which the leader received them."""
    errors: Sequence[Record] = ()
    """Error records of ranks."""
    clocks: Clocks = Clocks()
    last_sign_at: Optional[float] = None
    """Rank 0's latest word while it trained; a second or a step old when the ranks fail."""
    asked_to_leave: bool = False
    """The ranks say so themselves: nothing has failed."""
    decided_at: Optional[float] = None
    """As decision.json has it."""
    next_events: Sequence[Record] = ()
    next_claimed_at: Optional[float] = None
    next_ahead_s: float = 0.0
    """How far the next attempt's batch node's clock is ahead of this one's."""


@dataclass(frozen=True)
class Timeline:
    """UTC seconds; None: unknown, or it has not come to that."""

    failed: Optional[float] = None
    """Where the ranks were asked to leave: when they did."""
    failed_by: str = "unknown"
    """What says so."""
    detected: Optional[float] = None
    detected_by: str = "unknown"
    gone: Optional[float] = None
    """The launcher of the ranks has returned."""
    decided: Optional[float] = None
    launched: Optional[float] = None
    """The next attempt's srun."""
    restored: Optional[float] = None
    first_step: Optional[float] = None
    """The next attempt has trained a step."""
    parts: dict[str, Optional[float]] = field(default_factory=dict)
    """Seconds from the moment before that is known to this one; they add up to `rto_s`."""
    mttd_s: Optional[float] = None
    """Failed to detected."""
    rto_s: Optional[float] = None
    """Failed to first step."""


@dataclass(frozen=True)
class Late:
    """What an attempt still wrote after the next one had been claimed: a leftover of it lived."""

    after_s: float
    """How long after the claim it last wrote."""
    kinds: list[str]


def draw(facts: Facts) -> Timeline:
    """The whole line."""
    gone = first_of(facts.events, "ranks_ended")
    failed, failed_by = _failed(facts, gone)
    decided = last_of(facts.events, "decided") or facts.decided_at
    detected, detected_by = _detected(facts, failed, gone, decided)
    launched, restored, first_step = _next_began(facts)
    moments = {
        "failed": failed,
        "detected": detected,
        "gone": gone,
        "decided": decided,
        "launched": launched,
        "restored": restored,
        "first_step": first_step,
    }
    parts = _parts(moments)
    return Timeline(
        **moments,
        failed_by=failed_by,
        detected_by=detected_by,
        parts=parts,
        mttd_s=parts["detected"],
        rto_s=_span(failed, first_step, parts),
    )


def late_words(
    facts: Facts, errors: Iterable[Record] = (), *, last_sign_at: Optional[float] = None
) -> Optional[Late]:
    """None: nothing came late, or there is no next attempt. `errors`: of ranks, at hand."""
    claimed_at = facts.next_claimed_at
    if claimed_at is None:
        return None
    words = [(float(e["at"]), str(e["kind"])) for e in facts.events if e["kind"] not in BATCH_KINDS]
    words += [
        (facts.clocks.corrected(error.get("node"), float(error["at"])), "error") for error in errors
    ]
    words.append((last_sign_at or 0.0, "progress"))
    late = [(at, kind) for at, kind in words if at > claimed_at + LATE_S]
    if not late:
        return None
    return Late(round(max(late)[0] - claimed_at, 3), sorted({kind for _, kind in late}))


def earliest_error(
    errors: Iterable[Record], clocks: Clocks, *, until: Optional[float] = None
) -> Optional[Record]:
    """The record that was written first, whatever its own node's clock said; `until`: the next
    attempt's claim, after which only a leftover writes."""
    dated = [(clocks.corrected(item.get("node"), float(item["at"])), item) for item in errors]
    timely = [pair for pair in dated if until is None or pair[0] <= until + LATE_S]
    return min(timely, key=lambda pair: pair[0], default=(0.0, None))[1]


def in_order(facts: Facts) -> list[dict[str, Any]]:
    """All that was told of the attempt, in the order of the leader's receive time; a rank's error
    record at its own time, put right. `clock_s`: how far the teller's clock was ahead."""
    told = [{**event, "by": "journal"} for event in facts.events]
    told += [{**event, "by": "agent"} for event in facts.agent_events]
    for record in facts.errors:
        node = record.get("node")
        entry = {
            "at": facts.clocks.corrected(node, float(record["at"])),
            "by": "rank",
            "kind": "error",
            "rank": record.get("rank"),
            "node": node,
            "why": f"{record.get('type')}: {record.get('message')}",
        }
        told.append(entry)
    for entry in told:
        offset = facts.clocks.offsets_s.get(str(entry.get("node")))
        if offset is not None:
            entry["clock_s"] = round(offset, 3)
    return sorted(told, key=lambda entry: float(entry["at"]))


def first_of(events: Iterable[Record], *kinds: str) -> Optional[float]:
    return next((float(event["at"]) for event in events if event["kind"] in kinds), None)


def last_of(events: Iterable[Record], *kinds: str) -> Optional[float]:
    found = [float(event["at"]) for event in events if event["kind"] in kinds]
    return found[-1] if found else None


def _failed(facts: Facts, gone: Optional[float]) -> tuple[Optional[float], str]:
    if facts.asked_to_leave:
        asked = first_of(facts.events, "signal", "asked")
        return asked, "unknown" if asked is None else ASKED
    until = facts.next_claimed_at if gone is None else gone
    possible = [
        (at, why) for at, why in _signs_of_failure(facts) if _can_be(at, facts.last_sign_at, until)
    ]
    if possible:
        return min(possible)
    if facts.last_sign_at is not None and _can_be(facts.last_sign_at, None, until):
        return facts.last_sign_at, LAST_WORD
    return None, "unknown"


def _signs_of_failure(facts: Facts) -> Iterator[tuple[float, str]]:
    for record in facts.errors:
        at = facts.clocks.corrected(record.get("node"), float(record["at"]))
        yield at, f"error record of rank {record.get('rank')}"
    for event in facts.agent_events:
        if event["kind"] == RANK_EXIT and not _is_clean(event):
            yield float(event["at"]), f"end of rank {event.get('rank')}, seen by its node's agent"
    for finding in facts.findings:
        if finding.get("kind") in DEADLY_FINDINGS and finding.get("since") is not None:
            yield float(finding["since"]), f"the agents' finding `{finding['kind']}`"


def _is_clean(event: Record) -> bool:
    return event.get("code") == 0 and not event.get("signal")


def _can_be(at: float, last_sign_at: Optional[float], until: Optional[float]) -> bool:
    """No rank fails before the last step that all have trained, or after all are gone: what says
    so is a leftover, or a clock that is wrong by an amount that nobody has measured."""
    after_training = last_sign_at is None or at >= last_sign_at - SLACK_S
    return after_training and (until is None or at <= until + SLACK_S)


def _detected(
    facts: Facts, failed: Optional[float], gone: Optional[float], decided: Optional[float]
) -> tuple[Optional[float], str]:
    if facts.asked_to_leave:
        return failed, "the ranks themselves" if failed is not None else "unknown"
    found = [] if gone is None else [(gone, "the end of the ranks' srun")]
    if decided is not None:
        found.append((decided, "whoever decided"))
    for finding in facts.findings:
        if finding.get("kind") in DEADLY_FINDINGS and finding.get("at") is not None:
            found.append((float(finding["at"]), f"the agents' finding `{finding['kind']}`"))
    for event in facts.agent_events:
        if event["kind"] == RANK_EXIT and not _is_clean(event):
            found.append((float(event["at"]), f"the agent of {event.get('node')}"))
    possible = [item for item in found if failed is None or item[0] >= failed - SLACK_S]
    return min(possible, default=(None, "unknown"))


def _next_began(facts: Facts) -> list[Optional[float]]:
    """Claimed, restored, first step: on this attempt's clock."""
    claimed = first_of(facts.next_events, "claimed") or facts.next_claimed_at
    restored = [event for event in facts.next_events if event.get("step") is not None]
    moments = [claimed, last_of(restored, "restored"), first_of(facts.next_events, "first_step")]
    return [None if at is None else at - facts.next_ahead_s for at in moments]


def _parts(moments: Mapping[str, Optional[float]]) -> dict[str, Optional[float]]:
    parts: dict[str, Optional[float]] = {}
    before = moments["failed"]
    for name in MOMENTS[1:]:
        at = moments[name]
        parts[name] = None if at is None or before is None else round(at - before, 3)
        span = parts[name]
        if span is not None and span < 0:
            # Two writers on one node; more than that is two clocks.
            parts[name] = 0.0 if span > -SLACK_S else None
        before = at if at is not None else before
    return parts


def _span(
    begin: Optional[float], end: Optional[float], parts: Mapping[str, Optional[float]]
) -> Optional[float]:
    """None where a part between is not known though both its ends are."""
    if begin is None or end is None or parts["first_step"] is None or end < begin:
        return None
    return round(end - begin, 3)
