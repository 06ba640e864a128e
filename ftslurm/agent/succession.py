"""The leader is silent: ask the others, decide as quorum.py says, and act if it falls to us.

The job itself would idle to its limit. A requeue would wait until Slurm has given the dead node up
(SlurmdTimeout, 300 s by default, and 121 s after it, seen), so a new job is queued without that
node and the old one cancelled; only where sbatch is refused is the old one requeued.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Thread
from typing import Any, Optional

from ftslurm.agent.aside import down_nodes
from ftslurm.agent.ask import exchange
from ftslurm.agent.duty import PROBE_S, Duty
from ftslurm.agent.loop import tell
from ftslurm.agent.member import Member, Place
from ftslurm.agent.quorum import CUT_OFF, REQUEUE, WAIT, Verdict, decide
from ftslurm.agent.silence import ALONE_S, ANSWERS, REFUSES
from ftslurm.agent.wire import WireError
from ftslurm.diagnosis.causes import NODE
from ftslurm.errors import FtslurmError, SchedulerError
from ftslurm.files import is_listed, write_json
from ftslurm.recovery.actions import REQUEUED
from ftslurm.recovery.keep_out import keep_out_of_waiting, known_exclusions
from ftslurm.recovery.next_job import move_on
from ftslurm.recovery.own_job import OwnJob, submit_as
from ftslurm.recovery.successor import follower_that_has_begun
from ftslurm.run.attempts import append_event, claimed_numbers, read_attempt
from ftslurm.run.layout import RunLayout
from ftslurm.run.node_memory import FAULT, note_node
from ftslurm.run.record import read_record
from ftslurm.scheduler.protocol import Scheduler

AGAIN_S = 5.0
RARELY_S = 60.0
"""Once this has been in vain for long: each member asks Slurm, for as long as the job lives."""
TURN_S = 2.0
"""Queueing a job takes less; whoever comes after it finds that job."""
MOST_TURNS_S = 60.0
FIRST_ASKED = 8
"""In a large job not everybody asks everybody: who finds a lower-named one that agrees leaves it to
that one."""
LEAVES_AFTER_S = 10.0
"""The leader's agent has ended alone: when all members have left too, the batch script starts them
again, together with a new leader, while the ranks go on."""
RECORDS_S = 5.0
"""Shared storage may be away with the node; the run's next job does not wait longer for it."""


