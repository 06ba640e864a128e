"""The per-step trace of a run: one JSON line a step, one file an attempt, written by rank 0 alone.

Standard library only, so that any command may read it. A row is handed to the kernel in one write
before the next step begins: killing the process loses none and tears none, and a row that a full
disk tears takes none beside it along. Only `close` makes the rows durable; a power cut may cost the
last of them, never a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import FormatError, UsageError
from ftslurm.files import fsync_folder
from ftslurm.run.layout import RunLayout

SCHEMA_VERSION = 1

_NAME = re.compile(r"attempt-([0-9]+)\.jsonl\Z")


@dataclass(frozen=True)
class TraceRow:
    """What one step left behind."""

    step: int
    """Steps applied once this one was: 1 for the first of a run."""
    loss: float
    """Global mean, exact: it is kept as `float.hex`."""
    samples: int
    """Consumed by the run so far, over all ranks."""
    tokens: int
    """Consumed by the run so far, over all ranks."""
    seconds: float
    """Wall time of the step."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Further scalars: lr, grad_norm, ..."""
    attempt: int = 0


class TraceWriter:
    """Appends rows to one attempt's file, which is made with the first of them that can be."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: Optional[int] = None
        self._is_torn = False

    def append(self, row: TraceRow) -> None:
        """OSError when the row is lost; the next one begins on a line of its own."""
        data = render_row(row)
        if self._fd is None:
            self._fd = self._open()
        if self._is_torn:
            data = b"\n" + data
        self._is_torn = True
        while data:
            data = data[os.write(self._fd, data) :]
        self._is_torn = False

    def close(self) -> None:
        """Durable on return."""
        if self._fd is None:
            return
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)
        fsync_folder(self._path.parent)

    def _open(self) -> int:
        self._path.parent.mkdir(exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(self._path, flags, 0o644)


def render_row(row: TraceRow) -> bytes:
    """One line: the loss as hexadecimal (exact) and as decimal (for people; null if not finite)."""
    record = {
        "schema_version": SCHEMA_VERSION,
        "step": row.step,
        "loss_hex": row.loss.hex(),
        "loss": _finite(row.loss),
        "samples": row.samples,
        "tokens": row.tokens,
        "seconds": round(row.seconds, 6),
    }
    for name, value in row.values.items():
        if name in record:
            raise UsageError(f"`{name}` is a column of every trace row; name your value otherwise")
        record[name] = _finite(float(value))
    return (json.dumps(record, allow_nan=False) + "\n").encode()


def read_trace(layout: RunLayout) -> dict[int, TraceRow]:
    """The rows of a run's history by step; of a step trained more than once the latest attempt's.

    Where an attempt begins, the history before it ends: what an older one trained beyond that was
    lost, or is the work of ranks that were thought dead.
    """
    history: dict[int, TraceRow] = {}
    attempt = 0
    for row in _rows(layout):
        if row.attempt != attempt:
            attempt = row.attempt
            history = {step: kept for step, kept in history.items() if step < row.step}
        history[row.step] = row
    return history


def count_trained(layout: RunLayout) -> dict[int, int]:
    """How often each step was trained: above 1 for steps lost in a failure and done again."""
    return dict(Counter(row.step for row in _rows(layout)))


def _rows(layout: RunLayout) -> Iterator[TraceRow]:
    found = ((_NAME.match(path.name), path) for path in layout.trace.glob("attempt-*.jsonl"))
    files = {int(name[1]): path for name, path in found if name is not None}
    for attempt in sorted(files):
        for line in files[attempt].read_bytes().splitlines():
            row = _parse_row(line, attempt, files[attempt])
            if row is not None:
                yield row


def _parse_row(line: bytes, attempt: int, where: Path) -> Optional[TraceRow]:
    """None for a line that is torn or damaged."""
    try:
        record: dict[str, Any] = json.loads(line)
        is_newer = record.pop("schema_version") > SCHEMA_VERSION
        if not is_newer:
            return _row(record, attempt)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    raise FormatError(f"`{where}` is of a newer ftslurm; read it with that version or a newer one")


def _row(record: dict[str, Any], attempt: int) -> TraceRow:
    loss = float.fromhex(record.pop("loss_hex"))
    del record["loss"]
    counts = {name: int(record.pop(name)) for name in ("step", "samples", "tokens")}
    seconds = float(record.pop("seconds"))
    values = {name: math.nan if value is None else value for name, value in record.items()}
    return TraceRow(**counts, seconds=seconds, loss=loss, values=values, attempt=attempt)


def _finite(value: float) -> Optional[float]:
    return value if math.isfinite(value) else None
