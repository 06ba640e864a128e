"""The error records that ranks left of an attempt, read within a bound of time and number.

What is listed and cannot be read is tried again for as long as the time lasts, never longer: a
grace period may be running, and each of 10,000 records may be on a file system that has gone away.
A torn record counts as absent.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import FormatError
from ftslurm.files import VIEW_LAG_S, Patience, read_json
from ftslurm.run.layout import AttemptLayout

PAUSE_S = 0.1

_NAME = re.compile(r"rank-(\d+)\.json")


@dataclass
class RankErrors:
    """What the ranks of an attempt have said of their ends."""

    records: list[tuple[Path, dict[str, Any]]] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    """Of all records that are there, read or not."""
    unread: int = 0


def read_rank_errors(
    paths: AttemptLayout,
    *,
    within_s: float,
    most: Optional[int] = None,
    first: Sequence[int] = (),
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> RankErrors:
    """Those of `first` first, in that order, then by rank; `most` of them at most."""
    until = clock() + within_s
    by_rank = {
        int(found[1]): path
        for path in paths.ranks.glob("rank-*.json")
        if (found := _NAME.fullmatch(path.name)) is not None
    }
    order = dict.fromkeys([*(rank for rank in first if rank in by_rank), *sorted(by_rank)])
    found_all = RankErrors(ranks=set(by_rank))
    left = [by_rank[rank] for rank in order]
    found_all.unread = len(left) - len(left[:most])
    left = left[:most]
    while left and clock() < until:
        left = _read(left, found_all, until, clock)
        if left and clock() < until:
            sleep(PAUSE_S)
    found_all.unread += len(left)
    return found_all


def _read(
    wanted: Sequence[Path], into: RankErrors, until: float, clock: Callable[[], float]
) -> list[Path]:
    """Those that could not be read (yet)."""
    at_once = Patience(is_past_lag=True, error_s=VIEW_LAG_S)
    left: list[Path] = []
    for index, path in enumerate(wanted):
        if clock() >= until:
            return [*left, *wanted[index:]]
        try:
            into.records.append((path, read_json(path, patience=at_once)))
        except FormatError:
            continue
        except OSError:
            left.append(path)
    return left
