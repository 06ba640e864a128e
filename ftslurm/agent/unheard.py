"""The leader has never told where it listens: its node may have died in the job's first seconds.

Slurm would kill every step after SlurmdTimeout and let the job idle to its limit. Without the
leader's key the members cannot ask each other, so that only Slurm's own word counts (quorum.py),
and each takes its turn, by the clock. Where the node is there, nothing is done: its agents are
started again when all of them have left. Nothing is queued for a job that is not running any more.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

from ftslurm.agent.aside import down_nodes
from ftslurm.agent.ask import Address
from ftslurm.agent.duty import PROBE_S
from ftslurm.agent.loop import tell
from ftslurm.agent.quorum import REQUEUE, Verdict, decide
from ftslurm.agent.succession import AGAIN_S, RARELY_S, TURN_S, give_next_job
from ftslurm.errors import FtslurmError, RunError
from ftslurm.run.layout import RunLayout
from ftslurm.scheduler.protocol import Scheduler

_PORT = 32768
"""Linux's ports for whoever asks for none begin here (ip_local_port_range): a firewall that closes
it closes the agents' too."""


def stand_in(
    layout: RunLayout,
    scheduler: Scheduler,
    environ: Mapping[str, str],
    nodes: Sequence[str],
    me: str,
    begun: Callable[[], Optional[Address]],
) -> Optional[Address]:
    """The leader's address, should it come after all; None: its node, the first of `nodes`, is lost
    and the run has its next job. RunError: the node is there, or nobody is left to work for."""
    leader, parent = nodes[0], os.getppid()
    pause_s, said = AGAIN_S, ""
    place, members = nodes[1:].index(me), len(nodes) - 1
    while os.getppid() == parent:
        verdict = _verdict(me, nodes)
        if verdict.action == REQUEUE:
            time.sleep(until_turn_s(place, members, time.time()))
            verdict = _verdict(me, nodes)
        address = begun()
        if address is not None:
            return address
        if verdict.why != said:
            said = verdict.why
            tell(f"{me}: {verdict.why}: {verdict.action}")
        if verdict.action == REQUEUE and os.getppid() == parent and _runs(scheduler, environ):
            try:
                give_next_job(layout, scheduler, environ, me, leader, verdict.why)
                return None
            except (FtslurmError, OSError) as error:
                tell(f"{me}: the run has no next job yet: {error}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, RARELY_S)
    raise RunError("the process that started this agent is gone")


def until_turn_s(place: int, members: int, now: float) -> float:
    """The members look at times of their own: each begins to act in a part of the clock's time that
    is nobody else's, so that it finds the job that another one has queued. `now`: UTC seconds."""
    return (place * TURN_S - now) % (members * TURN_S)


def _runs(scheduler: Scheduler, environ: Mapping[str, str]) -> bool:
    """Whether our job does; False: nobody can say. RunError: it does not any more, or a person or
    Slurm is about to end it, which agents outlive by KillWait."""
    job_id = scheduler.own_job_id(environ)
    state = scheduler.job_state(job_id)
    if state.is_running or not (state.is_known or state.is_forgotten):
        return state.is_running
    raise RunError(f"job {job_id} is {'forgotten' if state.is_forgotten else state.word}")


def _verdict(me: str, nodes: Sequence[str]) -> Verdict:
    """RunError: the leader's node is there."""
    if _is_there(nodes[0]) or _is_there(nodes[0]):  # one look in vain is no proof
        raise RunError("its node answers")
    down = down_nodes([nodes[0]])
    is_down = down is not None and nodes[0] in down
    answers = down is not None
    return decide(me, nodes, {}, controller=answers, node_is_down=is_down, has_heard=False)


def _is_there(host: str) -> bool:
    try:
        socket.create_connection((host, _PORT), timeout=PROBE_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
