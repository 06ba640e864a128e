"""`python -m ftslurm.agent RUN`: lead or follow, by this node's place in the job.

Ends when Slurm kills the step, with a job that has to end, and where nobody leads any more. TERM,
USR1 and USR2 are for the ranks: an agent outlives the grace time beside them, and the leader asks
how much of it there is.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Optional

from ftslurm.agent.aside import down_nodes
from ftslurm.agent.ask import (
    KEY_BYTES,
    Address,
    address_file,
    key_file,
    read_address,
    restart_count,
)
from ftslurm.agent.deadline import AskForDeadline
from ftslurm.agent.duty import Duty
from ftslurm.agent.gpu_memory import GpuMemory
from ftslurm.agent.inquiry import answer
from ftslurm.agent.late_commits import LOOK_S, LateCommits
from ftslurm.agent.leader import Leader
from ftslurm.agent.loop import Loop, tell
from ftslurm.agent.member import Member
from ftslurm.agent.metrics_child import LOOK_S as METRICS_LOOK_S
from ftslurm.agent.metrics_child import MetricsChild
from ftslurm.agent.node_kind import LOOK_S as KIND_LOOK_S
from ftslurm.agent.node_kind import Inquirer, OwnKind
from ftslurm.agent.parting import Parting
from ftslurm.agent.report import AgentFinding, findings_in
from ftslurm.errors import EXIT_FAILED, EXIT_OK, FormatError, FtslurmError, RunError
from ftslurm.files import is_listed, read_json, write_json
from ftslurm.run.attempts import claimed_numbers, read_attempt
from ftslurm.run.layout import RunLayout
from ftslurm.run.rank import STOP_SIGNALS, node_name
from ftslurm.run.record import RunRecord, read_record
from ftslurm.run.trust import require_own
from ftslurm.scheduler import open_scheduler
from ftslurm.scheduler.job_end import read_job_end
from ftslurm.scheduler.protocol import Scheduler

LEADER_WITHIN_S = 120.0
"""The batch node's own task may start late."""
ADDRESS_LOOK_S = 3.0


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
    def gpus(self) -> GpuMemory:
        spec = self.record.spec
        raw_job_id = self.environ.get("SLURM_JOB_ID", self.job_id)
        return GpuMemory(raw_job_id, spec.cluster.gpus_per_node, spec.health.nvml_library)

    @property
    def kind(self) -> Optional[OwnKind]:
        return OwnKind.of(self.record.spec)

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
    outlive_signals()
    layout = RunLayout(options.run)
    try:
        require_own(layout)
        agent = _who(layout, os.environ)
        lead(agent) if agent.leads else follow(agent)
    except (FtslurmError, OSError) as error:
        print(f"ftslurm: agent on {node_name()}: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_FAILED
    return EXIT_OK


def outlive_signals(heard: Callable[[int], None] = lambda number: None) -> None:
    """A handler, since what is ignored stays ignored in the tools that are started."""

    def go_on(number: int, frame: Optional[FrameType]) -> None:
        heard(number)

    for number in STOP_SIGNALS:
        signal.signal(number, go_on)


def listen_for_signals(agent: Agent, leader: Leader) -> None:
    """The ranks of this job have got one as well."""
    parting, asking = Parting(leader), _asking(agent, leader)

    def heard(number: int) -> None:
        at = time.monotonic()
        if asking is not None:
            leader.loop.from_thread(lambda: asking.signalled(number, at))
        if number == signal.SIGTERM:
            leader.loop.from_thread(parting.term_came)

    outlive_signals(heard)


def _asking(agent: Agent, leader: Leader) -> Optional[AskForDeadline]:
    """None: the run has a deadline of its own."""
    record = agent.record
    if record.site is None or record.spec.checkpoint.emergency_deadline_s is not None:
        return None
    return AskForDeadline(
        leader,
        lambda: read_job_end(agent.environ),
        kill_wait_s=float(record.site["kill_wait_s"]),
        lead_s=float(record.spec.cluster.signal_lead_s),
    )


def allow_many_files() -> None:
    """As many connections as may be: the soft limit is 1024 on many systems. For a leader, which
    submits nothing: sbatch would hand the limit on to the job."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def leave_with_parent(loop: Loop) -> None:
    """Whoever started this agent is gone (slurmstepd): nobody would end it."""
    parent = os.getppid()

    def look() -> None:
        if os.getppid() != parent:
            tell("leaves, the process that started it is gone")
            loop.stop()

    loop.every(1.0, look)


def leave_with_address(agent: Agent, loop: Loop) -> None:
    """Agents that were started again have another leader; the members leave with this one. Where
    both processes of their srun are killed, slurmstepd leaves its tasks alone (seen on 22.05)."""
    own = (restart_count(agent.environ), _step_id(agent.environ))

    def look(address: Optional[Address]) -> None:
        if address is not None and (address.restart_count, address.step_id) != own:
            tell("leaves, another leader has begun in this job")
            loop.stop()
        else:
            loop.later(ADDRESS_LOOK_S, again)

    def again() -> None:
        loop.in_thread(lambda: read_address(agent.layout, agent.job_id), look)

    loop.later(ADDRESS_LOOK_S, again)


def lead(agent: Agent) -> None:
    allow_many_files()
    key = os.urandom(KEY_BYTES)
    loop = Loop(key)
    duty = Duty(agent.layout.root, agent.node, key, agent.environ, agent.gpus, agent.kind)
    leader = Leader(
        loop,
        duty,
        agent.layout,
        agent.record.spec.recovery,
        agent.nodes,
        controller=agent.scheduler.controller_alive,
        down=down_nodes,
        asked=answer,
    )
    listen_for_signals(agent, leader)
    port = leader.begin(agent.listen_on)
    _publish(agent, port, key)
    # Before there are other threads: between fork and exec it runs code of ours.
    metrics = MetricsChild(agent.layout.root, agent.record.spec.recovery.metrics_dir)
    loop.every(METRICS_LOOK_S, metrics.look)
    _take_up(agent, leader)
    leave_with_parent(loop)
    leave_with_address(agent, loop)
    loop.in_thread(duty.sweep, lambda _: None)
    if agent.kind is not None:
        inquirer = Inquirer(leader.orders, lambda: leader.roll.live, leader.roll.kinds)
        loop.every(KIND_LOOK_S, inquirer.look)
    late = LateCommits(agent.layout, agent.record, loop.in_thread, environ=agent.environ)
    loop.every(LOOK_S, lambda: late.look(leader.trial.number if leader.trial else None))
    loop.run()


def follow(agent: Agent) -> None:
    from ftslurm.agent.succession import Succession

    address = _await_leader(agent)
    if address is None:
        return
    place = (address.node, address.host, address.port)
    loop = Loop(address.key)
    duty = Duty(agent.layout.root, agent.node, address.key, agent.environ, agent.gpus, agent.kind)
    succession = Succession(
        agent.layout,
        agent.scheduler,
        agent.environ,
        agent.nodes,
        place,
        duty,
        address.key,
        leave=lambda: loop.from_thread(loop.stop),
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
    loop.in_thread(duty.sweep, lambda _: None)
    loop.run()


def _who(layout: RunLayout, environ: Mapping[str, str]) -> Agent:
    record = read_record(layout)
    scheduler = open_scheduler(record.scheduler, run_dir=layout.root)
    nodes = scheduler.nodes(environ)
    node = node_name(environ)
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
        {
            "schema_version": 1,
            **record,
            "restart_count": restart_count(agent.environ),
            "step_id": _step_id(agent.environ),
        },
    )


def _take_up(agent: Agent, leader: Leader) -> None:
    """Begin the attempt that was claimed before there was a leader to be told: the batch script
    starts both at once, and agents again whose leader has died. Who claims one later finds the
    address."""
    newest = claimed_numbers(agent.layout)[-1:]
    for number in newest:
        try:
            attempt = read_attempt(agent.layout, number)
        except (FormatError, OSError) as error:
            tell(f"attempt {number} goes unwatched, the next one will not: {error}")
            continue
        own = (agent.job_id, restart_count(agent.environ))
        is_over = is_listed(agent.layout.attempt(number).decision_json)
        if (attempt.job_id, attempt.restart_count) == own and not is_over:
            tasks = attempt.tasks_per_node or agent.record.spec.cluster.tasks_per_node
            before = _found_before(agent.layout, number)
            leader.begin_attempt(number, attempt.nodes, tasks, before=before, under_way=True)


def _found_before(layout: RunLayout, number: int) -> list[AgentFinding]:
    """In this attempt, by a leader that has died."""
    try:
        return findings_in(read_json(layout.attempt(number).agents_json))
    except FileNotFoundError:
        return []
    except (OSError, FormatError, TypeError) as error:
        tell(f"what was found in attempt {number} so far is not known: {error}")
        return []


def _step_id(environ: Mapping[str, str]) -> str:
    return environ.get("SLURM_STEP_ID", "")


def _await_leader(agent: Agent) -> Optional[Address]:
    """Looked for with growing pauses, when this agent begins and never again. None: its node is
    lost, and the run has its next job."""
    deadline = time.monotonic() + LEADER_WITHIN_S
    pause_s = 0.2
    while time.monotonic() < deadline:
        address = _address(agent)
        if address is not None:
            return address
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 5.0)
    from ftslurm.agent.unheard import stand_in

    mine = (agent.layout, agent.scheduler, agent.environ, agent.nodes, agent.node)
    try:
        return stand_in(*mine, begun=lambda: _address(agent))
    except RunError as error:
        raise RunError(
            f"the leader on {agent.nodes[0]} has not begun within {LEADER_WITHIN_S:.0f} s, and "
            f"{error}; this node goes without an agent: look at that node"
        ) from None


def _address(agent: Agent) -> Optional[Address]:
    """Of the leader of this job step; that of an earlier one has died with it, or stays deaf."""
    own = (restart_count(agent.environ), _step_id(agent.environ))
    if not is_listed(address_file(agent.layout, agent.job_id)):
        return None
    address = read_address(agent.layout, agent.job_id)
    is_own = address is not None and (address.restart_count, address.step_id) == own
    return address if is_own else None
