"""How a program's attempt has ended, written down once its launcher has: finished, stopped, or
nothing, which is a failure.

One writer, the batch loop, after the last rank is gone: one that ends well early does not end the
run, and what a rank says of itself cannot be contradicted by a slower one. A disk that takes no
outcome does not keep the run from going on; only DONE has to be on it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any, Optional

from ftslurm.errors import RANK_STOPPED, FormatError
from ftslurm.files import best_effort, read_json, write_json
from ftslurm.run.attempts import (
    FINISHED,
    STOPPED,
    Outcome,
    read_events,
    read_outcome,
    write_outcome,
)
from ftslurm.run.layout import AttemptLayout, RunLayout

ASKED = "asked"
"""Kind of the event in which rank 0 notes that it was asked to leave."""
ENDS = ("hang", "node_lost")
"""Kinds of findings (agent/report.py) for which the agents end the ranks."""


def settle(
    layout: RunLayout, attempt: int, *, rc: int, now: Callable[[], float] = time.time
) -> Optional[Outcome]:
    """`rc`: the launcher's, the highest of all ranks'. May be called again after an error."""
    paths = layout.attempt(attempt)
    known = read_outcome(paths)
    if known is not None:
        return known
    if rc == 0:
        # DONE before the outcome: a kill in between leaves a run that is known to have finished.
        write_json(layout.done, {"schema_version": 1, "attempt": attempt, "finished_at": now()})
        return _on_record(paths, Outcome(FINISHED, 0, 0, written_at=now()))
    asked = _asked(paths)
    if not _has_stopped(rc, asked, _first_trouble_at(paths)):
        return None
    signal_name, order = (asked.get("signal"), asked.get("order")) if asked else (None, None)
    # Equal steps: whether it has saved is the program's to know.
    outcome = Outcome(STOPPED, 0, 0, signal=signal_name, order=order, written_at=now())
    return _on_record(paths, outcome)


def _on_record(paths: AttemptLayout, outcome: Outcome) -> Outcome:
    with best_effort("the outcome is not on record"):
        write_outcome(paths, outcome)
    return outcome


def _has_stopped(rc: int, asked: Optional[dict[str, Any]], trouble_at: Optional[float]) -> bool:
    """The ranks left on request. After a failure the launcher TERMs the others, and the agents all
    that hang, which reads like a request; then an error or their finding is older than it, or a
    rank that was killed shows in the code."""
    if trouble_at is not None and (asked is None or float(asked["at"]) > trouble_at):
        return False
    by_term = asked is None or asked.get("signal") == signal.SIGTERM.name
    return rc == RANK_STOPPED if by_term else True


def _asked(paths: AttemptLayout) -> Optional[dict[str, Any]]:
    """None when the request reached other ranks than rank 0 only."""
    return next((event for event in read_events(paths) if event["kind"] == ASKED), None)


def _first_trouble_at(paths: AttemptLayout) -> Optional[float]:
    found = _ended_by_agents_at(paths)
    for path in paths.ranks.glob("rank-*.json"):
        try:
            found.append(float(read_json(path)["at"]))
        except FormatError:
            continue
    return min(found, default=None)


def _ended_by_agents_at(paths: AttemptLayout) -> list[float]:
    """When the agents found what they ended the ranks for; those they ask to leave do so."""
    try:
        findings = read_json(paths.agents_json).get("findings", [])
    except (FileNotFoundError, FormatError):
        return []
    return [float(one["at"]) for one in findings if one["acted"] and one["kind"] in ENDS]
