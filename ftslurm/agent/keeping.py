"""What is kept of an attempt before its ranks are ended: all ranks' stacks, all nodes' own account.

Members send it, the leader writes it. A node that does not answer in time costs its part, and a
line in agents.jsonl; nothing waits longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath

from ftslurm.agent.ledger import Ledger, evidence
from ftslurm.agent.orders import Orders, Replies
from ftslurm.agent.trial import Trial

STACKS_S = 10.0
COLLECT_S = 10.0
"""What the tools of a node may take together before a hung attempt is ended."""
BRIEF_S = 2.0
"""After an ordinary failure: the next attempt waits for it."""
MARGIN_S = 1.0
"""The way there and back."""

Then = Callable[[], None]


class Keeping:
    """`missed`: told of a node that has sent nothing, and of what."""

    def __init__(self, orders: Orders, ledger: Ledger, missed: Callable[[str, str], None]) -> None:
        self._orders, self._ledger, self._missed = orders, ledger, missed

    def stacks(self, trial: Trial, nodes: Iterable[str], then: Then) -> None:
        """Into evidence/stacks, a file a rank."""
        keep = self._keep(trial, list(nodes), "stacks", "stacks", then)
        self._orders.give("stacks", nodes, within_s=STACKS_S, then=keep, attempt=trial.number)

    def nodes(self, trial: Trial, nodes: Iterable[str], for_s: float, then: Then) -> None:
        """Into evidence/nodes, a file a node; once an attempt."""
        trial.is_collected = True
        keep = self._keep(trial, list(nodes), "collected", "nodes", then)
        self._orders.give(
            "collect",
            nodes,
            within_s=for_s + MARGIN_S,
            then=keep,
            attempt=trial.number,
            for_s=for_s,
        )

    def _keep(
        self, trial: Trial, nodes: list[str], key: str, folder: str, then: Then
    ) -> Callable[[Replies], None]:
        def keep(replies: Replies) -> None:
            for node in nodes:
                texts: Mapping[str, str] = replies.get(node, {}).get(key, {})
                for name, text in texts.items():
                    # As the member named it, within this folder whatever it says.
                    path = evidence(trial.paths) / folder / PurePosixPath(name).name
                    self._ledger.text(path, text)
                if not texts:
                    self._missed(node, folder)
            then()

        return keep
