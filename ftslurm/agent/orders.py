"""Orders to members and what they answer: each has a number and a deadline.

An order to nobody is answered at once. What comes after the deadline is left out. Who connects anew
is given again what it owes an answer to: the order may have been lost with its connection, and a
member obeys each number once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Optional

from ftslurm.agent.loop import Loop
from ftslurm.agent.wire import Message

Replies = dict[str, dict[str, Any]]
"""Node -> its answer; who has not answered in time is missing."""


@dataclass
class _Waiting:
    order: Message
    nodes: set[str]
    then: Callable[[Replies], None]
    replies: Replies = field(default_factory=dict)


class Orders:
    """`send` carries an order to all members; the leader's own node obeys through `obey`."""

    def __init__(
        self,
        loop: Loop,
        me: str,
        *,
        send: Callable[[Message], None],
        obey: Callable[[Message], dict[str, Any]],
    ) -> None:
        self._loop, self._me, self._send, self._obey = loop, me, send, obey
        self._count = 0
        self._waiting: dict[int, _Waiting] = {}

    def give(
        self,
        do: str,
        nodes: Optional[Iterable[str]] = None,
        *,
        within_s: float = 0.0,
        then: Optional[Callable[[Replies], None]] = None,
        **facts: Any,
    ) -> None:
        """Give an order to `nodes`, all without. `then` gets the answers of `nodes`, when the last
        has come or `within_s` has passed."""
        self._count += 1
        number = self._count
        to = None if nodes is None else sorted(nodes)
        order = {"t": "order", "id": number, "do": do, "to": to, **facts}
        wanted = set(to or ())
        if then is not None:
            waiting = self._waiting[number] = _Waiting(order, wanted, then)
            if not waiting.nodes:
                self._settle(number)
                return
            self._loop.later(within_s, lambda: self._settle(number))
        if to is None or set(to) - {self._me}:
            self._send(order)
        if to is None or self._me in to:
            self._loop.in_thread(
                lambda: self._obey(order),
                lambda result: self.answered(number, self._me, result),
                otherwise={},
            )

    def answered(self, number: int, node: str, result: dict[str, Any]) -> None:
        waiting = self._waiting.get(number)
        if waiting is None or node not in waiting.nodes:
            return
        waiting.replies[node] = result
        if set(waiting.replies) == waiting.nodes:
            self._settle(number)

    def joined(self, node: str) -> None:
        for waiting in self._waiting.values():
            if node in waiting.nodes and node not in waiting.replies:
                self._send({**waiting.order, "to": [node]})

    def left(self, node: str) -> None:
        """Nothing is expected of this node any more."""
        for number, waiting in list(self._waiting.items()):
            waiting.nodes.discard(node)
            if set(waiting.replies) >= waiting.nodes:
                self._settle(number)

    def _settle(self, number: int) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            waiting.then(waiting.replies)
