"""What a member does when the leader is silent: wait, leave it to another, or act. Pure.

With --no-kill, Slurm kills every step when the batch node is lost and lets the job idle to its
limit (seen on 22.05 to 26.05). So the survivors requeue it, but only when a majority of the members
agrees, or Slurm itself does not reach the batch node, and slurmctld answers: those who are cut off
themselves do not act. The majority is counted as in silence.py, so that of two sides that see the
same cut one takes itself for the living one; in a job of two nodes there is only slurmctld to ask,
which may answer both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

WAIT = "wait"
"""Look again: the leader lives, or the time has not come."""
CUT_OFF = "cut_off"
"""It is not proved that it is not we who are cut off."""
YIELD = "yield"
"""Another one does it."""
REQUEUE = "requeue"


@dataclass(frozen=True)
class Verdict:
    action: str
    why: str
    actor: Optional[str] = None
    """Who requeues."""


def decide(
    me: str,
    nodes: Sequence[str],
    votes: Mapping[str, bool],
    *,
    controller: Optional[bool] = None,
    node_is_down: Optional[bool] = None,
    has_heard: bool = True,
) -> Verdict:
    """`nodes`: of the job, the leader's first. `votes`: the members that answer us, and whether
    they hear the leader. `controller`: slurmctld answers us. `node_is_down`: what Slurm itself says
    of the batch node. Both need asking only by the lowest-named one. `has_heard`: we have ever
    heard the leader; that nothing comes from it may be a firewall else, and is no proof.
    """
    leader, members = nodes[0], nodes[1:]
    hearing = [node for node, hears in votes.items() if hears]
    if hearing:
        return Verdict(WAIT, f"{min(hearing)} hears the leader, so {leader} lives")
    agreeing = sorted({me, *votes})
    actor = agreeing[0]
    if actor != me:
        return Verdict(YIELD, f"{leader} is silent to {actor} too, and it falls to {actor}", actor)
    if not controller:
        return Verdict(CUT_OFF, "slurmctld does not answer either: it may be us who are cut off")
    if not has_heard and not node_is_down:
        why = f"{leader} was never heard on {me}, and Slurm does not say that it is lost: see that"
        return Verdict(CUT_OFF, f"{why} no firewall closes the ports above 1023 between the nodes")
    few = f"only {len(agreeing)} of {len(members)} members agree that {leader} is lost"
    if 2 * len(agreeing) <= len(members) and not node_is_down:
        return Verdict(CUT_OFF, few)
    why = f"{leader}, the batch node, is lost: {len(agreeing)} of {len(members)} members agree"
    return Verdict(REQUEUE, f"{why}, and slurmctld answers", me)
