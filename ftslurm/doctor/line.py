"""One line of a diagnosis: what was looked at, how it is, what to do about it. Values only."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL, SKIPPED = "ok", "warn", "fail", "skipped"
"""Fine | a run survives, but loses more than it has to | a run will be lost | could not be looked
at, and `seen` says why."""


@dataclass(frozen=True)
class Line:
    name: str
    """The same from version to version, e.g. `slurm.grace`."""
    state: str
    seen: str
    todo: str = ""
    """For whom it may concern; empty where there is nothing to do."""


def ok(name: str, seen: str) -> Line:
    return Line(name, OK, seen)


def warn(name: str, seen: str, todo: str) -> Line:
    return Line(name, WARN, seen, todo)


def fail(name: str, seen: str, todo: str) -> Line:
    return Line(name, FAIL, seen, todo)


def skipped(name: str, seen: str) -> Line:
    return Line(name, SKIPPED, seen)
