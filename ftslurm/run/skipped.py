"""Batches that a run passes over since they spoiled its loss: RUN/skipped.jsonl, added to only.

Each line names steps in the numbering of the moment when it was written; what is left of the data
then moves up, so that the run has as many steps as before. Which batches these are follows from the
lines alone, and is therefore the same for every attempt and every rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Callable

from ftslurm.files import append_record, read_records
from ftslurm.run.layout import RunLayout

Range = tuple[int, int]
"""First and last, both included."""


def note_skip(
    layout: RunLayout,
    steps: Range,
    *,
    attempt: int,
    now: Callable[[], float] = time.time,
) -> None:
    """Pass over the batches of these steps from now on; noted once an attempt."""
    if any(record["attempt"] == attempt for record in read_records(layout.skipped_jsonl)):
        return
    first, last = steps
    append_record(
        layout.skipped_jsonl, {"at": now(), "attempt": attempt, "first": first, "last": last}
    )


def read_skips(layout: RunLayout) -> list[Range]:
    """Ranges of steps, as noted."""
    return [(record["first"], record["last"]) for record in read_records(layout.skipped_jsonl)]


def skipped_batches(skips: Sequence[Range]) -> list[Range]:
    """Ranges of the run's batches, counted from 0 in the order of its data, that no step trains."""
    ranges: list[Range] = []
    for first, last in skips:
        new = [batch_of_step(step, ranges) for step in range(first, last + 1)]
        ranges = _merged([*ranges, *((batch, batch) for batch in new)])
    return ranges


def batch_of_step(step: int, ranges: Sequence[Range]) -> int:
    """The batch that step `step`, counted from 1, trains."""
    batch = step - 1
    for first, last in ranges:
        if batch >= first:
            batch += last - first + 1
    return batch


def _merged(ranges: Sequence[Range]) -> list[Range]:
    """In order, with neighbours joined."""
    joined: list[Range] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined
