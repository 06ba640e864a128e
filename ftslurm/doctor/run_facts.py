"""What earlier runs have left on record of their saves: how large, how long, in time or not.

Reads only, the newest runs first and no more of them than it is told to. What is torn, somebody
else's or half removed is passed over: it cannot tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from ftslurm.doctor.line import Line, ok, skipped, warn
from ftslurm.errors import FormatError, RunError
from ftslurm.run.attempts import STOPPED, numbers, read_events, read_outcome
from ftslurm.run.layout import AttemptLayout, RunLayout
from ftslurm.run.neighbours import newest_runs
from ftslurm.run.record import RunRecord, read_record
from ftslurm.run.wording import format_count

NUM_RUNS = 20
"""The newest of them."""


@dataclass(frozen=True)
class Past:
    """An earlier run."""

    layout: RunLayout
    record: RunRecord

    @property
    def name(self) -> str:
        return self.layout.root.name


@dataclass
class Saves:
    """`bytes`, `seconds`: of each committed save, oldest first."""

    bytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    emergency_s: list[float] = field(default_factory=list)
    """From the signal, as the ranks took note of it, to the commit."""
    had_s: list[Optional[float]] = field(default_factory=list)
    """Of the same saves: what there was for it, as Slurm said then; None: it was not asked."""
    missed: int = 0
    """Attempts that a signal asked to leave, and that left without a commit of their last step."""


def past_runs(runs_dir: Path, most: int = NUM_RUNS, *, with_tasks: bool = False) -> Iterator[Past]:
    """Newest first; `with_tasks`: those of sweeps too, of which there may be thousands."""
    for layout in newest_runs(runs_dir, most, with_tasks=with_tasks):
        try:
            yield Past(layout, read_record(layout))
        except (FormatError, RunError, OSError, ValueError):
            continue


def saves_of(layout: RunLayout, *, newest_attempts: int = 100) -> Saves:
    """The save that a signal asks for is that of the step at which it is noted; one that was under
    way then, of a step before, is a periodic one."""
    found = Saves()
    for number in numbers(layout)[-newest_attempts:]:
        found.missed += _has_missed(layout.attempt(number))
        signalled: dict[int, float] = {}
        had_s: Optional[float] = None
        for event in read_events(layout.attempt(number)):
            kind, at, step = event["kind"], float(event["at"]), event.get("step")
            if kind == "signal" and step is not None:
                signalled, had_s = {int(step): at}, None
            elif kind == "deadline":
                had_s = at - max(signalled.values(), default=at) + float(event["left_s"])
            elif kind == "committed" and "seconds" in event:
                found.bytes.append(int(event.get("bytes", 0)))
                found.seconds.append(float(event["seconds"]))
                asked_at = signalled.pop(int(event["step"]), None)
                if asked_at is not None:
                    found.emergency_s.append(max(at - asked_at, float(event["seconds"])))
                    found.had_s.append(had_s)
    return found


def _has_missed(paths: AttemptLayout) -> bool:
    """The journal says nothing of a save that its deadline has cut off; the outcome does."""
    try:
        outcome = read_outcome(paths)
    except FormatError:
        return False
    if outcome is None or outcome.result != STOPPED or outcome.signal is None:
        return False
    return outcome.committed_step != outcome.step


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank: of fewer than a hundred values the 99th percentile is the largest."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _known(values: Sequence[Optional[float]]) -> list[float]:
    return [value for value in values if value is not None]


def check_emergency_saves(runs: Sequence[Past]) -> Line:
    """p99 of what runs took to save when they were asked to leave, against what each had for it."""
    name = "runs.emergency_save"
    taken: list[float] = []
    late: list[str] = []
    least_s: Optional[float] = None
    for past in runs:
        saves, deadline_s = saves_of(past.layout), past.record.emergency_deadline_s
        taken += saves.emergency_s
        had = [deadline_s if had_s is None else had_s for had_s in saves.had_s]
        pairs = zip(saves.emergency_s, had)
        is_late = any(had_s is not None and one > had_s for one, had_s in pairs)
        late += [past.name] if saves.missed or is_late else []
        had += [deadline_s] if saves.missed else []
        least_s = min([*_known(had), *_known([least_s])], default=None)
    if late:
        return warn(
            name,
            f"{len(late)} of {len(runs)} runs could not save in time when asked to leave,"
            f" last {late[0]}",
            "the steps since the save before are lost each time; ask for a longer GraceTime or"
            " cluster.signal_lead_s, use more nodes, or save more often (checkpoint.interval_steps,"
            " checkpoint.interval_s)",
        )
    if not taken:
        told = "no run here was asked to leave yet, so nobody knows what a save takes then;"
        return skipped(name, f"{told} `ftslurm submit --wait --drill` tries it")
    told = (
        f"p99 of {format_count(len(taken), 'save')} of runs that were asked to leave:"
        f" {percentile(taken, 0.99):.1f} s"
        f"{'' if len(taken) >= 100 else ' (the slowest: there are fewer than 100)'}"
    )
    if least_s is None:
        return ok(name, told)
    return ok(name, f"{told}, and there were {least_s:.0f} s or more for it")
