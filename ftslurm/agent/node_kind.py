"""What kind of nodes the job has, asked of each node's agent once; only where there are spares.

A node whose agent ends before it has told, or never begins, is one of which nothing is known here.
A link may be down just when it is looked at, so a node whose network is not as most nodes' is asked
for that again.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Callable, Optional

from ftslurm.agent.collect import Probe, run_all
from ftslurm.agent.loop import tell
from ftslurm.agent.orders import Orders, Replies
from ftslurm.diagnosis.node_kind import DEADLINE_S, look_argv, parse
from ftslurm.run.gpu_request import ranks_use_gpus
from ftslurm.run.spec import RunSpec

LOOK_S = 1.0
WITHIN_S = DEADLINE_S + 5.0
AGAIN_S = 60.0
"""After one that has told nothing was asked."""
ODD_AGAIN_S = 300.0


@dataclass(frozen=True)
class OwnKind:
    """This node's. `library`: NVML; None: GPUs do not count."""

    interface: Optional[str]
    library: Optional[str]

    @classmethod
    def of(cls, spec: RunSpec) -> Optional[OwnKind]:
        """None: nothing is compared in this run."""
        if not spec.cluster.spares:
            return None
        library = spec.health.nvml_library if ranks_use_gpus(spec) else None
        return cls(spec.cluster.interface, library)

    def look(self, *, gpus: bool = True) -> dict[str, Any]:
        """Takes DEADLINE_S at most, and what a driver that hangs costs."""
        argv = look_argv(self.interface, self.library if gpus else None)
        (answer,) = run_all([Probe("node-kind", argv, DEADLINE_S, 64 << 10)])
        if answer.note:
            tell(f"what kind of node this is, is not all known: {answer.note}")
        return parse(bytes(answer.data))


class Inquirer:
    """`known`: node -> what it has told, filled as answers come; `live` as the leader's roll."""

    def __init__(
        self, orders: Orders, live: Callable[[], Iterable[str]], known: dict[str, dict[str, Any]]
    ) -> None:
        self._orders, self._live, self._known = orders, live, known
        self._asked_at: dict[str, float] = {}
        self._odd: set[str] = set()

    def look(self) -> None:
        """Once a second: ask those that have come."""
        live = set(self._live())
        self._ask(live - set(self._known), every_s=AGAIN_S, gpus=True)
        self._ask(live & self._odd, every_s=ODD_AGAIN_S, gpus=False)

    def _ask(self, nodes: Iterable[str], *, every_s: float, gpus: bool) -> None:
        now = time.monotonic()
        due = [node for node in nodes if now - self._asked_at.get(node, -every_s) >= every_s]
        self._asked_at.update(dict.fromkeys(due, now))
        if due:
            self._orders.give("kind", due, within_s=WITHIN_S, then=self._told, gpus=gpus)

    def _told(self, replies: Replies) -> None:
        for node, reply in replies.items():
            if isinstance(reply.get("kind"), dict):
                before = self._known.get(node, {})
                known = {"gpus": before["gpus"]} if "gpus" in before else {}
                self._known[node] = {**known, **reply["kind"]}
        # Of one whose ports nothing is known no more is asked: it may hang in a look at them.
        networks = {node: _network(kind) for node, kind in self._known.items() if "ports" in kind}
        counts = Counter(networks.values())
        self._odd = {node for node, one in networks.items() if 2 * counts[one] <= len(networks)}


def _network(kind: Mapping[str, Any]) -> str:
    return json.dumps([kind["ports"], kind.get("interface_mbps")], sort_keys=True)
