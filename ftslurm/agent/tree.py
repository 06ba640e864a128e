"""Who reports to whom: everybody to the leader, or through inner members in a large job. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

FLAT_UP_TO = 64
"""Nodes of a job in which all members report to the leader themselves."""


def parents(nodes: Sequence[str]) -> dict[str, str]:
    """Node -> the inner member that it reports to; who is not in it reports to the leader,
    `nodes[0]`, itself, as do the children of an inner member that is dead. Nobody in a small job.

    There are about as many inner members as each of them has children, so that nobody has more than
    some square root of the job to listen to.
    """
    if len(nodes) <= FLAT_UP_TO:
        return {}
    stride, members = _stride(nodes), nodes[1:]
    return {
        node: members[place - place % stride]
        for place, node in enumerate(members)
        if place % stride
    }


def _stride(nodes: Sequence[str]) -> int:
    """An inner member and its children, together."""
    return math.ceil(math.sqrt(len(nodes) - 1)) if len(nodes) > 1 else 1
