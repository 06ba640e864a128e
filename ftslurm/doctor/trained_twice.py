"""Steps that several attempts of a run have trained: were they the same where they had to be?

Reads the traces of attempts and what tells their differences, judges nothing. Samples and tokens
have to be the same whatever the number of ranks, but for steps from which on batches were passed
over between the two (run/skipped.py). The loss has to be the same to the last bit only on as many
ranks, with the same code, in a deterministic run.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import FtslurmError
from ftslurm.files import read_records
from ftslurm.run.attempts import claimed_numbers, read_attempt, read_events
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import RunSpec

_MOST_ROWS = 200_000
"""Of one trace: beyond, only what came first is compared."""


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
    at: float = 0.0
    """When the newest attempt began that trained some again."""


def read_twice(layout: RunLayout, spec: RunSpec) -> Optional[Twice]:
    """None where no step was trained again."""
    found = Twice()
    skips = [(int(one["attempt"]), int(one["first"])) for one in read_records(layout.skipped_jsonl)]
    seen: set[int] = set()
    before: dict[Hashable, Any] = {}
    num_codes = 0
    for number in claimed_numbers(layout):
        attempt = _attempt(layout, number)
        if attempt is None:
            continue
        claimed_at, ranks = attempt
        num_codes += _has_other_code(layout, number)
        for row in _rows(layout.trace_file(number)):
            step, loss = row.get("step"), row.get("loss_hex")
            if not isinstance(step, int) or loss is None:
                continue
            if step in seen:
                found.steps += 1
                found.at = max(found.at, claimed_at)
            seen.add(step)
            batches = sum(after < number and first <= step for after, first in skips)
            data = (row.get("samples"), row.get("tokens"))
            same = _compare(before, ("data", step, batches), data)
            found.data += same is not None
            found.same_data += same is True
            if spec.deterministic:
                key = ("loss", step, batches, ranks or spec.world_size, num_codes)
                same = _compare(before, key, loss)
                found.losses += same is not None
                found.same_loss += same is True
    return found if found.steps else None


def _compare(before: dict[Hashable, Any], key: Hashable, value: Any) -> Optional[bool]:
    """With what stood at `key`, which becomes `value`; None: nothing stood there."""
    same = value == before[key] if key in before else None
    before[key] = value
    return same


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


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(errors="replace") as stream:
            for number, line in enumerate(stream):
                if number >= _MOST_ROWS:
                    return
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    yield row
    except FileNotFoundError:
        return
