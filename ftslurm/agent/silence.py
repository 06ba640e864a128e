"""Whose fault it is that a member is silent: its own, its node's, or the leader's. Pure.

Nobody is lost by one witness. A leader that loses most members of the job at once takes itself for
cut off and ends nothing, unless Slurm itself does not reach them: then the others give the run its
next job (quorum.py, which counts the same majority from the other side). What both sides hear and
are told by Slurm is not of one moment, so that the two can still contradict each other; the run is
then held together by its claims, not by this.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

SILENCE_S = 5.0
"""Without a word for so long, a member is looked at."""
ALONE_S = 10.0
"""More in a job of two nodes, where nobody else can be asked: a machine under load is slow too."""
BEHIND_S = 5.0
"""More for one that reports through an inner member: that one's death has to show first."""
MUTE_S = 30.0
"""A member that has not reported for so long is not watched, though its agent answers others."""

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
    for_s: float = 0.0


@dataclass(frozen=True)
class Judgement:
    cut_off: bool = False
    """It is the leader itself that is cut off."""
    lost: Sequence[str] = ()
    gone: Sequence[str] = ()
    why: str = ""


def is_most(count: int, members: int) -> bool:
    """Whether so many that are silent at once put the leader in doubt, not themselves."""
    return members > 1 and 2 * count > members


def judge(
    leader: str,
    members: int,
    heard: Sequence[str],
    silent: Sequence[Silence],
    *,
    controller: Optional[bool],
    down: Collection[str] = (),
) -> Judgement:
    """`members`: how many the job has, the leader left out; those given up before are neither in
    `heard` nor in `silent`. `controller`: whether slurmctld answers the leader; None: it is not
    known. `down`: those that slurmctld, answering, says it does not reach."""
    if not silent:
        return Judgement()
    if is_most(len(silent), members):
        fallen = [one.node for one in silent if one.node in down]
        if fallen:
            return Judgement(lost=fallen)
        why = f"{len(silent)} of {members} members are silent at once"
        return Judgement(cut_off=True, why=f"{why}: it is this leader that is cut off")
    lost: list[str] = []
    gone: list[str] = []
    for one in silent:
        seen = set(one.sightings.values())
        if REFUSES in seen:
            gone.append(one.node)
        elif ANSWERS in seen:
            if one.for_s > MUTE_S:
                gone.append(one.node)
        elif leader in one.sightings and len(one.sightings) > 1:
            lost.append(one.node)
        elif leader in one.sightings and not heard:
            # Nobody is left to ask but Slurm: who does not reach it either is cut off itself.
            if controller is False:
                return Judgement(cut_off=True, why="slurmctld does not answer this leader either")
            if controller:
                lost.append(one.node)
    return Judgement(lost=lost, gone=gone)
