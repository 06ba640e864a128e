"""What srun says of its tasks as they end, line by line: which rank, exit code or signal.

Pure: a line in, values out. A line that is not of this kind gives nothing; nothing is guessed, and
no cause is drawn from it here.

Forms seen on Slurm 22.05, 24.11 and 26.05:

    srun: error: n2: task 3: Killed
    srun: error: n[1-2]: tasks 0-1,3: Exited with exit code 143
    srun: error: n1: task 0: Segmentation fault (core dumped)
    srun: error: n5: task 0: Out Of Memory
    srun: error: Node failure on n2

and of the local scheduler: `local_ranks: error: rank 1 left with 137; ending the rest`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Optional

_TASKS = re.compile(
    r"srun: error: (?P<node>[^\s:]+): tasks? (?P<tasks>\d[\d,-]{0,999}): (?P<end>.+?)\s*$"
)
_CODE = re.compile(r"Exited with exit code (\d+)")
_LOCAL = re.compile(r"local_ranks: error: rank (\d+) left with (\d+)")
_NODE = re.compile(r"srun: error: Node failure on ([^\s,]+)")
_CORE = " (core dumped)"

MAX_RANKS = 65_536
"""Of one range: a rank may print such a line itself, with any number in it."""

# srun prints strsignal(3) of the signal that ended a task.
_SIGNALS = {signal.strsignal(number): number.name for number in signal.Signals}


@dataclass(frozen=True)
class RankExit:
    """How one rank ended, as its launcher saw it."""

    rank: int
    node: Optional[str]
    """None: the line names several nodes, or none."""
    code: Optional[int]
    signal: Optional[str]
    """Name, e.g. SIGKILL."""
    text: str
    """The launcher's own words."""
    line: int = 0
    """Of launcher.log, from 1; 0: not from a file."""


def parse_line(text: str, *, line: int = 0) -> list[RankExit]:
    """Every rank that the line speaks of, in its order."""
    match = _TASKS.search(text)
    if match is not None:
        node = None if "[" in match["node"] or "," in match["node"] else match["node"]
        code, name = _ending(match["end"])
        return [
            RankExit(rank, node, code, name, match["end"], line) for rank in _ranks(match["tasks"])
        ]
    match = _LOCAL.search(text)
    if match is not None:
        status = int(match[2])
        name = _signal_of(status)
        code = None if name else status
        return [RankExit(int(match[1]), None, code, name, f"left with {status}", line)]
    return []


def parse_lines(lines: Iterable[str]) -> list[RankExit]:
    """First word of each rank: srun tells a task's end once, a range may repeat it."""
    told: dict[int, RankExit] = {}
    for number, text in enumerate(lines, start=1):
        for item in parse_line(text, line=number):
            told.setdefault(item.rank, item)
    return list(told.values())


def lost_node(text: str) -> Optional[str]:
    """The node that srun was told has failed."""
    match = _NODE.search(text)
    return match[1] if match else None


def _ending(words: str) -> tuple[Optional[int], Optional[str]]:
    code = _CODE.search(words)
    if code is not None:
        return int(code[1]), None
    if words == "Out Of Memory":
        return None, "SIGKILL"
    return None, _SIGNALS.get(words[: -len(_CORE)] if words.endswith(_CORE) else words)


def _signal_of(status: int) -> Optional[str]:
    """As a shell counts: 128 and the signal."""
    try:
        return signal.Signals(status - 128).name if status > 128 else None
    except ValueError:
        return None


def _ranks(text: str) -> list[int]:
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        if not low.isdigit() or not (high or low).isdigit():
            continue
        ranks.extend(range(int(low), min(int(high or low), int(low) + MAX_RANKS) + 1))
    return ranks
