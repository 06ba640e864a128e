"""Whether a drain of ours stays, when many nodes drain at once. Pure.

Many at once are the fault of a driver, a tool or a rule rather than of the nodes (NVSentinel#1642),
so no more than a few may stay. Every node puts all drains into the order of slurmctld's clock, then
of names, and goes through them as each of those nodes does: whoever finds its place taken takes its
drain back. Those that stay never look at what comes after them, so it does not matter which of the
others have taken theirs back already: every node finds the same ones staying.

That holds for a node that looks when slurmctld's clock is past the second of its own drain: no
later drain comes before it then.

The window alone would fill up anew every ten minutes, and a rule that is wrong take one node after
another for days. So there is a bound on all that stand, however old, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ftslurm.health.node_state import Drain
from ftslurm.health.settings import HealthSettings
from ftslurm.health.xid_table import BY_XID

STANDING = 3
"""So many times what one window may hold may stand at once: three bad events' worth, 15 % of a
large cluster. A node that waits for its repair stops counting once a person gives it a reason of
his own."""


@dataclass(frozen=True)
class Decision:
    keeps: bool
    sentence: str = ""
    """Why it does not."""


def decide(drains: Sequence[Drain], me: str, gpu_nodes: int, settings: HealthSettings) -> Decision:
    """`drains`: all of ours that stand, mine among them; one that is not listed stays as it is."""
    limit = _limit(gpu_nodes, settings)
    kept: list[Drain] = []
    for drain in sorted(drains, key=lambda one: (one.at, one.node)):
        near = [one for one in kept if drain.at - one.at < settings.breaker_window_s]
        alike = sum(one.code == drain.code for one in near)
        minutes = settings.breaker_window_s / 60
        if len(kept) >= STANDING * limit:
            refused = (
                f"{len(kept)} nodes are drained by us already, and no more than {STANDING * limit} "
                f"of {gpu_nodes} GPU nodes may be at once"
            )
        elif len(near) >= limit:
            refused = (
                f"{len(near)} nodes were drained within {minutes:g} minutes, and no more than "
                f"{limit} of {gpu_nodes} GPU nodes may be"
            )
        elif not is_hardware_xid(drain.code) and alike >= settings.breaker_same - 1:
            refused = (
                f"{alike + 1} nodes show {drain.code} within {minutes:g} minutes, and no Xid of "
                "the hardware: more likely the driver, a tool or a rule than the nodes"
            )
        else:
            kept.append(drain)
            continue
        if drain.node == me:
            return Decision(False, refused)
    return Decision(True)


def is_hardware_xid(code: str) -> bool:
    """An Xid or SXid that no program causes."""
    name, _, number = code.partition("XID")
    if name not in ("", "S") or not number.isdigit():
        return False
    row = BY_XID.get(int(number)) if name == "" else None
    return row is None or not row.of_user


def _limit(gpu_nodes: int, settings: HealthSettings) -> int:
    # A share such as 0.29 of 100 is 28.999... in binary.
    share = math.floor(settings.breaker_share * gpu_nodes + 1e-9)
    return max(settings.breaker_nodes, share)
