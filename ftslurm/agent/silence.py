"""Whose fault it is that a member is silent: its own, its node's, or the leader's. Pure.

Nobody is lost by one witness. A leader that loses most of its members at once takes itself for cut
off: then the others requeue the job (quorum.py, which counts the same majority from the other side)
and this one ends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

SILENCE_S = 5.0
"""Without a word for so long, a member is looked at."""
ALONE_S = 10.0
"""More in a job of two nodes, where nobody else can be asked: a machine under load is slow too."""
BEHIND_S = 5.0
"""More for one that reports through an inner member: that one's death has to show first."""

# What a second observer has seen of a node.
ANSWERS = "answers"
REFUSES = "refuses"
"""The node is there; nobody listens on the agent's port."""
NOTHING = "nothing"


@dataclass(frozen=True)
class Silence:
    """A member that is not heard, and what others say of it."""

    node: str
    sightings: Mapping[str, str] = field(default_factory=dict)
    """Observer -> ANSWERS | REFUSES | NOTHING; the leader's own look under its own name."""


@dataclass(frozen=True)
class Judgement:
    cut_off: bool = False
    """It is the leader itself that is cut off."""
    lost: Sequence[str] = ()
    gone: Sequence[str] = ()
    why: str = ""


def judge(
    leader: str,
    heard: Sequence[str],
    silent: Sequence[Silence],
    *,
    controller: Optional[bool],
) -> Judgement:
    """`heard`: members that are heard; those given up before are in neither list. `controller`:
    whether slurmctld answers the leader; None: not asked yet."""
    members = len(heard) + len(silent)
    if not silent:
        return Judgement()
    if members > 1 and 2 * len(silent) > members:
        why = f"{len(silent)} of {members} members are silent at once"
        return Judgement(cut_off=True, why=f"{why}: it is this leader that is cut off")
    lost: list[str] = []
    gone: list[str] = []
    for one in silent:
        seen = set(one.sightings.values())
        if REFUSES in seen:
            gone.append(one.node)
        elif ANSWERS in seen:
            continue
        elif leader in one.sightings and len(one.sightings) > 1:
            lost.append(one.node)
        elif leader in one.sightings and not heard:
            # Nobody is left to ask but Slurm: who does not reach it either is cut off itself.
            if controller is False:
                return Judgement(cut_off=True, why="slurmctld does not answer this leader either")
            if controller:
                lost.append(one.node)
    return Judgement(lost=lost, gone=gone)
