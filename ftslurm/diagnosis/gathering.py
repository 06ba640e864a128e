"""One attempt, while its clues are gathered: what is known of it so far, in one place for all who
look. Whoever is out of time uses what has come.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Optional

from ftslurm.diagnosis.ask_nodes import Looks, RootsWords
from ftslurm.diagnosis.finding import Clue, Facts
from ftslurm.errors import FtslurmError
from ftslurm.run.attempts import Attempt
from ftslurm.run.layout import AttemptLayout, RunLayout
from ftslurm.run.record import RunRecord
from ftslurm.run.srun_lines import RankExit

DECISIVE = 0.8
"""Confidence in what agents and the launcher say from which Slurm's own word can hardly add."""


@dataclass
class Gathering:
    """One attempt, while its clues are gathered. What has come may be used at any time."""

    layout: RunLayout
    number: int
    deadline: float
    record: Optional[RunRecord] = None
    attempt: Optional[Attempt] = None
    nodes: dict[int, str] = field(default_factory=dict)
    offsets: dict[str, float] = field(default_factory=dict)
    """Node -> how far its clock is ahead of the leader's."""
    exits: dict[int, RankExit] = field(default_factory=dict)
    steps: set[str] = field(default_factory=set)
    """Slurm's numbers of the ranks' job steps."""
    step: Optional[int] = None
    preempted: Optional[bool] = None
    cancelled_by: Optional[str] = None
    looks: Optional[Looks] = None
    roots: Optional[RootsWords] = None
    clues: list[Clue] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)

    @property
    def paths(self) -> AttemptLayout:
        return self.layout.attempt(self.number)

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    @contextlib.contextmanager
    def source(self, what: str) -> Iterator[None]:
        """Whatever a source holds, the others are heard."""
        try:
            yield
        except (OSError, FtslurmError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.unasked.append(f"{what}: {type(error).__name__}: {error}")

    def facts(self, rc: int) -> Facts:
        job_id = (self.attempt.raw_job_id or self.attempt.job_id) if self.attempt else None
        return Facts(
            rc=rc,
            preempted=self.preempted,
            cancelled_by=self.cancelled_by,
            step=self.step,
            job_id=job_id,
            nodes=self.nodes,
            exits=self.exits,
            unasked=tuple(self.unasked),
        )

    def by_leader(self, at: Optional[float], node: Optional[str]) -> Optional[float]:
        """A time by a node's clock, by the leader's."""
        return None if at is None else at - self.offsets.get(node or "", 0.0)
