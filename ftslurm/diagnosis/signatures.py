"""How a line of text that a failure left is read: the form of a table row, and the look-up.

Pure. The rows are data, in signatures_system.py (Slurm, kernel, agents) and signatures_ranks.py
(exceptions and libraries); within a kind of clue the first row that matches wins. A row without a
cause stands for an echo: the end of another rank, a teardown, or words that say nothing by
themselves. Advice that libraries print with their errors is taken out before anything is matched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Optional

# Kinds of clues, by where they were found.
RANK_ERROR = "rank_error"
LOG = "log"
LAUNCHER = "launcher"
ACCOUNTING = "accounting"
NODE_STATE = "node_state"
AGENT = "agent"
KERNEL = "kernel"
HEALTH = "health"
KINDS = (RANK_ERROR, LOG, LAUNCHER, ACCOUNTING, NODE_STATE, AGENT, KERNEL, HEALTH)

# Trust, most trusted first: whatever is found at a lower number is the root.
STATE = 10
"""Slurm's word for the end of this very run of the job."""
STEPD = 20
"""What slurmstepd or srun says of a step, a node that is down, a node that two agents lost."""
HARDWARE = 30
"""Kernel and NVML of a node in the time of the attempt."""
RANK = 40
"""An exception or a deadly signal of a rank; among them the earliest counts."""
SOMEBODYS = 42
"""The kernel's word on a process of the node that may be another job's."""
UNCLEAR = 44
"""An exception that no row knows: it may be the consequence of a known one."""
WATCHED = 46
"""What agents found while no rank had ended."""
KILLED_FIRST = 48
"""The first rank to end was killed by somebody unknown."""
TEXT = 50
"""What communication libraries print: mostly the consequence of an end that they cannot see."""
WEAK = 60
"""Believed only when there is nothing else."""
LAST = 70
"""An exit code and not a word."""

_BY_KIND = {ACCOUNTING: STATE, LAUNCHER: STEPD, NODE_STATE: WEAK, AGENT: WATCHED,
            KERNEL: HARDWARE, HEALTH: HARDWARE, RANK_ERROR: RANK, LOG: TEXT}  # fmt: skip

# A library's guess at a cause is no sign of it (NVRx TAXONOMY.md: advice is no anchor).
_ADVICE = (
    "might be asynchronously reported", "stacktrace below might be", "may be caused",
    "might be caused", "can be caused", "could be caused", "also be caused", "may be due",
    "might be due", "can be due", "could be due", "due to reason", "possible reason",
    "most likely", "it is possible that", "possibly due to", "for debugging", "compile with",
    "try setting", "consider setting", "consider passing", "consider using", "by setting",
    "try to", "please try", "please check", "please make sure", "please raise", "please refer",
    "please see", "see documentation", "if reserved but unallocated", "hint:", "may indicate",
    "can be a sign of", "you can set", "you can increase", "increase the timeout",
    # It has not given up.
    "retrying", "retry loop", "will retry", "will be retried", "trying again",
)  # fmt: skip
_GAVE_UP = re.compile(r"\b(after|up|stopped) retrying")
_SENTENCES = re.compile(r"(?<=[.!?;])\s+|\n")
_LAST_ERROR = re.compile(r"Last error:\s*(.+)", re.DOTALL)
_PREFIX = re.compile(r"^(?:\[rank\d+\]:\s?)+")


@dataclass(frozen=True)
class Signature:
    """One row of the table."""

    name: str
    pattern: str
    """Searched in the text, line by line."""
    cause: Optional[str]
    """None: an echo."""
    source: str
    """Where the text and its meaning come from; `judgement`: nowhere."""
    confidence: float = 0.8
    trust: Optional[int] = None
    """None: that of the kind of clue."""
    context: Optional[str] = None
    """Has to be found too, in the text or in what came with it (the traceback)."""
    is_sick: bool = False
    """The node that it comes from is not to be used again, whatever ended the attempt."""

    def matches(self, text: str, context: str) -> Optional[re.Match[str]]:
        found = _compiled(self.pattern).search(text)
        if found is None or self.context is None:
            return found
        surrounding = f"{text}\n{context}"
        return found if _compiled(self.context).search(surrounding) else None

    def trust_in(self, kind: str, *, ends_traceback: bool = False) -> int:
        if kind == LOG and self.trust in (None, UNCLEAR):
            unclear = self.trust == UNCLEAR
            return (UNCLEAR if unclear else RANK) if ends_traceback else (WEAK if unclear else TEXT)
        if self.trust is not None:
            return self.trust
        return _BY_KIND[kind]


Table = Mapping[str, Sequence[Signature]]
"""Kind of clue -> its rows, in order."""


def look_up(
    rows: Sequence[Signature], text: str, context: str = ""
) -> Optional[tuple[Signature, re.Match[str]]]:
    """The first row that fits what is left of `text` without advice."""
    words = without_advice(text)
    if context and not words.strip():
        words = text.partition(":")[0]  # whatever it advises, it has been raised
    # NCCL's own summary says little, its `Last error:` names what failed.
    last = _LAST_ERROR.search(words)
    for part in (last[1], words) if last else (words,):
        for row in rows:
            found = row.matches(part, context)
            if found is not None:
                return row, found
    return None


def without_advice(text: str) -> str:
    kept = []
    for line in text.splitlines():
        line = _PREFIX.sub("", line)
        if _is_advice(line):
            line = " ".join(part for part in _SENTENCES.split(line) if not _is_advice(part))
        kept.append(line)
    return "\n".join(kept)


def _is_advice(text: str) -> bool:
    text = _GAVE_UP.sub("", text.lower())
    return any(words in text for words in _ADVICE)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE)
