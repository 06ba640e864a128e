"""Are the nodes to be tried (preflight) before the next attempt?

A preflight costs as much as a start of the ranks, so it is asked for where it can tell something:
where an attempt ended of a kind of cause that a bad node is behind, and none was found out; where
two in a row ended and nobody could say of what; and where a node was given up and others came in
its place from outside the job. Spares of the same job replace a node that is known to be bad at
once. A run that pays for standbys to be back in seconds has none for an end that is not explained.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ftslurm.diagnosis.causes import GPU, HANG, NETWORK_TRANSIENT, NODE, NUMERIC, STRAGGLER, UNKNOWN
from ftslurm.errors import FormatError
from ftslurm.files import read_json
from ftslurm.recovery.actions import RESTART
from ftslurm.recovery.policy import CAUSE_FAILED
from ftslurm.run.attempts import Attempt, claimed_numbers, read_attempt, read_decision
from ftslurm.run.layout import RunLayout

ALWAYS, NEVER = "always", "never"

MOST_NAMED = 2
"""Attempts in a row that may end at their preflight: then ranks show themselves who is bad."""

_MAY_BE_A_NODE = frozenset({GPU, NODE, STRAGGLER, HANG, NUMERIC, NETWORK_TRANSIENT})


def ask_for_preflight(
    layout: RunLayout,
    attempt: Attempt,
    last: Mapping[str, Any],
    *,
    mode: str,
    standby: bool,
) -> str:
    """Why one is to be run, empty: none. `last`: decision after the attempt before this one."""
    before = [number for number in claimed_numbers(layout) if number < attempt.number]
    strangers: list[str] = []
    with contextlib.suppress(FileNotFoundError, FormatError):
        newest = read_attempt(layout, before[-1]) if before else attempt
        known = {*newest.nodes, *newest.spares, *newest.excluded}
        strangers = [node for node in attempt.nodes if node not in known]
    ended_there = itertools.takewhile(lambda number: _named(layout, number), reversed(before))
    return why_preflight(
        mode,
        last,
        older=read_decision(layout.attempt(before[-2])) if len(before) > 1 else {},
        standby=standby,
        strangers=strangers,
        named_in_a_row=len(list(ended_there)),
    )


def _named(layout: RunLayout, number: int) -> bool:
    try:
        return bool(read_json(layout.attempt(number).preflight_json).get("bad"))
    except (FileNotFoundError, FormatError):
        return False


def why_preflight(
    mode: str,
    last: Mapping[str, Any],
    *,
    older: Mapping[str, Any],
    standby: bool,
    strangers: Sequence[str],
    named_in_a_row: int,
) -> str:
    """Pure. `mode`: health.preflight; `last`: decision after the newest attempt, `older`: after the
    one before; `standby`: recovery.standby; `strangers`: nodes to run on that the job of the newest
    did not have; `named_in_a_row`: newest attempts that ended at their preflight."""
    if mode == NEVER or named_in_a_row >= MOST_NAMED:
        return ""
    if mode == ALWAYS:
        return "health.preflight is always"
    given_up = last.get("exclude") or ()
    if given_up:
        known = f"{', '.join(given_up)} was given up"
        return f"{known}, and {', '.join(strangers)} came in its place" if strangers else ""
    if last.get("cause") in _MAY_BE_A_NODE:
        return f"the last attempt ended of {last['cause']}, and no node was found out"
    if not standby and _is_unexplained(last) and _is_unexplained(older):
        return "nobody could say what ended the last two attempts"
    return ""


def _is_unexplained(decision: Mapping[str, Any]) -> bool:
    cause = decision.get("cause")
    return cause == UNKNOWN or (cause == CAUSE_FAILED and decision.get("action") == RESTART)
