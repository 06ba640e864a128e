"""The agent on the batch node: hears all members, judges, ends ranks, and alone writes the run.

What may block is in other threads: shared storage is the ledger's, processes are the duty's, Slurm
is asked aside. A leader that is cut off ends nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from ftslurm.agent.aside import Aside
from ftslurm.agent.branch import AWAY_S, Branch, Child
from ftslurm.agent.duty import Duty, Watch
from ftslurm.agent.keeping import COLLECT_S, Keeping
from ftslurm.agent.ledger import Ledger
from ftslurm.agent.loop import Link, Loop, tell
from ftslurm.agent.member import LOOK_S, carry_out_or_tell
from ftslurm.agent.orders import Orders, Replies
from ftslurm.agent.processes import GRACE_S
from ftslurm.agent.report import AgentFinding, NodeReport, status_record, to_row
from ftslurm.agent.roll import Roll, Seat
from ftslurm.agent.trial import LEADER_LOST, Trial, needed_nodes
from ftslurm.agent.ways import Ways
from ftslurm.agent.wire import Message
from ftslurm.run.heartbeat import RankView
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import RecoverySpec
from ftslurm.scheduler.hostlist import compress

TICK_S = 1.0
STATUS_S = 10.0
PROBED_S = 10.0
END_S = 15.0
"""Above TERM, grace, KILL and the wait for what does not go."""

ROUNDED_S = 0.01
"""More than ages lose on their way here."""
STUCK_GRACE_S = 1.5
"""Ranks that wait for one that is lost or hangs can make nothing of more."""
LATE_S = (3.0, 10.0, 30.0)
"""After the beginning of an attempt that has lost a node already: by then its srun is there."""

Then = Callable[[], None]


class Leader:
    """`asked` answers questions from outside (inquiry.py)."""

    def __init__(
        self,
        loop: Loop,
        duty: Duty,
        layout: RunLayout,
        recovery: RecoverySpec,
        nodes: list[str],
        *,
        controller: Callable[[], Optional[bool]],
        down: Callable[[list[str]], Optional[frozenset[str]]],
        asked: Callable[[Leader, Link, Message], None],
        ledger: Optional[Ledger] = None,
    ) -> None:
        self.me, self.nodes, self.layout, self.recovery = duty.node, nodes, layout, recovery
        self.loop, self.duty, self.ledger = loop, duty, ledger or Ledger()
        self.trial: Optional[Trial] = None
        self._watch = Watch(duty)
        self._is_cut_off = False
        self._status_at = self._ticked_at = 0.0
        self.branch = Branch(
            loop,
            self.me,
            hears=lambda: True,
            standing=self._standing,
            passed=self._passed,
            greeted=self._greeted,
            left=self._left,
            asked=lambda link, message: asked(self, link, message),
        )
        self.orders = Orders(loop, self.me, send=self.branch.pass_order, obey=self._obey)
        self.keeping = Keeping(
            self.orders, self.ledger, lambda node, what: self._event("no_evidence", node, what=what)
        )
        self.roll = Roll(
            nodes,
            self.me,
            ask=self._have_looked,
            controller=Aside(loop.in_thread, controller),
            down=Aside(loop.in_thread, down),
        )
        self._ways = Ways(nodes, self.branch, self.roll)

    def begin(self, listen_on: str) -> int:
        """Take connections; the port."""
        self.loop.every(LOOK_S, self._look)
        self.loop.every(TICK_S, self.tick)
        return self.loop.listen(listen_on, lambda: self.branch)

    # What the outside asks for.

    def begin_attempt(
        self,
        number: int,
        nodes: list[str],
        tasks_per_node: int,
        *,
        before: Sequence[AgentFinding] = (),
        under_way: bool = False,
    ) -> None:
        """`before`: found in it by another leader; `under_way`: its ranks may run already."""
        if self.trial is not None and self.trial.number == number:
            return  # taken up already
        world_size = len(nodes) * tasks_per_node
        paths = self.layout.attempt(number)
        self.trial = Trial(number, nodes, world_size, paths, self.recovery, list(before))
        self.loop.in_thread(lambda: needed_nodes(self.layout), self._need, otherwise=frozenset())
        self._watch.begin(number)
        self.orders.give("begin", attempt=number, under_way=under_way)
        self._event("begin", self.me, nodes=nodes)
        self.write_status()
        self._begin_without(self.trial, self.roll.lost(nodes))

    def _begin_without(self, trial: Trial, lost: list[Seat]) -> None:
        """Nodes that were lost since the batch loop has looked. It is about to start the ranks."""

        first = len(trial.findings)

        def end() -> None:
            if self.trial is trial:
                self.end_ranks(trial.number, trial.findings[first].why, lambda: None)

        for seat in lost:
            self._lose(seat)
        for after_s in LATE_S if lost else ():
            self.loop.later(after_s, end)

    def forget(self, trial: Trial) -> None:
        """An attempt is over and on record: its ranks' beats are given back on all nodes."""
        if self.trial is trial:
            trial.last_views = self._views()
        self.orders.give("forget", self.roll.live, attempt=trial.number)

    def end_ranks(self, attempt: int, why: str, then: Then, *, grace_s: float = GRACE_S) -> None:
        """End the ranks of an attempt on all nodes that are heard, and their srun here."""
        if self.trial is not None and self.trial.number == attempt:
            self.trial.is_ending = True
        tell(f"the ranks of attempt {attempt} are ended: {why}")
        self._event("end", self.me, why=why)

        def launcher(replies: Replies) -> None:
            left = {node: reply["left"] for node, reply in replies.items() if reply.get("left")}
            if left:
                self._event("left_over", self.me, left=left)
            self.loop.in_thread(lambda: self.duty.end_launcher(attempt), done, otherwise=[])

        def done(left: list[int]) -> None:
            self._event("ended", self.me, launcher_left=left)
            self.write_status()
            then()

        live = self.roll.live
        self.orders.give(
            "end", live, within_s=END_S, then=launcher, attempt=attempt, grace_s=grace_s
        )

    def note_left_behind(
        self, leftover: Mapping[str, list[int]], held: Mapping[str, Mapping[str, str]]
    ) -> None:
        """Processes of an attempt that outlived KILL, and GPU memory that has not come back."""
        if self.trial is not None:
            for finding in self.trial.left_behind(leftover, held):
                self._note(finding)

    def write_status(self) -> None:
        if self.trial is None:
            return
        now = time.time()
        self._status_at = time.monotonic()
        offsets = {name: report.offset_s for name, report in self.branch.below.items()}
        record = status_record(
            attempt=self.trial.number,
            at=now,
            leader=self.me,
            nodes=self.roll.to_record({**offsets, self.me: 0.0}, now),
            views=self.trial.last_views or self._views(),
            findings=self.trial.findings,
        )
        self.ledger.status(self.trial.paths, record)

    # Once a second.

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._ticked_at > AWAY_S:
            self.roll.was_away()
        self._ticked_at = now
        self.branch.beat(0.0)
        for name, report in self.branch.below.items():
            via = self.branch.via.get(name, name)
            if self.roll.reported(name, report.read_at, is_behind=via != name):
                self._take_back(name)
        self._judge_nodes()
        if self.trial is not None and not self.trial.is_ending:
            self._judge_ranks()
            if now - self._status_at >= STATUS_S:
                self.write_status()
        self._ways.look()

    def _judge_nodes(self) -> None:
        judgement = self.roll.look()
        if judgement.cut_off != self._is_cut_off:
            self._is_cut_off = judgement.cut_off
            self._event("cut_off" if judgement.cut_off else "heard_again", self.me)
            if judgement.cut_off and self.trial is not None and not self.trial.has_blamed_leader:
                self._note(self.trial.add(LEADER_LOST, judgement.why, nodes=[self.me]))
        for name in [*judgement.lost, *judgement.gone]:
            self.orders.left(name)
        for name in judgement.gone:
            why = f"the agent on {name} has ended or does not report, the node answers: its ranks "
            why += "are not watched"
            self._event("agent_gone", name)
            if self.trial is not None and not self.trial.is_ending:
                self._note(self.trial.add("node_lost", why, nodes=[name]))
        for name in judgement.lost:
            self._lose(self.roll.seats[name])
        absent = self.roll.absent()
        for name in absent:
            self._event("no_agent", name)
        if absent:
            tell(
                f"no agent has come from {compress(absent)}: the ranks there are not watched; see "
                "that no firewall closes the ports above 1023 between the nodes"
            )

    def _lose(self, seat: Seat) -> None:
        silent_s = time.monotonic() - seat.seen_at
        others = [who for who, seen in seat.sightings.items() if seen and who != self.me]
        by = f"nor do {', '.join(others)}" if others else "and slurmctld answers here"
        why = f"node {seat.name} has been silent for {silent_s:.1f} s; "
        if seat.is_down:
            why += "slurmctld, which answers here, does not reach it either"
        else:
            why += f"it is not reached from {self.me}, {by}"
        since = time.time() - silent_s
        self._event("node_lost", seat.name, since=since)
        trial = self.trial
        if trial is None:
            return
        acts = seat.name in trial.nodes and not trial.is_ending
        self._note(trial.add("node_lost", why, nodes=[seat.name], since=since, acted=acts))
        if acts:
            self.end_ranks(trial.number, why, lambda: None, grace_s=STUCK_GRACE_S)

    def _judge_ranks(self, *, is_between: bool = False) -> None:
        """`is_between`: two ticks, since by the next one a hang would be found late."""
        trial = self.trial
        if trial is None or self._is_cut_off or self.roll.is_any_suspect(trial.nodes):
            return  # of a node that is lost all others' ranks wait, which is no hang
        unseen = self.roll.unseen(trial.nodes) * trial.world_size // len(trial.nodes)
        judge = trial.judge_hang if is_between else trial.judge
        found = judge(self._views(), at=time.monotonic(), unseen=unseen)
        if trial.hang_due_in_s is not None and not is_between:
            due_in_s = trial.hang_due_in_s + ROUNDED_S
            self.loop.later(due_in_s, lambda: self._judge_ranks(is_between=True))
        for finding in found:
            self._note(finding)
            if finding.kind == "hang":
                self._end_hung(trial, finding)
            elif finding.acted:
                self.orders.give("leave", self.roll.live, attempt=trial.number)

    def _need(self, nodes: frozenset[str]) -> None:
        if self.trial is not None:
            self.trial.needed = nodes

    def _end_hung(self, trial: Trial, finding: AgentFinding) -> None:
        """Stacks of all ranks and the nodes' own account first: what is killed tells nothing."""
        trial.is_ending = True
        missing = {"stacks", "nodes"}

        def kept(what: str) -> None:
            missing.discard(what)
            if not missing:
                self.end_ranks(trial.number, finding.why, lambda: None, grace_s=STUCK_GRACE_S)

        # A spare or a node that was given up has taken no part: what is old there would be blamed.
        nodes = [node for node in self.roll.live if node in trial.nodes]
        self.keeping.stacks(trial, nodes, lambda: kept("stacks"))
        self.keeping.nodes(trial, nodes, COLLECT_S, lambda: kept("nodes"))

    def _note(self, finding: AgentFinding) -> None:
        """A finding is on record before anything is done for it."""
        tell(finding.why)
        node = finding.nodes[0] if finding.nodes else self.me
        self._event("finding", node, finding=finding.kind, why=finding.why, ranks=finding.ranks)
        self.write_status()

    # What members say.

    def _greeted(self, node: str, child: Child) -> Message:
        if self.roll.came(node, child.host, child.port):
            self._take_back(node)
        else:
            self._event("joined", node)
        self.loop.later(0.0, lambda: self.orders.joined(node))  # it is welcomed first
        return self._ways.of(node)

    def _take_back(self, node: str) -> None:
        """A node that was given up is heard again: what is left there of attempts that are over is
        ended."""
        self._event("node_back", node)
        number = 0 if self.trial is None else self.trial.number
        is_over = self.trial is None or self.trial.is_ending
        self.orders.give("clear", [node], attempt=number if is_over else number - 1)

    def _left(self, node: str, why: str) -> None:
        self._event("disconnected", node, why=why)
        self.roll.left(node)

    def _passed(self, message: Message) -> None:
        node = str(message.get("node"))
        if message.get("t") == "reply":
            facts = {key: value for key, value in message.items() if key not in ("t", "node")}
            self.orders.answered(facts.pop("id"), node, facts)
        elif message.get("t") == "event":
            keep = ("t", "node", "kind", "at")
            facts = {key: value for key, value in message.items() if key not in keep}
            self._event(str(message["kind"]), node, **facts)

    def _standing(self) -> Message:
        return {"attempt": self.trial.number if self.trial else 0}

    # The leader's own node, and small things.

    def _look(self) -> None:
        for exited in self._watch.look():
            self._event("rank_exit", self.me, **exited, sent_at=time.time())
        now = time.monotonic()
        rows = [to_row(view) for view in self._watch.views]
        self.branch.below[self.me] = NodeReport(now, 0.0, self._watch.attempt, rows)

    def _views(self) -> list[RankView]:
        """Of the ranks of this attempt, as old as they are now."""
        trial, now = self.trial, time.monotonic()
        if trial is None:
            return []
        reports = [self.branch.below[node] for node in trial.nodes if node in self.branch.below]
        return [
            view
            for report in reports
            if report.attempt == trial.number
            for view in report.views(now)
        ]

    def _obey(self, order: Message) -> dict[str, Any]:
        return carry_out_or_tell(self.duty, order)

    def _have_looked(self, observers: list[str], seat: Seat) -> None:
        def then(observer: str) -> Callable[[Replies], None]:
            def sighted(replies: Replies) -> None:
                for reply in replies.values():
                    if "seen" in reply:
                        self.roll.sighted(seat.name, observer, reply["seen"])
                        self._judge_nodes()

            return sighted

        for observer in observers:
            self.orders.give(
                "probe", [observer], within_s=PROBED_S, then=then(observer),
                host=seat.host, port=seat.port,
            )  # fmt: skip

    def _event(self, kind: str, node: str, **facts: Any) -> None:
        if self.trial is None:
            return
        self.ledger.event(
            self.trial.paths, {"at": time.time(), "kind": kind, "node": node, **facts}
        )
