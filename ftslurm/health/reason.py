"""The reason that a drain of ours gives, written and read. Pure.

    ftslurm:XID79 gpu3 0000:9b:00 boot=ab12cd34 2026-09-01T10:00:00Z

sinfo -R shows the first 20 characters: whose it is, and why. Where it takes the place of a milder
one of ours, ` since=` tells when the node was drained first, in slurmctld's own time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Optional

from ftslurm.health.verdict import Verdict

PREFIX = "ftslurm:"

_REASON = re.compile(r"ftslurm:([A-Z0-9][A-Z0-9-]*)(?: (.*))?", re.DOTALL)
_SINCE = re.compile(r" since=(\S+)\Z")
_STAMP = "%Y-%m-%dT%H:%M:%SZ"
_NOT_PLAIN = re.compile(r"[^\w./:-]")


@dataclass(frozen=True)
class Reason:
    code: str
    since: Optional[float]
    """UTC seconds; None where it is the first of this drain."""


def reason_of(verdict: Verdict, *, boot_id: str, at: float, since: Optional[float] = None) -> str:
    """Plain characters only: what a driver or a file has named is not taken at its word."""
    parts = [PREFIX + verdict.code]
    if verdict.gpu is not None:
        parts += [] if verdict.gpu.index is None else [f"gpu{verdict.gpu.index}"]
        parts += [verdict.gpu.bus] if verdict.gpu.bus else []
    elif verdict.signals and verdict.signals[0].where:
        parts.append(_NOT_PLAIN.sub("_", verdict.signals[0].where)[:40])
    parts += [f"boot={boot_id.replace('-', '')[:8]}", stamp(at)]
    parts += [] if since is None else [f"since={stamp(since)}"]
    return " ".join(parts)


def parse_reason(text: str) -> Optional[Reason]:
    """None where the reason is not of our making."""
    match = _REASON.fullmatch(text.strip())
    if match is None:
        return None
    since = _SINCE.search(text.strip())
    return Reason(match[1], parse_stamp(since[1]) if since else None)


def stamp(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).strftime(_STAMP)


def parse_stamp(text: str) -> Optional[float]:
    """UTC seconds of our own stamp, or of Slurm's, which has no zone and is asked for with TZ=UTC;
    None of `Unknown`, `None` and the like."""
    try:
        parsed = datetime.strptime(text.rstrip("Z") + "Z", _STAMP)
    except ValueError:
        return None
    return parsed.replace(tzinfo=timezone.utc).timestamp()
