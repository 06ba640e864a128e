"""The questions of the batch script (ask.py), answered by the leader.

nodes, begin, clear, end, ended: see each answer below. A question that is not understood is
answered with `error`; none is left without an answer.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ftslurm.agent.keeping import BRIEF_S
from ftslurm.agent.loop import Link
from ftslurm.agent.orders import Replies
from ftslurm.agent.wire import Message
from ftslurm.errors import RANK_STOPPED

if TYPE_CHECKING:
    from ftslurm.agent.leader import Leader

CLEAR_S = 17.0
"""A process that takes its time to go, and then its memory."""
AS_ASKED = (0, RANK_STOPPED, 128 + signal.SIGTERM)
"""Exit codes of the ranks' launcher behind which no fault of a node is looked for."""

_Answer = Callable[[dict[str, Any]], None]


def answer(leader: Leader, link: Link, message: Message) -> None:
    def say(facts: dict[str, Any]) -> None:
        link.send({"t": "answer", **facts})

    verb = _VERBS.get(str(message.get("ask")))
    if verb is None:
        say({"error": f"`{message.get('ask')}` is none of {', '.join(_VERBS)}"})
        return
    try:
        verb(leader, message, say)
    except (KeyError, TypeError, ValueError) as error:
        say({"error": f"`{message['ask']}` lacks or mistakes something: {error!r}"})


def _nodes(leader: Leader, message: Message, say: _Answer) -> None:
    """Where each node stands, how long ago it was heard, and what kind of node it is."""
    now = time.monotonic()
    nodes = {}
    for seat in leader.roll.seats.values():
        seen_s = 0.0 if seat.name == leader.me else now - seat.seen_at if seat.seen_at else None
        kind = leader.roll.kinds.get(seat.name)
        nodes[seat.name] = {"state": seat.state, "seen_s": seen_s, "kind": kind}
    say({"nodes": nodes})


def _begin(leader: Leader, message: Message, say: _Answer) -> None:
    """An attempt's ranks are about to be started on these nodes."""
    nodes = [str(node) for node in message["nodes"]]
    leader.begin_attempt(int(message["attempt"]), nodes, int(message["tasks_per_node"]))
    say({"begun": True})


def _clear(leader: Leader, message: Message, say: _Answer) -> None:
    """Leftovers of an attempt and of older ones are ended; what could not be, which GPUs' memory
    has not come back, and on which nodes their GPUs are not shown to agents."""
    live = leader.roll.live
    lost = [name for name, seat in leader.roll.seats.items() if seat.state == "lost"]

    def then(replies: Replies) -> None:
        leftover = {node: reply["left"] for node, reply in replies.items() if reply.get("left")}
        held = {node: reply["held"] for node, reply in replies.items() if reply.get("held")}
        leader.note_left_behind(leftover, held)
        mute = [node for node in live if "left" not in replies.get(node, {})]
        say(
            {
                "clear": not (leftover or held or mute),
                "leftover": leftover,
                "held": held,
                "unseen": sorted(node for node, reply in replies.items() if reply.get("unseen")),
                "lost": sorted({*lost, *mute}),
            }
        )

    attempt = int(message["attempt"])
    leader.orders.give("clear", live, within_s=CLEAR_S, then=then, attempt=attempt)


def _end(leader: Leader, message: Message, say: _Answer) -> None:
    """The ranks of an attempt are ended, on all nodes that are heard."""
    attempt, why = int(message["attempt"]), str(message.get("why", "it was asked for"))
    leader.end_ranks(attempt, why, lambda: say({"ended": True}))


def _ended(leader: Leader, message: Message, say: _Answer) -> None:
    """Nothing more is found in this attempt; what is known of it is durable."""
    trial = leader.trial
    if trial is None or trial.number != int(message["attempt"]):
        say({"durable": False})
        return
    trial.is_ending = True

    def durable() -> None:
        say({"durable": True})
        leader.forget(trial)

    def flush() -> None:
        leader.write_status()
        leader.ledger.flush(trial.paths, lambda: leader.loop.from_thread(durable))

    if trial.is_collected or int(message.get("rc", 0)) in AS_ASKED:
        flush()
        return
    # An Xid or the kernel's own out-of-memory line behind an ordinary crash of a rank.
    nodes = [node for node in leader.roll.live if node in trial.nodes]
    leader.keeping.nodes(trial, nodes, BRIEF_S, flush)


_VERBS = {
    "nodes": _nodes,
    "begin": _begin,
    "clear": _clear,
    "end": _end,
    "ended": _ended,
}
