"""What the leader tells its members of each other: whom they report to, and where all are found.

Members know each other's places for the day on which the leader is lost (succession.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Optional

from ftslurm.agent.branch import Branch
from ftslurm.agent.roll import Roll
from ftslurm.agent.tree import parents
from ftslurm.agent.wire import Message

LOOK_S = 5.0


class Ways:
    """Of one job's agents; `branch` and `roll` are the leader's."""

    def __init__(
        self,
        nodes: list[str],
        branch: Branch,
        roll: Roll,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._branch, self._roll, self._clock = branch, roll, clock
        self._parents = parents(nodes)
        self._peers: dict[str, list[Any]] = {}
        """Node -> host and port of its agent, as the members know it."""
        self._looked_at = 0.0

    def of(self, node: str) -> Message:
        """For a member that has just come."""
        return {"parent": self._parent(node), "peers": self._peers}

    def look(self) -> None:
        """Once a second; not each time is anything done."""
        now = self._clock()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._tell_peers()
            self._move_members()

    def _parent(self, node: str) -> Optional[list[Any]]:
        """The inner member that this one is to report to, where there is one and it is heard."""
        parent = self._parents.get(node)
        inner = self._branch.children.get(parent or "")
        if parent is None or inner is None or self._roll.is_suspect(parent):
            return None
        self._roll.moved(node)
        return [parent, inner.host, inner.port]

    def _move_members(self) -> None:
        """Those that came before their inner member, or back while it was away."""
        for node, child in list(self._branch.children.items()):
            parent = self._parent(node)
            if parent is not None:
                child.link.send({"t": "move", "parent": parent})

    def _tell_peers(self) -> None:
        seats = self._roll.seats.values()
        peers = {seat.name: [seat.host, seat.port] for seat in seats if seat.port}
        new = {name: place for name, place in peers.items() if self._peers.get(name) != place}
        if new:
            self._peers = peers
            self._branch.send_down({"t": "peers", "peers": new})