class Succession:
    """One a member. `consider` is called every second while the leader is not heard; `leave`, from
    any thread, ends this agent."""

    def __init__(
        self,
        layout: RunLayout,
        scheduler: Scheduler,
        environ: Mapping[str, str],
        nodes: Sequence[str],
        leader: Place,
        duty: Duty,
        key: bytes,
        *,
        leave: Callable[[], None],
    ) -> None:
        self._layout, self._scheduler, self._environ = layout, scheduler, environ
        self._nodes, self._leader, self._duty, self._key = nodes, leader, duty, key
        self._leave = leave
        self._refused_since: Optional[float] = None
        self._next_at = 0.0
        """math.inf: it has been done, by us, and the job ends within KillWait."""
        self._pause_s = AGAIN_S
        self._is_busy = False
        self._said = ""

    def consider(self, member: Member, silent_s: float) -> None:
        if self._is_busy or time.monotonic() < self._next_at:
            return
        if len(self._nodes) == 2 and silent_s < ALONE_S:
            return
        self._is_busy = True
        peers, has_heard = dict(member.peers), member.has_heard

        def work() -> None:
            pause_s = AGAIN_S
            try:
                pause_s = self._decide_and_act(peers, has_heard)
            except Exception as error:  # noqa: BLE001 - it is tried again, whatever it was
                said = str(error) if isinstance(error, (FtslurmError, OSError)) else repr(error)
                tell(f"{self._duty.node}: the leader is silent: {said}")
            finally:
                self._next_at = time.monotonic() + pause_s
                self._is_busy = False

        try:
            Thread(target=work, daemon=True).start()
        except RuntimeError:  # a full process table
            self._is_busy = False
            raise

    def _decide_and_act(self, peers: Mapping[str, Sequence[Any]], has_heard: bool) -> float:
        """Seconds until the next look; math.inf: nothing is left to do."""
        verdict = self._verdict(peers, has_heard)
        if verdict.action == REQUEUE and not has_heard:
            verdict = self._in_turn(verdict, peers)
        if verdict.why != self._said:
            self._said = verdict.why
            tell(f"{self._duty.node}: {verdict.why}: {verdict.action}")
        if verdict.action == REQUEUE:
            self._give_next_job(verdict.why)
            return math.inf
        is_in_vain = verdict.action == CUT_OFF and not has_heard
        self._pause_s = min(2 * self._pause_s, RARELY_S) if is_in_vain else AGAIN_S
        return self._pause_s

    def _in_turn(self, verdict: Verdict, peers: Mapping[str, Sequence[Any]]) -> Verdict:
        """Members know each other's places by the leader, so here each takes it to be its part:
        one after the other, and only if it still is."""
        turn = self._nodes[1:].index(self._duty.node)
        if turn == 0:
            return verdict
        time.sleep(min(turn * TURN_S, MOST_TURNS_S))
        return self._verdict(peers, has_heard=False)

    def _verdict(self, peers: Mapping[str, Sequence[Any]], has_heard: bool) -> Verdict:
        _, host, port = self._leader
        seen = self._duty.probe(host, port)
        if seen not in (ANSWERS, REFUSES):
            seen = self._duty.probe(host, port)  # one look in vain is no proof
        if seen == REFUSES:
            return self._refused()
        self._refused_since = None
        if seen == ANSWERS:
            return Verdict(WAIT, "the leader answers")
        others = {
            name: (str(place[0]), int(place[1]))
            for name, place in peers.items()
            if name not in (self._duty.node, self._leader[0])
        }
        first = sorted(name for name in others if name < self._duty.node)[:FIRST_ASKED]
        votes = self._ask({name: others[name] for name in first})
        if not votes:
            votes = self._ask(others)
        elif len(others) <= FIRST_ASKED:
            votes = {**votes, **self._ask({n: p for n, p in others.items() if n not in first})}
        me, leader = self._duty.node, self._leader[0]
        if min([me, *votes]) != me or any(votes.values()):
            return decide(me, self._nodes, votes)  # a large job's members would all ask Slurm
        down = down_nodes([leader])
        return decide(
            me,
            self._nodes,
            votes,
            controller=ask_controller(self._scheduler),
            node_is_down=None if down is None else leader in down,
            has_heard=has_heard,
        )

    def _refused(self) -> Verdict:
        """The leader's node is there, its agent is not."""
        now = time.monotonic()
        self._refused_since = now if self._refused_since is None else self._refused_since
        if now - self._refused_since >= LEAVES_AFTER_S:
            tell(f"{self._duty.node}: leaves, for the agents to be started again with a leader")
            self._leave()
        why = f"{self._leader[0]} answers, its agent has ended: the batch script may live"
        return Verdict(WAIT, why)

    def _ask(self, places: Mapping[str, tuple[str, int]]) -> dict[str, bool]:
        """Whether the others hear the leader; who does not answer is not among them."""
        votes: dict[str, bool] = {}
        todo = list(places.items())

        def work() -> None:
            while True:
                try:
                    name, (host, port) = todo.pop()
                except IndexError:
                    return
                try:
                    said = exchange(host, port, self._key, {"t": "probe"}, PROBE_S)
                except (OSError, WireError):
                    continue
                votes[name] = bool(said.get("hears"))

        threads = [Thread(target=work, daemon=True) for _ in range(min(32, len(todo)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return votes

    def _give_next_job(self, why: str) -> None:
        lost = self._leader[0]
        give_next_job(self._layout, self._scheduler, self._environ, self._duty.node, lost, why)


def give_next_job(
    layout: RunLayout,
    scheduler: Scheduler,
    environ: Mapping[str, str],
    me: str,
    lost: str,
    why: str,
) -> None:
    """Queue the run's next job without the batch node, which is `lost`, and cancel this one."""
    if is_listed(layout.done):
        return
    job = OwnJob.of(layout, read_record(layout), scheduler, environ)
    # No batch shell is on this node.
    job = dataclasses.replace(job, submit=partial(submit_as, os.getpid()))
    reason = f"{why}; the run's next job is queued without it by {me}"
    _within(RECORDS_S, lambda: note_loss(job, lost, reason))
    try:
        queued = move_on(job, without=[lost])
    except SchedulerError as error:
        tell(f"no new job could be queued ({error}): job {job.job_id} is requeued")
        job.scheduler.requeue(job.job_id, restart_count=job.restart_count)
        names = sorted({*known_exclusions(job), lost})
        keep_out_of_waiting(job, job.job_id, names, for_s=RECORDS_S)
        return
    tell(f"job {queued} goes on with the run, job {job.job_id} is cancelled: {why}")


def note_loss(job: OwnJob, lost: str, reason: str) -> None:
    """The fault of the batch node, and what follows the attempt that it has ended."""
    if follower_that_has_begun(job) is not None:
        return  # it was before that
    newest = max(claimed_numbers(job.layout), default=0)
    note_node(job.layout, FAULT, lost, attempt=newest, cause=NODE, why=reason, now=job.now)
    if newest == 0:
        return
    attempt = read_attempt(job.layout, newest)
    if (attempt.job_id, attempt.restart_count) != (job.job_id, job.restart_count):
        return  # ours has not come to claim one
    paths = job.layout.attempt(newest)
    if is_listed(paths.decision_json):
        return
    decided = {"action": REQUEUED, "cause": NODE, "reason": reason}
    write_json(
        paths.decision_json,
        {
            "schema_version": 1,
            **decided,
            "failures_in_a_row": 0,
            "confidence": 1.0,
            "blamed": {"node": lost, "gpu": None, "rank": None},
            "evidence": [],
            "exclude": [lost] if lost in known_exclusions(job) else [],
            "wait_s": 0.0,
            "decided_at": job.now(),
        },
    )
    append_event(paths, "decided", now=job.now, **decided)


def ask_controller(scheduler: Scheduler) -> Optional[bool]:
    try:
        return scheduler.controller_alive()
    except SchedulerError:
        return None


def _within(seconds: float, act: Callable[[], None]) -> None:
    """Wait no longer for it; it may still come to its end."""

    def work() -> None:
        try:
            act()
        except (FtslurmError, OSError) as error:
            tell(f"not on record: {error}")

    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
