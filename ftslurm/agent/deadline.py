"""At a stop signal the leader asks Slurm how the job is to end, and tells the ranks until when.

Slurm's signals reach every step of a job (22.05 to 26.05, seen), so the agents learn of them when
the ranks do. Asked once for each signal of an attempt, in a thread, and again where it comes again
later; without an answer nothing is told, and the ranks have what was frozen at submit.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

from ftslurm.run.deadline import APART_S, ENDING, MARGIN_S, MOST_S, PREEMPTED, TIME_LIMIT, kill_s
from ftslurm.scheduler.job_end import JobEnd

if TYPE_CHECKING:
    from ftslurm.agent.leader import Leader
    from ftslurm.agent.trial import Trial


FAR_S = 370.0
"""A limit that is so much further away than the lead has not been warned of: Slurm may warn 60 s
early (sbatch(1)), and munge refuses clocks that are 300 s apart."""
AGAIN_S = 5.0
"""So much later the same signal may mean something else, as TERM in a grace that of a cancel."""


def left_s(
    end: JobEnd, *, kill_wait_s: float, lead_s: float, since_s: float, now_s: float
) -> Optional[tuple[float, str]]:
    """(Seconds from now for a save, by what); None: nothing to tell. Pure. `since_s`: since the
    signal; `now_s`: UTC.

    - Preempted: the signal came when the grace began, and at its end Slurm TERMs, and kills after
      KillWait; it requeues by itself, so a save may use both. The length of the grace is a
      difference of two times of slurmctld's: a node whose clock is wrong has the same.
    - Being torn down (a requeue or cancel by anybody): TERM came just now.
    - Else its limit, before which the save and the requeue must both be done: it is TIMEOUT then.
      The warning comes `lead_s` before it, never later, whatever this node's clock; less is left
      where the limit was moved here. A limit that is far away leaves a person's signal the time.
    """
    kill = kill_s(kill_wait_s)
    if end.is_ending:
        return kill - since_s - MARGIN_S, ENDING
    if end.end_at is None:
        return None
    if end.preempted_at is not None:
        return end.end_at - end.preempted_at + kill - since_s - MARGIN_S, PREEMPTED
    until_limit_s = end.end_at - now_s
    if until_limit_s <= lead_s + FAR_S:
        until_limit_s = min(until_limit_s, lead_s - since_s)
    left = min(until_limit_s - MARGIN_S, MOST_S)
    return (left, TIME_LIMIT) if left > 0 else None  # that clock cannot be right


class AskForDeadline:
    """`ask` may block; None: no answer."""

    def __init__(
        self,
        leader: Leader,
        ask: Callable[[], Optional[JobEnd]],
        *,
        kill_wait_s: float,
        lead_s: float,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._leader, self._ask = leader, ask
        self._site = {"kill_wait_s": kill_wait_s, "lead_s": lead_s}
        self._clock, self._now = clock, now
        self._attempt = 0
        self._asked: dict[int, float] = {}
        """Signals of that attempt, and when each was last asked about: TERM comes up to three
        times."""
        self._is_due_again = False
        self._known: tuple[float, Optional[JobEnd], float] = (0.0, None, math.inf)
        """At which signal of that attempt was asked what the ranks have been told of, and until
        when. A later one that finds the same makes the grace no longer."""

    def signalled(self, number: int, at: float) -> None:
        """In the loop's thread. `at`: by the monotonic clock."""
        trial = self._leader.trial
        if trial is None or trial.is_ending:
            return
        if self._attempt != trial.number:
            self._attempt, self._asked, self._known = trial.number, {}, (0.0, None, math.inf)
        # With proctrack/linuxproc a second TERM, 0.1 s later, also ends the command that asks.
        self._is_due_again = at - self._asked.get(number, -math.inf) < AGAIN_S
        if not self._is_due_again:
            self._asked[number] = at
            self._begin(trial, signal.Signals(number).name, at)

    def _begin(self, trial: Trial, name: str, at: float) -> None:
        self._leader.loop.in_thread(self._ask, lambda end: self._told(trial, name, at, end))

    def _told(self, trial: Trial, name: str, at: float, end: Optional[JobEnd]) -> None:
        if end is None and self._is_due_again:
            self._is_due_again = False
            self._begin(trial, name, at)
            return
        clock = self._clock()
        since_s = clock - at
        facts: dict[str, Any] = {"signal": name, "asked_s": round(since_s, 3)}
        facts["end_at"] = end and end.end_at
        now = self._now()
        left = end and left_s(end, **self._site, since_s=since_s, now_s=now)
        if left:
            seconds, facts["by"] = left
            # Ranks that have left have taken the place with them where it would be told.
            there = self._leader.trial is trial and not trial.is_ending
            until = clock + seconds
            # TERM at the end of a grace, whose KILL is in what was told.
            is_old = facts["by"] == ENDING and until > self._known[2] - APART_S
            if there and at >= self._known[0] and end != self._known[1] and not is_old:
                self._known, facts["left_s"] = (at, end, until), round(seconds, 3)
                self._leader.orders.give(
                    "deadline", trial.nodes, attempt=trial.number, left_s=seconds, by=facts["by"]
                )
        record = {"at": now, "kind": "deadline", "node": self._leader.me, **facts}
        self._leader.ledger.event(trial.paths, record)
