"""What a run has come to: the value that its loop or program returned, in RUN/value.json.

Rank 0 writes it before the run is DONE, and it counts only then: a run that was asked to leave may
have returned early. Kept are numbers, exactly, text, lists and maps of them. JSON has no NaN and no
infinity: they are written as `{"float": "nan"}`. Whoever looks finds the same value however often
the run was preempted, if its loop is that exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftslurm.errors import SpecError
from ftslurm.files import read_json, write_json
from ftslurm.run.layout import RunLayout

_FLOAT = "float"
"""Key of what stands for a number that JSON does not have."""


def value_json(layout: RunLayout) -> Path:
    return layout.root / "value.json"


def write_value(layout: RunLayout, value: Any) -> None:
    """SpecError for a value that is none of those that are kept."""
    write_json(value_json(layout), {"schema_version": 1, "value": plain(value)})


def read_value(layout: RunLayout) -> Any:
    """None where there is none, or no finished run."""
    if not layout.done.exists():
        return None
    try:
        return _restored(read_json(value_json(layout))["value"])
    except FileNotFoundError:
        return None


def plain(value: Any) -> Any:
    """As JSON has it. Numbers of numpy and torch, and arrays that hold one, become Python's."""
    if value is None or isinstance(value, bool):
        return value
    # A subclass (numpy.float64, an Enum of texts) would be written in its own way.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if callable(getattr(value, "item", None)):
        try:
            return plain(value.item())
        except (ValueError, RuntimeError):
            pass  # an array of several
    raise SpecError(
        f"the value returned is of type {type(value).__name__}; a sweep takes numbers, text, and "
        "lists and maps of them: return one, or nothing"
    )


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if isinstance(value, dict):
        if list(value) == [_FLOAT] and isinstance(value[_FLOAT], str):
            return float(value[_FLOAT])
        return {name: _restored(item) for name, item in value.items()}
    return value
