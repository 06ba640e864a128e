"""What a preflight has found, from the lines of its ranks. Pure.

A rank that says that the preflight broke there is no finding about its node. One that says nothing
any more, while most went on, is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from ftslurm.health.pairwise import WORDS, Limits, Trial, judge
from ftslurm.run.attempts import node_of

CLEAN, NAMED, OPEN, BROKEN = "clean", "named", "open", "broken"
"""Nothing was found; nodes are named; something was seen and nobody is named; it did not come so
far as to find anything."""


@dataclass
class Heard:
    """What the ranks have said so far."""

    here: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    """Ranks that have said their last word, whichever."""
    doing: dict[int, str] = field(default_factory=dict)
    """Rank -> what it last began."""
    absent: set[int] = field(default_factory=set)
    """Ranks that the others went on without."""
    unanswered: set[int] = field(default_factory=set)
    """To whom rank 0 gave no answer."""
    broken: dict[int, str] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Part -> what it took, of the rank that needed longest."""
    stopped_by: str = ""
    """Signal that a rank was asked to leave by."""
    all_ended: bool = False
    """By srun's word: each process has left with 0, whatever of its last words was torn."""

    def add(self, told: Mapping[str, Any], *, at_s: float) -> None:
        """`at_s`: seconds since the start."""
        kind, rank = told["kind"], int(told["rank"])
        if kind == "here":
            self.here.add(rank)
            self.seconds["start"] = at_s
        elif kind == "doing":
            self.doing[rank] = str(told["part"])
        elif kind == "absent":
            self.absent.add(int(told["who"]))
        elif kind == "trial":
            record = told["trial"]
            self.trials.append(Trial(**{**record, "nodes": tuple(record["nodes"])}))
        elif kind == "took":
            for part, seconds in told["seconds"].items():
                self.seconds[part] = self.seconds.get(part, 0.0) + float(seconds)
        elif kind == "stopped":
            self.stopped_by = self.stopped_by or str(told["signal"])
        elif kind == "unanswered":
            self.unanswered.add(rank)
        elif kind == "broken":
            self.broken[rank] = str(told["why"])
        if kind in ("end", "stopped", "unanswered", "broken"):
            self.ended.add(rank)


@dataclass(frozen=True)
class Report:
    """As it goes on record."""

    word: str
    count: int
    """Of nodes."""
    bad: dict[str, str]
    links: list[tuple[str, str]]
    notes: list[str]
    seconds: dict[str, float]
    best: list[dict[str, Any]]
    """Of each node or rank its best time at each part, so that a factor can be judged later."""

    def record(self) -> dict[str, Any]:
        return {
            "word": self.word,
            "bad": self.bad,
            "links": [list(link) for link in self.links],
            "notes": self.notes,
            "seconds": {part: round(seconds, 3) for part, seconds in self.seconds.items()},
            "best": self.best,
        }

    def sentences(self) -> list[str]:
        said = [f"node {node} is left out: {what}" for node, what in self.bad.items()]
        said += [f"the link between {one} and {other} is slow" for one, other in self.links]
        return [*said, *self.notes] or ["nothing was found"]


def report(heard: Heard, nodes: Sequence[str], tasks_per_node: int, limits: Limits) -> Report:
    """`nodes`: those that ranks run on, in the order of ranks."""
    silent = _silent(heard, nodes, tasks_per_node)
    found = judge(heard.trials, limits, nodes=nodes, silent=silent)
    broken = {node_of(nodes, rank, tasks_per_node) for rank in heard.broken}
    bad = {node: what for node, what in found.bad.items() if node not in broken}
    notes = [*found.notes, *_broken(heard, nodes, tasks_per_node)]
    word = CLEAN
    if bad:
        word = NAMED
    elif not heard.trials:
        word = BROKEN
    elif notes or found.links:
        word = OPEN
    return Report(word, len(nodes), bad, found.links, notes, heard.seconds, _best(heard.trials))


def _silent(heard: Heard, nodes: Sequence[str], tasks_per_node: int) -> dict[str, str]:
    """Node -> how it fell silent."""
    if heard.all_ended:
        return {}
    told: dict[str, str] = {}
    if 2 * len(heard.unanswered) > len(heard.here) and 0 not in heard.ended:
        told[nodes[0]] = f"it stopped answering{_during(heard, 0)}"
    missing = set(heard.absent)
    if 2 * len(heard.ended) > len(heard.here):
        missing |= heard.here - heard.ended
    for rank in sorted(missing):
        node = node_of(nodes, rank, tasks_per_node)
        if node is None or rank in heard.broken or rank in heard.unanswered:
            continue
        if rank in heard.here:
            told.setdefault(node, f"it stopped answering{_during(heard, rank)}")
        else:
            told.setdefault(node, "it had not come when the others no longer waited for it")
    return told


def _during(heard: Heard, rank: int) -> str:
    part = heard.doing.get(rank)
    return f" in {WORDS[part]}" if part in WORDS else ""


def _broken(heard: Heard, nodes: Sequence[str], tasks_per_node: int) -> list[str]:
    """A sentence for each way in which it broke."""
    ways: dict[str, list[str]] = {}
    for rank, why in sorted(heard.broken.items()):
        ways.setdefault(why, []).append(node_of(nodes, rank, tasks_per_node) or f"rank {rank}")
    return [
        f"the preflight itself failed on {', '.join(dict.fromkeys(where))}: {why}"
        for why, where in ways.items()
    ]


def _best(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    best: dict[tuple[str, str, Optional[int]], float] = {}
    for trial in trials:
        for node in trial.nodes:
            key = (trial.what, node, trial.rank)
            if trial.seconds is not None:
                best[key] = min(trial.seconds, best.get(key, trial.seconds))
    return [
        {"what": what, "node": node, "rank": rank, "ms": round(seconds * 1000, 4)}
        for (what, node, rank), seconds in best.items()
    ]
