"""Where the time of an attempt went, and what of it lies in a window. Pure.

No record says when a step was. An attempt starts, trains, and what is lost are its last steps; what
is left over, such as a hang or the end of the job, lies behind them. Stops for saves are spread
over the training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from ftslurm.report.fleet import Goodput
from ftslurm.report.step_times import StepTimes


@dataclass(frozen=True)
class Phases:
    """In seconds, in the order in which they come."""

    start_at: float
    elapsed_s: float
    restart_s: float
    trained_s: float
    stall_s: float
    lost_s: float

    def within(self, since: Optional[float], until: Optional[float]) -> Goodput:
        """Of one node."""
        begin_s = 0.0 if since is None else max(0.0, since - self.start_at)
        end_s = self.elapsed_s
        if until is not None:
            end_s = min(end_s, until - self.start_at)
        found, at_s, train_s = [], 0.0, self.trained_s + self.stall_s
        for took_s in (self.restart_s, train_s, self.lost_s):
            found.append(max(0.0, min(at_s + took_s, end_s) - max(at_s, begin_s)))
            at_s += took_s
        restart_s, train_within_s, lost_s = found
        stall_s = train_within_s * self.stall_s / train_s if train_s else 0.0
        return Goodput(
            trained_s=train_within_s - stall_s,
            lost_s=lost_s,
            stall_s=stall_s,
            restart_s=restart_s,
            other_s=max(0.0, end_s - begin_s - sum(found)),
        )


def phases(
    start_at: Optional[float],
    elapsed_s: float,
    times: StepTimes,
    events: Sequence[Mapping[str, object]],
    *,
    steps_lost: int,
    last_step: int,
) -> Phases:
    """`events`: the journal of the attempt."""
    lost_s = times.last_s(min(steps_lost, len(times.seconds)))
    saved = [int(str(event["step"])) for event in events if event["kind"] == "committed"]
    stall_s = times.stall_s(saved, until=last_step - steps_lost)
    return Phases(
        start_at=start_at or 0.0,
        elapsed_s=elapsed_s,
        restart_s=_starting_s(start_at, elapsed_s, events, times),
        trained_s=max(0.0, times.total_s - lost_s - stall_s),
        stall_s=stall_s,
        lost_s=lost_s,
    )


def _starting_s(
    start_at: Optional[float],
    elapsed_s: float,
    events: Sequence[Mapping[str, object]],
    times: StepTimes,
) -> float:
    """From its begin until it trained; all of it where it never did."""
    first = next((event for event in events if event["kind"] == "first_step"), None)
    if start_at is None:
        return 0.0
    untrained_s = max(0.0, elapsed_s - times.total_s)
    if first is None:
        return 0.0 if times.seconds else untrained_s
    at = float(str(first["at"])) - (times.seconds[0] if times.seconds else 0.0)
    return min(untrained_s, max(0.0, at - start_at))
