"""What the ranks of a preflight do next, told by rank 0 from all that was tried so far. Pure.

Everybody tries its device alone, nodes meet in rounds of pairs, and all go on trying alone while
somebody is apart from the others, who may have had bad luck.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from ftslurm.health.pairwise import Limits, Pair, Trial, apart, next_round, worst

MOST_GOES = 4
"""Two of everybody; more for somebody who is apart."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One thing that all do, and whose outcome all tell."""

    number: int
    pairs: Optional[list[Pair]] = None
    """Who meets whom; None: each is alone."""

    @property
    def name(self) -> str:
        return f"go {self.number}" if self.pairs is None else f"round {self.number}"


FIRST = Step(1)


def step_of(record: Mapping[str, Any]) -> Step:
    pairs = record["pairs"]
    return Step(record["number"], pairs and [(one, other) for one, other in pairs])


class Course:
    """Rank 0's account."""

    def __init__(self, limits: Limits, say: Callable[..., None]) -> None:
        self._limits, self._say = limits, say
        self._trials: list[Trial] = []
        self._failed: set[str] = set()
        """Whoever has failed alone at first would only keep its partners waiting."""

    def after(
        self, step: Step, told: Mapping[int, Any], nodes: Sequence[str]
    ) -> Optional[dict[str, Any]]:
        """The step after `step`, as a record; None: the end. `told`: rank -> its trials and what
        they took; `nodes`: whose ranks are all there, in the order of ranks."""
        trials = self._take(told)
        if step == FIRST:
            self._failed = {trial.nodes[0] for trial in trials if trial.seconds is None}
        following = self._next(step, [node for node in nodes if node not in self._failed])
        return None if following is None else dataclasses.asdict(following)

    def _next(self, step: Step, nodes: Sequence[str]) -> Optional[Step]:
        met = 0 if step.pairs is None else step.number
        if step == FIRST or step.pairs is not None:
            pairs = next_round(nodes, self._trials, self._limits, met)
            return Step(met + 1, pairs) if pairs else Step(2)
        is_enough = step.number == MOST_GOES or not apart(self._trials, self._limits)
        return None if is_enough else Step(step.number + 1)

    def _take(self, told: Mapping[int, Any]) -> list[Trial]:
        """Said and kept; what several had together as one."""
        together: dict[tuple[Any, ...], list[Trial]] = {}
        took: dict[str, float] = {}
        for records, seconds in told.values():
            for record in records:
                trial = Trial(**{**record, "nodes": tuple(record["nodes"])})
                together.setdefault((trial.what, trial.nodes, trial.rank), []).append(trial)
            for part, spent_s in seconds.items():
                took[part] = max(took.get(part, 0.0), spent_s)
        trials = [worst(trials) for trials in together.values()]
        for trial in trials:
            self._say("trial", trial=dataclasses.asdict(trial))
        self._say("took", seconds=took)
        self._trials += trials
        return trials
