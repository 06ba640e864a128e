"""A clue as some row of the table reads it, and how readings are compared. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from ftslurm.diagnosis.finding import Clue
from ftslurm.diagnosis.signatures import (
    HEALTH,
    LAUNCHER,
    LOG,
    NODE_STATE,
    RANK_ERROR,
    UNCLEAR,
    Signature,
)

_PROGRAM = "ProgramFailed:"
_WRAPPER = "wrapper"


@dataclass(frozen=True)
class Reading:
    """A clue and the row that it was read by."""

    clue: Clue
    row: Signature
    trust: int
    place: int
    """Of the row in its table."""
    node: Optional[str]
    rank: Optional[int]
    told: str = ""
    """What is to be said of a sick node."""
    fault: str = ""
    """By which a GPU names a fault of the program."""

    @property
    def is_echo(self) -> bool:
        return self.row.cause is None

    @property
    def is_of_launcher(self) -> bool:
        """Only how the user's program ended: its log says why."""
        return self.row.trust_in(RANK_ERROR) >= UNCLEAR and self.clue.text.startswith(_PROGRAM)

    @property
    def code(self) -> str:
        """Of what speaks against its node's health; empty: nothing does."""
        is_of_health = self.row.is_sick and self.clue.kind in (HEALTH, NODE_STATE)
        return self.told.partition(" ")[0].replace("ftslurm:", "") if is_of_health else ""

    @property
    def order(self) -> tuple[float, ...]:
        at = math.inf if self.clue.at is None else self.clue.at
        line = self.clue.line or 0
        rank = math.inf if self.rank is None else self.rank
        if self.clue.kind == LAUNCHER:  # srun prints ends in the order in which it hears of them
            return (self.trust, at, line, self.place, rank)
        return (self.trust, at, self.place, rank, line)


def without_lost_programs(readings: Sequence[Reading]) -> list[Reading]:
    """Without the ends of programs that have only lost a peer: `ended with code 1`, and in the log
    not a word but of that."""
    in_logs = [item for item in readings if item.clue.kind == LOG and item.row.name != _WRAPPER]
    lost = {item.rank for item in in_logs if item.is_echo and not item.clue.is_past}
    lost -= {item.clue.rank for item in in_logs if not item.is_echo}
    return [
        item
        for item in readings
        if item.rank not in lost or not (item.is_of_launcher and item.trust == UNCLEAR)
    ]
