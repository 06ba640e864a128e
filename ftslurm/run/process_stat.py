"""What the kernel says of processes in /proc/PID/stat (proc(5)). Never raises for one that is gone.

Read as bytes: the name in parentheses may hold any byte, whatever the process has given itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional


@dataclass(frozen=True)
class ProcessStat:
    state: str
    """Its letter."""
    parent: int
    started: int
    """Clock ticks after boot."""


def process_stat(pid: int) -> Optional[ProcessStat]:
    """None: there is no such process, or it may not be seen."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The last parenthesis closes the name; fields 3, 4 and 22.
    state, parent, *rest = text.rpartition(b")")[2].split()
    return ProcessStat(state.decode(), int(parent), int(rest[17]))


def children_by_parent() -> dict[int, list[int]]:
    """Pids of all processes this user sees, other PID namespaces included, by parent."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            found = process_stat(int(entry.name))
            if found is not None:
                children.setdefault(found.parent, []).append(int(entry.name))
    return children


def descendants(pid: int, children: Mapping[int, Sequence[int]]) -> list[int]:
    """Pids of all that `pid` has started and what these have, nearest first. `children`: by
    parent."""
    found, todo = [], [pid]
    while todo:
        below = sorted(children.get(todo.pop(0), []))
        found += below
        todo += below
    return found
