"""`python -m ftslurm.agent RUN`: lead or follow, by this node's place in the job.

Ends when the leader says so, or when Slurm kills the step. TERM, USR1 and USR2 are for the ranks:
an agent outlives the grace time beside them; the first one makes the leader ask for the end time.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Optional

from ftslurm.agent.ask import (
    KEY_BYTES,
    Address,
    address_file,
    key_file,
    read_address,
    restart_count,
)
from ftslurm.agent.duty import Duty
from ftslurm.agent.inquiry import answer
from ftslurm.agent.late_commits import LOOK_S, LateCommits
from ftslurm.agent.leader import Leader
from ftslurm.agent.loop import Loop, tell
from ftslurm.agent.member import Member
from ftslurm.errors import EXIT_FAILED, EXIT_OK, RunError
from ftslurm.files import is_listed, write_json
from ftslurm.run.attempts import claimed_numbers, read_attempt
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import RunRecord, read_record
from ftslurm.run.trust import require_own
from ftslurm.scheduler import open_scheduler, read_end_time
from ftslurm.scheduler.protocol import Scheduler

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
LEADER_WITHIN_S = 120.0
"""The batch node's own task may start late."""


@dataclass(frozen=True)
class Agent:
    """Who this agent is."""

    layout: RunLayout
    record: RunRecord
    scheduler: Scheduler
    job_id: str
    node: str
    nodes: list[str]
    """Of the job, spares too; the first hosts the batch script and leads."""
    environ: Mapping[str, str]

    @property
    def leads(self) -> bool:
        return self.node == self.nodes[0]

    @property
    def interface(self) -> Optional[str]:
        return self.record.spec.cluster.interface

    @property
    def host(self) -> str:
        """Where the other nodes reach this one."""
        if self.interface is None:
            return self.node
        from ftslurm.node.interface import address_of

        return address_of(self.interface)

    @property
    def listen_on(self) -> str:
        """All addresses without an interface: a node's own name may be a loopback address to it."""
        return "0.0.0.0" if self.interface is None else self.host


def main(argv: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ftslurm.agent",
        description="Watch this node's ranks for as long as the job lives (started by srun).",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    options = parser.parse_args(argv)
    stopped: list[int] = []
    outlive_signals(stopped)
    layout = RunLayout(options.run)
    require_own(layout)
    agent = _who(layout, os.environ)
    try:
        lead(agent, stopped) if agent.leads else follow(agent)
    except RunError as error:
        print(f"ftslurm: agent on {agent.node}: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_FAILED
    return EXIT_OK


def outlive_signals(stopped: list[int]) -> None:
    """Note the first stop signal, and die of none."""

    def note(number: int, frame: Optional[FrameType]) -> None:
        if not stopped:
            stopped.append(number)

    for number in STOP_SIGNALS:
        signal.signal(number, note)


def leave_with_parent(loop: Loop) -> None:
    """Whoever started this agent is gone (slurmstepd): nobody would end it."""
    parent = os.getppid()

    def look() -> None:
        if os.getppid() != parent:
            tell("leaves, the process that started it is gone")
            loop.stop()

    loop.every(1.0, look)


def lead(agent: Agent, stopped: list[int]) -> None:
    key = os.urandom(KEY_BYTES)
    loop = Loop(key)
    leader = Leader(
        loop,
        Duty(agent.layout.root, agent.node, key, agent.environ),
        agent.layout,
        agent.record.spec.recovery,
        agent.nodes,
        controller=agent.scheduler.controller_alive,
        end_time=lambda: read_end_time(agent.scheduler, agent.environ),
        asked=answer,
    )
    port = leader.begin(agent.listen_on)
    _publish(agent, port, key)
    _take_up(agent, leader)
    told: list[int] = []

    def look_for_signal() -> None:
        if stopped and not told:
            told.append(stopped[0])
            leader.told_to_stop()

    loop.every(0.5, look_for_signal)
    leave_with_parent(loop)
    late = LateCommits(agent.layout, agent.record, loop.in_thread, environ=agent.environ)
    loop.every(LOOK_S, lambda: late.look(leader.trial.number if leader.trial else None))
    loop.run()


def follow(agent: Agent) -> None:
    from ftslurm.agent.succession import Succession

    address = _await_leader(agent)
    place = (address.node, address.host, address.port)
    loop = Loop(address.key)
    duty = Duty(agent.layout.root, agent.node, address.key, agent.environ)
    succession = Succession(
        agent.layout, agent.scheduler, agent.environ, agent.nodes, place, duty, address.key
    )
    member = Member(
        loop,
        duty,
        place,
        agent.host,
        listen_on=agent.listen_on,
        lost=lambda silent_s: succession.consider(member, silent_s),
    )
    member.begin()
    leave_with_parent(loop)
    loop.run()


def _who(layout: RunLayout, environ: Mapping[str, str]) -> Agent:
    record = read_record(layout)
    scheduler = open_scheduler(record.scheduler, run_dir=layout.root)
    nodes = scheduler.nodes(environ)
    node = environ.get("SLURMD_NODENAME") or socket.gethostname()
    if node not in nodes:
        raise RunError(
            f"node `{node}` is not among the job's ({', '.join(nodes[:8])}); agents are started by "
            "srun in the batch script of `ftslurm submit`"
        )
    job_id = scheduler.own_job_id(environ)
    return Agent(layout, record, scheduler, job_id, node, nodes, environ)


def _publish(agent: Agent, port: int, key: bytes) -> None:
    """First the key, for this user's eyes only; whoever sees the address finds it."""
    path = key_file(agent.layout, agent.job_id)
    path.unlink(missing_ok=True)  # of this job's run before a requeue
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as stream:
        stream.write(key.hex())
    record = {"leader": agent.node, "host": agent.host, "port": port, "at": time.time()}
    write_json(
        address_file(agent.layout, agent.job_id),
        {"schema_version": 1, **record, "restart_count": restart_count(agent.environ)},
    )


def _take_up(agent: Agent, leader: Leader) -> None:
    """Begin the attempt that was claimed before there was a leader to be told: the batch script
    starts both at once. Who claims one later finds the address."""
    newest = claimed_numbers(agent.layout)[-1:]
    for number in newest:
        attempt = read_attempt(agent.layout, number)
        own = (agent.job_id, restart_count(agent.environ))
        is_over = is_listed(agent.layout.attempt(number).decision_json)
        if (attempt.job_id, attempt.restart_count) == own and not is_over:
            tasks = attempt.tasks_per_node or agent.record.spec.cluster.tasks_per_node
            leader.begin_attempt(number, attempt.nodes, tasks)


def _await_leader(agent: Agent) -> Address:
    """Looked for with growing pauses, when this agent begins and never again."""
    deadline = time.monotonic() + LEADER_WITHIN_S
    pause_s, started = 0.2, restart_count(agent.environ)
    while time.monotonic() < deadline:
        if is_listed(address_file(agent.layout, agent.job_id)):
            address = read_address(agent.layout, agent.job_id)
            if address is not None and address.restart_count == started:
                return address
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 5.0)
    raise RunError(
        f"the leader on {agent.nodes[0]} has not begun within {LEADER_WITHIN_S:.0f} s; this node "
        "goes without an agent: look at that node"
    )
