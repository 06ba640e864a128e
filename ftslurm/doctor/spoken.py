"""Orders to the tasks of a trial and their answers, as lines. Pure.

Answers may be longer than what srun hands on whole, so they come in pieces that name their task.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from ftslurm.scheduler.on_nodes import in_pieces

_MARK = "ftslurm-doctor"


@dataclass(frozen=True)
class Answer:
    task: int
    order: int
    """Number of the order that is answered."""
    facts: dict[str, Any]


@dataclass
class Pieces:
    """Of answers that are not whole yet."""

    _parts: dict[tuple[int, int], dict[int, str]] = field(default_factory=dict)

    def add(self, line: str) -> Optional[Answer]:
        """The answer that this line makes whole; None for any other line, whoever printed it."""
        words = line.rstrip("\n").split(" ", 5)
        if len(words) != 6 or words[0] != _MARK or not all(word.isdigit() for word in words[1:5]):
            return None
        task, order, place, count = (int(word) for word in words[1:5])
        parts = self._parts.setdefault((task, order), {})
        parts[place] = words[5]
        if len(parts) < count:
            return None
        del self._parts[task, order]
        try:
            return Answer(task, order, json.loads("".join(parts[n] for n in range(count))))
        except (KeyError, ValueError):
            return None


def answer_lines(task: int, order: int, facts: Mapping[str, Any]) -> list[str]:
    pieces = in_pieces(json.dumps(facts))
    return [
        f"{_MARK} {task} {order} {place} {len(pieces)} {piece}"
        for place, piece in enumerate(pieces)
    ]


def order_line(number: int, what: str, values: Mapping[str, Any]) -> str:
    return json.dumps({"number": number, "do": what, **values})
