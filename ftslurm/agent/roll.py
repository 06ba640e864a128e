"""The leader's list of nodes: who is heard, who is silent, and what others say of the silent ones.

Finds out, by asking; what it means is judged in silence.py. Nothing is done to a node here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from ftslurm.agent.aside import Aside
from ftslurm.agent.branch import SUSPECT_S
from ftslurm.agent.report import GONE, LIVE, LOST
from ftslurm.agent.silence import (
    ALONE_S,
    BEHIND_S,
    NOTHING,
    SILENCE_S,
    Judgement,
    Silence,
    is_most,
    judge,
)

UNKNOWN = "unknown"
"""Its agent has not said a word yet."""
HOP_S = 1.0
"""Older is what comes through an inner member, which reports once a second."""
ASK_AGAIN_S = 6.0
"""After observers were asked: their look takes up to duty.PROBE_S and its way."""
OBSERVERS = 2
ABSENT_S = 150.0
"""An agent that has not come by then has given up looking for its leader (main.LEADER_WITHIN_S), or
does not get through to it."""
AT_ONCE = 16
"""Nodes that are looked at in one second; a look holds up to three threads."""


@dataclass(eq=False)
class Seat:
    """One node."""

    name: str
    state: str = UNKNOWN
    host: str = ""
    port: int = 0
    seen_at: float = 0.0
    """time.monotonic() of its last word, by the ages in the reports."""
    is_behind: bool = False
    """It reports through an inner member."""
    has_left: bool = False
    """Its connection has ended: no need to wait until it counts as silent."""
    lost_at: Optional[float] = None
    """UTC seconds."""
    is_down: bool = False
    """Slurm does not reach it either."""
    sightings: dict[str, str] = field(default_factory=dict)
    asked_at: float = 0.0

    def is_silent(self, now: float, fair_from: float, more_s: float = 0.0) -> bool:
        """`more_s` is not given anew to one that was silent before the leader itself was away: on a
        machine that stands still every few seconds it would never be over."""
        limit_s = SILENCE_S + (BEHIND_S if self.is_behind else 0.0)
        is_due = now - self.seen_at >= limit_s + more_s and now - fair_from >= limit_s
        return self.has_left or is_due

    def is_suspect(self, now: float, fair_from: float) -> bool:
        limit_s = SUSPECT_S + (HOP_S if self.is_behind else 0.0)
        return self.has_left or now - max(self.seen_at, fair_from) >= limit_s


class Roll:
    """`ask(observers, seat)` has observers look at a seat; they answer through `sighted`.
    `controller` says whether slurmctld answers, `down` which of the nodes it does not reach."""

    def __init__(
        self,
        nodes: Sequence[str],
        me: str,
        *,
        ask: Callable[[list[str], Seat], None],
        controller: Aside[bool],
        down: Aside[frozenset[str]],
    ) -> None:
        self.seats = {name: Seat(name) for name in nodes}
        self.seats[me].state = LIVE
        self.kinds: dict[str, dict[str, Any]] = {}
        """Node -> what it has told of what it is, by likeness.Kind; kept when it is lost."""
        self._me, self._ask = me, ask
        self._controller, self._down = controller, down
        self._fair_from = 0.0
        """Silence counts from here: before, this leader itself had not looked."""
        self._absent_at: Optional[float] = time.monotonic() + ABSENT_S
        """None: those that are absent have been told of."""

    @property
    def live(self) -> list[str]:
        """Nodes whose agent runs, for all that is known: the leader's own too."""
        return [seat.name for seat in self.seats.values() if seat.state == LIVE]

    def lost(self, nodes: Iterable[str]) -> list[Seat]:
        """Those of `nodes` that are given up."""
        return [seat for seat in self._seats(nodes) if seat.state == LOST]

    def is_any_suspect(self, nodes: Iterable[str]) -> bool:
        """Whether one of `nodes` may be about to be given up: what its ranks do is not known."""
        return any(seat.state == LIVE and self.is_suspect(seat.name) for seat in self._seats(nodes))

    def unseen(self, nodes: Iterable[str]) -> int:
        """How many of `nodes` no agent reports on."""
        return sum(seat.state != LIVE for seat in self._seats(nodes))

    def absent(self) -> list[str]:
        """Once, when the time has come: nodes whose agent has never said a word."""
        if self._absent_at is None or time.monotonic() < self._absent_at:
            return []
        self._absent_at = None
        return [seat.name for seat in self.seats.values() if seat.state == UNKNOWN]

    def _seats(self, nodes: Iterable[str]) -> list[Seat]:
        return [self.seats[name] for name in nodes if name in self.seats]

    def came(self, name: str, host: str, port: int) -> bool:
        """An agent has said who it is; True when it had been given up, or is new here."""
        seat = self.seats.setdefault(name, Seat(name))
        was = seat.state
        seat.state, seat.host, seat.port = LIVE, host, port
        seat.is_behind = seat.has_left = False
        seat.lost_at, seat.sightings, seat.asked_at = None, {}, 0.0
        seat.seen_at = time.monotonic()
        return was in (LOST, GONE)

    def moved(self, name: str) -> None:
        """It is about to report through an inner member."""
        if name in self.seats:
            self.seats[name].is_behind = True

    def left(self, name: str) -> None:
        seat = self.seats.get(name)
        if seat is not None and seat.state == LIVE and not seat.is_behind:
            seat.has_left = True

    def reported(self, name: str, read_at: float, *, is_behind: bool) -> bool:
        """Note a report; True when its node had been given up."""
        seat = self.seats.get(name)
        if seat is None or read_at <= seat.seen_at:
            return False
        seat.seen_at, seat.is_behind = read_at, is_behind
        if seat.is_silent(time.monotonic(), self._fair_from):
            return False
        was, seat.state = seat.state, LIVE
        seat.sightings, seat.asked_at, seat.lost_at = {}, 0.0, None
        return was in (LOST, GONE)

    def sighted(self, name: str, observer: str, seen: str) -> None:
        seat = self.seats.get(name)
        if seat is not None:
            seat.sightings[observer] = seen

    def is_suspect(self, name: str) -> bool:
        seat = self.seats[name]
        return seat.state != LIVE or seat.is_suspect(time.monotonic(), self._fair_from)

    def was_away(self) -> None:
        """This leader was itself stopped or starved: what it has not heard was said."""
        self._fair_from = time.monotonic()

    def silent(self) -> list[str]:
        now = time.monotonic()
        others = [self.seats[name] for name in self.live if name != self._me]
        more_s = ALONE_S if len(others) == 1 else 0.0
        return [seat.name for seat in others if seat.is_silent(now, self._fair_from, more_s)]

    def look(self) -> Judgement:
        """Once a second: judge those that are silent, and have the others look at them."""
        now = time.monotonic()
        silent = self.silent()
        if silent:
            judgement = self._judge(silent, now)
        else:
            self._controller.forget()
            self._down.forget()
            judgement = Judgement(lost=self._lost_without_agent())
        self._have_suspects_seen(now)
        return judgement

    def _judge(self, silent: Sequence[str], now: float) -> Judgement:
        heard = sorted(set(self.live) - {*silent, self._me})
        members = len(self.seats) - 1
        in_doubt = is_most(len(silent), members)
        if not in_doubt:
            self._down.forget()
        if heard:
            self._controller.forget()
        down = (self._down.said(silent) if in_doubt else None) or frozenset()
        seats = [self.seats[name] for name in silent]
        judgement = judge(
            self._me,
            members,
            heard,
            [Silence(one.name, one.sightings, now - one.seen_at) for one in seats],
            controller=None if heard else self._controller.said(),
            down=down,
        )
        for name in judgement.lost:
            self._give_up(name, LOST)
            self.seats[name].is_down = name in down
        for name in judgement.gone:
            self._give_up(name, GONE)
        return judgement

    def _have_suspects_seen(self, now: float) -> None:
        others = [self.seats[name] for name in self.live if name != self._me]
        suspects = [seat for seat in others if seat.is_suspect(now, self._fair_from)]
        if is_most(len(suspects), len(self.seats) - 1):
            return  # then it is this leader that is looked at
        doubted = {seat.name for seat in suspects}
        heard = [seat.name for seat in others if seat.name not in doubted]
        # Where no agent runs any more, only these looks can tell that the node is lost too.
        suspects += [seat for seat in self.seats.values() if seat.state == GONE]
        due = [seat for seat in suspects if now - seat.asked_at >= ASK_AGAIN_S]
        for seat in due[:AT_ONCE]:
            self._inquire(seat, heard, now)

    def _lost_without_agent(self) -> list[str]:
        """Nodes whose agent had ended before, and that nobody reaches now."""
        lost = []
        for seat in self.seats.values():
            looks = set(seat.sightings.values())
            if seat.state == GONE and looks == {NOTHING} and len(seat.sightings) > 1:
                self._give_up(seat.name, LOST)
                lost.append(seat.name)
        return lost

    def to_record(self, offsets: dict[str, Optional[float]], at: float) -> dict[str, Any]:
        """`nodes` of agents.json."""
        now = time.monotonic()
        nodes: dict[str, Any] = {}
        for seat in self.seats.values():
            age_s = 0.0 if seat.name == self._me else now - seat.seen_at
            nodes[seat.name] = {
                "state": seat.state,
                "seen_at": None if seat.state == UNKNOWN else round(at - age_s, 3),
                "offset_s": offsets.get(seat.name),
                **({"lost_at": seat.lost_at} if seat.lost_at is not None else {}),
            }
        return nodes

    def _give_up(self, name: str, state: str) -> None:
        self.seats[name].state, self.seats[name].lost_at = state, time.time()

    def _inquire(self, seat: Seat, heard: list[str], now: float) -> None:
        start = sum(map(ord, seat.name)) % max(1, len(heard))
        observers = [*(heard[start:] + heard[:start])[:OBSERVERS], self._me]
        # What these have seen last time counts until they have looked again: a look at a node that
        # is cut off takes most of the pause, and two of them would seldom be there at once.
        seat.sightings = {
            name: seat.sightings[name] for name in observers if name in seat.sightings
        }
        seat.asked_at = now
        self._ask(observers, seat)
