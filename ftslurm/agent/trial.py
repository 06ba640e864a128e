"""The attempt that the leader watches: what is expected of it, what was found, what is being done.

One a `begin`; the leader's memory of an attempt ends with it. Findings are kept, never taken back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

from ftslurm.agent.report import AgentFinding
from ftslurm.diagnosis.hang import SOON_S, HangLimits, HangMemory, hung
from ftslurm.diagnosis.stragglers import STRAGGLER, StragglerLimits, Watcher
from ftslurm.recovery.exclusion import taken_back
from ftslurm.run.heartbeat import RankView
from ftslurm.run.layout import AttemptLayout, RunLayout
from ftslurm.run.node_memory import read_node_events
from ftslurm.run.spec import RecoverySpec

LEADER_LOST = "leader_lost"

NOW = "now"
"""recovery.evict"""


@dataclass
class Trial:
    """The ranks of one attempt, from `begin` to `ended`."""

    number: int
    nodes: list[str]
    """Those that ranks run on."""
    world_size: int
    paths: AttemptLayout
    recovery: RecoverySpec
    findings: list[AgentFinding] = field(default_factory=list)
    is_ending: bool = False
    """Its ranks are being ended, or have ended: nothing more is found."""
    is_collected: bool = False
    """The nodes' own account of themselves has been asked for."""
    is_leaving: bool = False
    """They have been asked to save and leave."""
    last_views: list[RankView] = field(default_factory=list)
    """Of ranks whose beats have been given back since."""
    hang_memory: HangMemory = field(default_factory=HangMemory)
    needed: frozenset[str] = frozenset()
    """Nodes that are not given up for being slow: the run has taken them back before."""

    def __post_init__(self) -> None:
        self._stragglers = Watcher(StragglerLimits.of(self.recovery))

    def judge(self, views: Sequence[RankView], *, at: float, unseen: int = 0) -> list[AgentFinding]:
        """What one look at all ranks shows; `at`: seconds of a steady clock. Views are those of
        nodes that are heard; `unseen` ranks are on nodes where no agent runs any more."""
        new = self.judge_hang(views, at=at, unseen=unseen)
        if not (new or self.is_ending or not views):
            new = self._slow(views, at)
            self.findings += new
        return new

    def judge_hang(
        self, views: Sequence[RankView], *, at: float, unseen: int = 0
    ) -> list[AgentFinding]:
        """Of that, whether the ranks hang: for a look between two others, which slow ranks are
        judged by."""
        found = None if self.is_ending or not views else self._hang(views, at, unseen)
        new = [] if found is None else [found]
        self.findings += new
        return new

    @property
    def hang_due_in_s(self) -> Optional[float]:
        """After the newest look, if nobody moves; None: not before the next one."""
        due_in_s = self.hang_memory.due_in_s
        return due_in_s if 0 < due_in_s <= SOON_S else None

    @property
    def has_blamed_leader(self) -> bool:
        return any(finding.kind == LEADER_LOST for finding in self.findings)

    def add(
        self,
        kind: str,
        why: str,
        *,
        nodes: Sequence[str] = (),
        ranks: Sequence[int] = (),
        since: Optional[float] = None,
        acted: bool = False,
    ) -> AgentFinding:
        now = time.time()
        finding = AgentFinding(
            kind, now, now if since is None else since, why, list(ranks), list(nodes), acted
        )
        self.findings.append(finding)
        return finding

    def left_behind(
        self, leftover: Mapping[str, list[int]], held: Mapping[str, Mapping[str, str]]
    ) -> list[AgentFinding]:
        """By node, pids that do not end, and GPUs with what has their memory."""
        found = []
        if leftover:
            pids = "; ".join(f"{node}: {sorted(left)}" for node, left in sorted(leftover.items()))
            why = f"processes of attempt {self.number} or an older one do not end ({pids})"
            found.append(self.add("leftover", why, nodes=sorted(leftover)))
        for node, gpus in sorted(held.items()):
            told = "; ".join(f"GPU {bus}: {what}" for bus, what in sorted(gpus.items()))
            why = f"GPU memory on {node} has not come back from an earlier attempt ({told})"
            found.append(self.add("gpu_held", why, nodes=[node]))
        return found

    def _slow(self, views: Sequence[RankView], at: float) -> list[AgentFinding]:
        """`evict: now` acts upon a straggler: its ranks save at a boundary and leave."""
        now = time.time()
        found = []
        for one in self._stragglers.observe(views, at=at):
            ranks, nodes = list(one.ranks), sorted(set(one.nodes))
            acts = one.kind == STRAGGLER and self.recovery.evict == NOW and not self.is_leaving
            acts = acts and not self.needed.issuperset(nodes)
            self.is_leaving = self.is_leaving or acts
            found.append(AgentFinding(one.kind, now, now, one.why, ranks, nodes, acts))
        return found

    def _hang(self, views: Sequence[RankView], at: float, unseen: int) -> Optional[AgentFinding]:
        limits = HangLimits.of(self.recovery)
        found = hung(views, self.hang_memory, limits, at=at)
        # While a rank has no beat yet, the others wait for it: its start has a limit of its own.
        if found is None or (len(views) + unseen < self.world_size and not found.culprits):
            return None
        nodes = {view.rank: view.node for view in views}
        now = time.time()
        kept = f" (stacks of all ranks in attempts/{self.paths.root.name}/evidence/stacks)"
        return AgentFinding(
            "hang" if found.acts else "blocked",
            now,
            now - found.silent_s,
            found.why + (kept if found.acts else ""),
            list(found.culprits),
            sorted({nodes[rank] for rank in found.culprits if rank in nodes}),
            acted=found.acts,
        )


def needed_nodes(layout: RunLayout) -> frozenset[str]:
    """Those that the run has taken back, for want of others."""
    try:
        return taken_back(read_node_events(layout))
    except OSError:
        return frozenset()
