"""An agent that follows: reports on its node every second, and carries out the leader's orders.

It reports to the leader, or through an inner member that it is sent to; when that one is silent it
goes back to the leader. It reads the shared folder once, when it begins, and never writes there,
except when the leader is lost and it is its part to requeue the job (succession.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Optional

from ftslurm.agent.branch import AWAY_S, SILENT_S, SUSPECT_S, Branch
from ftslurm.agent.duty import Duty, Watch
from ftslurm.agent.loop import Link, Loop, tell
from ftslurm.agent.report import NodeReport, to_row
from ftslurm.agent.wire import Message

LOOK_S = 0.5
REPORT_S = 1.0
PARENT_SILENT_S = 3.0
"""Less than the leader gives a node behind an inner member (silence.SILENCE_S + BEHIND_S)."""
PART_S = 0.5
"""An agent that leaves at the leader's order has passed it on by then."""

Place = tuple[str, str, int]
"""Node, host, port of an agent."""


class Member:
    """`lost` is called every second while the leader has not been heard for SUSPECT_S."""

    def __init__(
        self,
        loop: Loop,
        duty: Duty,
        leader: Place,
        host: str,
        *,
        listen_on: str,
        lost: Callable[[float], None],
    ) -> None:
        self.me = duty.node
        self.peers: dict[str, list[Any]] = {}
        """Node -> host and port of its agent."""
        self.attempt = 0
        self.heard_at = time.monotonic()
        """The leader's newest word, first or second hand."""
        self.has_heard = False
        """A word of the leader's has ever come."""
        self._loop, self._duty, self._leader, self._host = loop, duty, leader, host
        self._lost = lost
        self._branch = Branch(
            loop, self.me, hears=self._hears, standing=self._standing, passed=self._pass
        )
        self._port = loop.listen(listen_on, lambda: self._branch)
        self._up: Optional[Link] = None
        self._next: Optional[Link] = None
        """Connected, not welcomed yet."""
        self._is_connecting = False
        self._parent_at = self._ticked_at = time.monotonic()
        self._watch = Watch(duty)
        self._obeyed: set[int] = set()
        """Orders, by number."""

    def begin(self) -> None:
        self._loop.every(LOOK_S, self._look)
        self._loop.every(REPORT_S, self._tick)
        self._connect(self._leader)

    def received(self, link: Link, message: Message) -> None:
        if link is self._up:
            self._parent_at = time.monotonic()
        kind = message.get("t")
        if kind == "welcome":
            self._welcomed(link, message)
        elif kind == "beat":
            link.send({"t": "pong", "id": message["id"], "at": time.time()})
            heard_at = time.monotonic() - message["leader_age_s"]
            self.heard_at = max(self.heard_at, heard_at)
        elif kind == "move" and link is self._up and self._next is None:
            node, host, port = message["parent"]
            self._connect((node, host, int(port)))
        elif kind == "peers":
            self.peers.update(message["peers"])
            self._branch.send_down(message)
        elif kind == "order":
            self._branch.pass_order(message)
            is_ours = message["to"] is None or self.me in message["to"]
            if is_ours and message["id"] not in self._obeyed:
                self._obeyed.add(message["id"])
                self._obey(message)

    def closed(self, link: Link, why: str) -> None:
        if link is self._next:
            self._next = None
        if link is self._up:
            self._up = None
            self._connect(self._leader)

    def _welcomed(self, link: Link, message: Message) -> None:
        is_leader = message["by"] == self._leader[0]
        if is_leader:
            self.heard_at, self.has_heard = time.monotonic(), True
        self._follow(message)
        parent = message.get("parent")
        if is_leader and parent:
            # Reported to the leader until the other one has taken us in.
            self._up, self._next = link, None
            self._parent_at = time.monotonic()
            self._connect((parent[0], parent[1], int(parent[2])))
            return
        old, self._up, self._next = self._up, link, None
        self._parent_at = time.monotonic()
        if old is not None and old is not link:
            old.send({"t": "moved"})
            old.close("reports go another way")
        self._report()

    def _follow(self, message: Message) -> None:
        self.attempt = int(message.get("attempt") or 0)
        self._watch.begin(self.attempt)
        self.peers.update(message.get("peers") or {})

    def _connect(self, place: Place) -> None:
        if self._is_connecting or self._next is not None:
            return
        self._is_connecting = True

        def then(link: Optional[Link], why: str) -> None:
            self._is_connecting = False
            # One that has closed by now has told us so before it was known here.
            self._next = None if link is None or link.is_closed else link
            if link is not None:
                link.send({"t": "hello", "node": self.me, "host": self._host, "port": self._port})

        self._loop.connect(place[1], place[2], self, then)

    def _look(self) -> None:
        for exited in self._watch.look():
            self._event("rank_exit", **exited)

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._ticked_at > AWAY_S:
            self.heard_at = self._parent_at = now
        self._ticked_at = now
        self._branch.beat(now - self.heard_at)
        if self._up is not None:
            self._look()  # the newest look may be LOOK_S old, and ages are told as of now
            self._report()
            if now - self._parent_at > PARENT_SILENT_S:
                up, self._up = self._up, None
                up.close("it is silent")
                self._connect(self._leader)
        else:
            self._connect(self._leader)
        if now - self.heard_at > SUSPECT_S:
            self._lost(now - self.heard_at)

    def _hears(self) -> bool:
        return time.monotonic() - self.heard_at < SILENT_S

    def _standing(self) -> Message:
        return {"attempt": self.attempt, "peers": self.peers}

    def _report(self) -> None:
        now = time.monotonic()
        rows = [to_row(view) for view in self._watch.views]
        own = NodeReport(now, 0.0, self.attempt, rows)
        nodes = {
            name: report.to_wire(now)
            for name, report in self._branch.below.items()
            if self._branch.via[name] in self._branch.children
        }
        self._send_up({"t": "report", "nodes": {**nodes, self.me: own.to_wire(now)}})

    def _pass(self, message: Message) -> None:
        self._send_up(message)

    def _send_up(self, message: Message) -> None:
        if self._up is not None:
            self._up.send(message)

    def _event(self, kind: str, **facts: Any) -> None:
        said = {"kind": kind, "node": self.me, "sent_at": time.time(), **facts}
        self._send_up({"t": "event", **said})

    def _obey(self, order: Message) -> None:
        what = order["do"]
        if what == "part":
            self._loop.later(PART_S, self._loop.stop)
            return
        if what == "begin":
            self.attempt = int(order["attempt"])
            self._watch.begin(self.attempt)

        def done(result: dict[str, Any]) -> None:
            self._send_up({"t": "reply", "id": order["id"], "node": self.me, **result})

        self._loop.in_thread(lambda: carry_out_or_tell(self._duty, order), done)


def carry_out_or_tell(duty: Duty, order: Message) -> dict[str, Any]:
    """An order that cannot be carried out costs its answer, not the agent."""
    try:
        return duty.carry_out(order)
    except Exception as error:  # noqa: BLE001 - any tool may fail on a sick node; the leader is told
        tell(f"{order['do']} failed on {duty.node}: {type(error).__name__}: {error}")
        return {"failed": f"{type(error).__name__}: {error}"}
