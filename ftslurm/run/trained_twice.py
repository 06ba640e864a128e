"""Steps that several attempts of a run have trained: were they the same where they had to be?

Reads the traces of attempts and what tells their differences, judges nothing. Samples and tokens
have to be the same whatever the number of ranks, but for steps from which on batches were passed
over between the two (run/skipped.py). The loss has to be the same to the last bit only on as many
ranks, with the same code, in a deterministic run. Of a trace only the steps are read that another
attempt has as well: what that costs grows with what was lost, not with the run.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import FtslurmError
from ftslurm.files import read_records
from ftslurm.run.attempts import claimed_numbers, read_attempt, read_events
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import read_record
from ftslurm.run.trace_tail import first_row, last_row, rows_between

MOST_ROWS = 200_000
"""Of all traces together, the same share for each: beyond, only what came first is compared."""
_LEAST_ROWS = 100

Span = tuple[int, int]
"""First and last step, both included."""


@dataclass
class Twice:
    """Each telling of a step is compared with the newest one before that it has to be equal to."""

    steps: int = 0
    """That were trained again."""
    data: int = 0
    """Of them: those whose samples and tokens had to be the same."""
    same_data: int = 0
    losses: int = 0
    """Of them: those whose loss had to be the same."""
    same_loss: int = 0
    differ: int = 0
    """Of them: those of which the one or the other was not."""
    first_differ: Optional[tuple[int, int]] = None
    """Attempt and step."""
    differed_at: float = 0.0
    """When the newest attempt began that trained such a step."""
    at: float = 0.0
    """When the newest attempt began that trained some again."""

    @property
    def equal(self) -> int:
        """Whatever had to be the same was. A loss that is compared has data that is, too."""
        return self.data - self.differ

    @property
    def sentence(self) -> str:
        """For people: what differs; empty where nothing does."""
        if self.first_differ is None:
            return ""
        attempt, step = self.first_differ
        what = "samples or tokens" if self.same_data < self.data else "losses"
        return (
            f"{self.differ:,} of {self.data:,} steps that were trained again had other {what} than"
            f" the first time, from step {step:,} in attempt {attempt} on"
        )


def read_twice(layout: RunLayout, *, most: int = MOST_ROWS) -> Optional[Twice]:
    """None where no step was trained again, or nobody can tell. `most`: rows that are read."""
    shared = _shared(layout)
    if not any(shared.values()):
        return None
    try:
        spec = read_record(layout).spec
    except FtslurmError:
        return None
    found = Twice()
    skips = [(int(one["attempt"]), int(one["first"])) for one in read_records(layout.skipped_jsonl)]
    seen: set[int] = set()
    before: dict[Hashable, Any] = {}
    num_codes = 0
    each = max(_LEAST_ROWS, most // (sum(map(bool, shared.values())) or 1))
    for number, spans in shared.items():
        attempt = _attempt(layout, number)
        if attempt is None:
            continue
        claimed_at, ranks = attempt
        num_codes += _has_other_code(layout, number)
        for row in _rows(layout.trace_file(number), spans, each):
            step = row["step"]
            if step in seen:
                found.steps += 1
                found.at = max(found.at, claimed_at)
            seen.add(step)
            batches = sum(after < number and first <= step for after, first in skips)
            data = (row.get("samples"), row.get("tokens"))
            same = _compare(before, ("data", step, batches), data)
            found.data += same is not None
            found.same_data += same is True
            differs = same is False
            if spec.deterministic:
                key = ("loss", step, batches, ranks or spec.world_size, num_codes)
                same = _compare(before, key, row["loss_hex"])
                found.losses += same is not None
                found.same_loss += same is True
                differs = differs or same is False
            if differs:
                found.differ += 1
                found.first_differ = found.first_differ or (number, step)
                found.differed_at = max(found.differed_at, claimed_at)
    return found if found.steps else None


def _compare(before: dict[Hashable, Any], key: Hashable, value: Any) -> Optional[bool]:
    """With what stood at `key`, which becomes `value`; None: nothing stood there."""
    same = value == before[key] if key in before else None
    before[key] = value
    return same


def _shared(layout: RunLayout) -> Mapping[int, list[Span]]:
    """Attempt, oldest first -> its steps that another has as well."""
    steps: dict[int, Optional[Span]] = {}
    for number in claimed_numbers(layout):
        path = layout.trace_file(number)
        first, last = first_row(path), last_row(path)
        steps[number] = (first["step"], last["step"]) if first and last else None
    found: dict[int, list[Span]] = {}
    for number, own in steps.items():
        others = [one for other, one in steps.items() if one is not None and other != number]
        both = [] if own is None else [(max(own[0], a), min(own[1], b)) for a, b in others]
        found[number] = _joined(sorted(one for one in both if one[0] <= one[1]))
    return found


def _joined(spans: list[Span]) -> list[Span]:
    """Those that overlap as one; `spans` in order."""
    found: list[Span] = []
    for first, last in spans:
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


def _attempt(layout: RunLayout, number: int) -> Optional[tuple[float, Optional[int]]]:
    """When it began, and on how many ranks (None: as in the spec)."""
    try:
        attempt = read_attempt(layout, number)
    except (OSError, FtslurmError):
        return None
    return attempt.claimed_at, attempt.world_size


def _has_other_code(layout: RunLayout, number: int) -> bool:
    """With code=live, or modules that were built anew."""
    return any(event["kind"] == "code_changed" for event in read_events(layout.attempt(number)))


def _rows(path: Path, spans: list[Span], most: int) -> Iterator[dict[str, Any]]:
    """At most so many, and only those that have a loss."""
    for span in spans:
        for row in rows_between(path, *span):
            if most <= 0:
                return
            most -= 1
            if row.get("loss_hex") is not None:
                yield row
