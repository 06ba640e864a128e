"""What a run knows of the nodes it has run on: RUN/nodes.jsonl, added to, never rewritten.

Facts only, in the order in which they were noted; what follows from them, that a node is kept out
of the next attempt, is decided in recovery/exclusion.py. Writers, one at a time: the batch loop's
verbs, and an agent once their node is lost.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any, Callable

from ftslurm.files import append_record, read_records
from ftslurm.run.layout import RunLayout

FAULT = "fault"
"""An attempt was ended by this node."""
EXCLUDED = "excluded"
"""Decided: no further attempt is placed on it."""
READMITTED = "readmitted"
"""It may be used again, and what was known of it no longer counts: the run could not do without it,
or, with the cause BY_PERSON, somebody has said so."""
RETURNED = "returned"
"""Slurm gave the run this node, which it must not use, and the allocation was given back."""


BY_PERSON = "by_person"
"""Cause of a READMITTED."""


@dataclass(frozen=True)
class NodeEvent:
    at: float
    kind: str
    """fault | excluded | readmitted | returned"""
    node: str
    attempt: int
    """The newest attempt then; 0: none had begun."""
    cause: str = ""
    """A word of diagnosis/causes.py, or BY_PERSON, where there is one."""
    why: str = ""
    """One sentence."""


def note_node(
    layout: RunLayout,
    kind: str,
    node: str,
    *,
    attempt: int,
    cause: str = "",
    why: str = "",
    now: Callable[[], float] = time.time,
) -> bool:
    """Add one event; False when this attempt has blamed the node so already, so that whoever is not
    sure that another has noted it may note it again."""
    known = {(event.kind, event.node, event.attempt) for event in read_node_events(layout)}
    if kind in (FAULT, EXCLUDED) and (kind, node, attempt) in known:
        return False
    event = NodeEvent(now(), kind, node, attempt, cause, why)
    append_record(layout.nodes_jsonl, dataclasses.asdict(event))
    return True


def read_node_events(layout: RunLayout) -> list[NodeEvent]:
    """Oldest first; a torn line is left out."""
    return [_event(record) for record in read_records(layout.nodes_jsonl)]


def _event(record: dict[str, Any]) -> NodeEvent:
    names = {item.name for item in dataclasses.fields(NodeEvent)}
    return NodeEvent(**{name: value for name, value in record.items() if name in names})
