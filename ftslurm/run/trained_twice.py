"""Steps that several attempts of a run have trained: were they the same where they had to be?

Reads the traces of attempts and what tells their differences, judges nothing. Samples and tokens
have to be the same whatever the number of ranks, but for steps from which on batches were passed
over between the two (run/skipped.py). The loss has to be the same to the last bit only on as many
ranks, with the same code, in a deterministic run. Of a trace only the steps are read that another
attempt has as well, some thousand at a time, the newest first: the time grows with what was lost,
the memory with neither that nor the run.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from ftslurm.errors import FtslurmError
from ftslurm.files import read_records
from ftslurm.run.attempts import claimed_numbers, read_attempt, read_events
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import read_record
from ftslurm.run.trace_tail import first_row, last_row, rows_between

_BLOCK_STEPS = 4_000
"""Held at a time."""

Span = tuple[int, int]
"""First and last step, both included."""


@dataclass(frozen=True)
class _Telling:
    """An attempt and its steps."""

    number: int
    steps: Span
    claimed_at: float
    ranks: int
    num_codes: int
    """With code=live, or modules that were built anew: how often it was another one by then."""


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
    from_step: Optional[int] = None
    """Where not all were compared: from this one on. None: all were."""

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
            f" the first time, from step {step:,} in attempt {attempt} on{self._compared}"
        )

    @property
    def _compared(self) -> str:
        if self.from_step is None:
            return ""
        return f" (those before step {self.from_step:,} are compared by `ftslurm report`)"


def read_twice(layout: RunLayout, *, most: Optional[int] = None) -> Optional[Twice]:
    """None where no step was trained again, or nobody can tell. `most`: rows that are read, of the
    newest steps; None: all."""
    spans = _spans(layout)
    again = _again(list(spans.values()))
    if not again:
        return None
    try:
        spec = read_record(layout).spec
    except FtslurmError:
        return None
    tellings = list(_tellings(layout, spans, spec.world_size))
    skips = [(int(one["attempt"]), int(one["first"])) for one in read_records(layout.skipped_jsonl)]
    found, left = Twice(), most
    for first, last in _blocks(again):
        here = [one for one in tellings if _common(one.steps, (first, last))]
        begin = first
        if left is not None and here:
            begin = max(first, last + 1 - left // len(here))
            left -= (last + 1 - begin) * len(here)
        if begin <= last:
            _add_block(found, layout, here, (begin, last), skips, spec.deterministic)
        if begin > first:
            found.from_step = begin
            break
    return found if found.steps else None


def _add_block(
    found: Twice,
    layout: RunLayout,
    tellings: Sequence[_Telling],
    steps: Span,
    skips: Sequence[tuple[int, int]],
    is_deterministic: bool,
) -> None:
    """`tellings`: in order. No block has anything to do with another."""
    seen: set[int] = set()
    before: dict[Hashable, Any] = {}
    for one in tellings:
        for row in rows_between(layout.trace_file(one.number), *steps):
            if row.get("loss_hex") is None:
                continue
            step = row["step"]
            if step in seen:
                found.steps += 1
                found.at = max(found.at, one.claimed_at)
            seen.add(step)
            batches = sum(after < one.number and first <= step for after, first in skips)
            data = (row.get("samples"), row.get("tokens"))
            same = _compare(before, ("data", step, batches), data)
            found.data += same is not None
            found.same_data += same is True
            differs = same is False
            if is_deterministic:
                key = ("loss", step, batches, one.ranks, one.num_codes)
                same = _compare(before, key, row["loss_hex"])
                found.losses += same is not None
                found.same_loss += same is True
                differs = differs or same is False
            if differs:
                found.differ += 1
                found.first_differ = min(
                    found.first_differ or (one.number, step), (one.number, step)
                )
                found.differed_at = max(found.differed_at, one.claimed_at)


def _compare(before: dict[Hashable, Any], key: Hashable, value: Any) -> Optional[bool]:
    """With what stood at `key`, which becomes `value`; None: nothing stood there."""
    same = value == before[key] if key in before else None
    before[key] = value
    return same


def _spans(layout: RunLayout) -> dict[int, Span]:
    """Attempt, oldest first -> its steps, where it has any."""
    found = {}
    for number in claimed_numbers(layout):
        path = layout.trace_file(number)
        first, last = first_row(path), last_row(path)
        if first and last and first["step"] <= last["step"]:
            found[number] = (first["step"], last["step"])
    return found


def _again(spans: Sequence[Span]) -> list[Span]:
    """What lies in several of them, in order; what touches is one."""
    edges = sorted(edge for first, last in spans for edge in ((first, 1), (last + 1, -1)))
    found: list[Span] = []
    depth = 0
    for at, change in edges:  # at one place ends come before begins
        if depth + change == 2 and change == 1:
            begins = at
            if found and found[-1][1] == at - 1:
                begins = found.pop()[0]
            found.append((begins, at))
        elif depth == 2 and change == -1:
            found[-1] = (found[-1][0], at - 1)
        depth += change
    return found


def _blocks(spans: Sequence[Span]) -> Iterator[Span]:
    """The newest steps first."""
    for first, last in reversed(spans):
        while last >= first:
            yield max(first, last + 1 - _BLOCK_STEPS), last
            last -= _BLOCK_STEPS


def _common(one: Span, other: Span) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def _tellings(layout: RunLayout, spans: Mapping[int, Span], world_size: int) -> Iterator[_Telling]:
    """Of attempts whose record can be read."""
    num_codes = 0
    for number in claimed_numbers(layout):
        try:
            attempt = read_attempt(layout, number)
        except (OSError, FtslurmError):
            continue
        events = read_events(layout.attempt(number))
        num_codes += any(event["kind"] == "code_changed" for event in events)
        if number in spans:
            ranks = attempt.world_size or world_size
            yield _Telling(number, spans[number], attempt.claimed_at, ranks, num_codes)
