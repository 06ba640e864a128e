"""A look at hardware that may hang, made in a child: what was read before it hung is kept.

The looker emits one JSON line for each thing it has read, and before each call into the hardware
the name of that call; the last name is the call that did not come back. The parent turns the lines
into the contract's values again and never trusts them: the child may have died in the middle of
one, or a library may have printed into it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional, Union

from ftslurm.errors import FormatError
from ftslurm.health.child import Ended, run_function
from ftslurm.health.signals import KINDS, Failure, Gpu, Signal, parse_reading


class Emitter:
    """Given to the looker: `emit` what was read, `calling` before what may hang."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write

    def emit(self, thing: Union[Gpu, Signal, Failure]) -> None:
        name = {Gpu: "gpus", Signal: "signals", Failure: "failures"}[type(thing)]
        record = dict(vars(thing))  # asdict, which copies deeply, is most of the time of a look
        if record.get("gpu") is not None:
            record["gpu"] = vars(record["gpu"])
        self._line({name: record})

    def calling(self, call: str) -> None:
        self._line({"calling": call})

    def _line(self, record: dict[str, Any]) -> None:
        # A newline in front too: what somebody else has printed then spoils a line of its own.
        self._write(b"\n" + json.dumps(record, allow_nan=False).encode() + b"\n")


@dataclass
class Parts:
    """What a look has read, as much as came back."""

    gpus: list[Gpu] = field(default_factory=list)
    signals: list[Signal] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    last_call: str = ""
    """The call it was in at its end."""
    abandoned: Optional[tuple[int, str]] = None
    """Pid and start of a child that cannot be killed: look again only when `child.is_running` says
    that it is gone."""


def look_in_child(
    looker: Callable[[Emitter], None], *, source: str, deadline_s: float
) -> tuple[Parts, Ended]:
    """Run `looker` with a deadline. One that is late or dies leaves a Failure of `source`."""

    def body(write: Callable[[bytes], None]) -> None:
        looker(Emitter(write))

    ended = run_function(body, deadline_s=deadline_s)
    parts = parse_lines(ended.stdout)
    call = f" in {parts.last_call}" if parts.last_call else ""
    if ended.is_abandoned:
        parts.abandoned = (ended.pid, ended.start_ticks)
    if ended.is_late:
        parts.failures.append(
            Failure(source, f"{source} did not answer within {deadline_s:g} s{call}")
        )
    elif ended.code != 0:
        said = ended.stderr.decode(errors="replace").strip()[-200:]
        parts.failures.append(
            Failure(source, f"reading {source} ended with {ended.code}{call}: {said or 'no word'}")
        )
    elif ended.is_cut:
        parts.failures.append(Failure(source, f"{source} had more to say than is read"))
    return parts, ended


def parse_lines(data: bytes) -> Parts:
    """What the lines say; a line that is none of ours, or torn, is left out."""
    parts = Parts()
    for line in data.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict) or len(record) != 1:
            continue
        name, value = next(iter(record.items()))
        if name == "calling" and isinstance(value, str):
            parts.last_call = value
        elif name in ("gpus", "signals", "failures"):
            _take(parts, name, value)
    return parts


def _take(parts: Parts, name: str, value: Any) -> None:
    whole: dict[str, Any] = {"gpus": [], "signals": [], "failures": [], name: [value]}
    try:
        reading = parse_reading({"boot_id": "", "host": "", "context": "", "at": 0.0, **whole})
    except FormatError:
        return
    parts.gpus.extend(reading.gpus)
    parts.failures.extend(reading.failures)
    for signal in reading.signals:
        if signal.kind in KINDS and isinstance(signal.value, (bool, int, float, str)):
            parts.signals.append(signal)
