"""The members that report to one agent: their reports, clocks and words, and orders down to them.

The leader has one and so has every inner member, which passes on what it does not carry out itself.
Anybody with the job's key may ask it whether it hears the leader.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Optional

from ftslurm.agent.loop import Link, Loop
from ftslurm.agent.report import ClockOffset, NodeReport
from ftslurm.agent.wire import Message

SILENT_S = 5.0
"""The leader counts as heard when its last word is no older."""
SUSPECT_S = 2.5
"""Not heard for so long, an agent is looked at: what is seen is there when it counts as silent."""
AWAY_S = 3.0
"""An agent that comes to its next second's work so late was itself stopped (`scontrol suspend`) or
starved: the silence of others in that time is its own."""


@dataclass
class Child:
    """A member that reports here."""

    link: Link
    host: str
    port: int
    clock: ClockOffset = field(default_factory=ClockOffset)
    pings: dict[int, float] = field(default_factory=dict)
    """Number of a beat that is not answered yet -> UTC seconds at which it was sent."""


class Branch:
    """`passed` gets what children send upwards; `greeted` a new child, after which it is welcomed
    with what `standing` gives; `left` one whose connection has ended; `asked` a question."""

    def __init__(
        self,
        loop: Loop,
        me: str,
        *,
        hears: Callable[[], bool],
        standing: Callable[[], Message],
        passed: Callable[[Message], None],
        greeted: Callable[[str, Child], Message] = lambda node, child: {},
        left: Callable[[str, str], None] = lambda node, why: None,
        asked: Optional[Callable[[Link, Message], None]] = None,
    ) -> None:
        self.children: dict[str, Child] = {}
        self.below: dict[str, NodeReport] = {}
        """Newest report on each node below."""
        self.via: dict[str, str] = {}
        """Node below -> the child that has reported on it."""
        self._loop, self._me = loop, me
        self._hears, self._standing, self._passed = hears, standing, passed
        self._greeted, self._left, self._asked = greeted, left, asked
        self._beats = 0

    def received(self, link: Link, message: Message) -> None:
        kind = message.get("t")
        if kind == "hello":
            self._welcome(link, message)
        elif kind == "probe":
            link.send({"t": "probed", "node": self._me, "hears": self._hears()})
        elif kind == "ask" and self._asked is not None:
            self._asked(link, message)
        elif link.node in self.children and self.children[link.node].link is link:
            self._from_child(link.node, self.children[link.node], message)
        else:
            link.close("it has not said who it is")

    def closed(self, link: Link, why: str) -> None:
        child = self.children.get(link.node or "")
        if child is not None and child.link is link and link.node is not None:
            del self.children[link.node]
            self._left(link.node, why)

    def send_down(self, message: Message) -> None:
        for child in list(self.children.values()):
            child.link.send(message)

    def pass_order(self, order: Message) -> None:
        """To the children that it is for or that lead to whom it is for; to all when it is for all,
        or for one whose way is not known."""
        ways = {self._way(node) for node in order["to"] or ()}
        if order["to"] is None or None in ways:
            self.send_down(order)
            return
        for way in ways - {self._me}:
            self.children[str(way)].link.send(order)

    def _way(self, node: str) -> Optional[str]:
        if node == self._me or node in self.children:
            return node
        way = self.via.get(node)
        return way if way in self.children else None

    def beat(self, leader_age_s: float) -> None:
        """Say that we live, and how old the leader's last word is; the answer shows the clock."""
        self._beats += 1
        message = {"t": "beat", "id": self._beats, "leader_age_s": round(leader_age_s, 3)}
        for child in list(self.children.values()):
            child.pings[self._beats] = time.time()
            child.pings.pop(self._beats - 10, None)
            child.link.send(message)

    def _welcome(self, link: Link, message: Message) -> None:
        node = str(message["node"])
        before = self.children.get(node)
        link.node = node
        child = Child(link, str(message["host"]), int(message["port"]))
        self.children[node] = child
        if before is not None and before.link is not link:
            before.link.close("its agent has connected again")
        more = self._greeted(node, child)
        link.send({"t": "welcome", "by": self._me, **self._standing(), **more})

    def _from_child(self, node: str, child: Child, message: Message) -> None:
        now = time.monotonic()
        kind = message.get("t")
        if kind == "report":
            for name, row in message["nodes"].items():
                self.below[name] = NodeReport.from_wire(row, now, child.clock.offset_s)
                self.via[name] = node
        elif kind == "pong":
            sent_at = child.pings.pop(message["id"], None)
            if sent_at is not None:
                child.clock.add(sent_at=sent_at, answered_at=message["at"], received_at=time.time())
        elif kind == "moved":
            self.children.pop(node, None)
        else:
            self._passed(message)
