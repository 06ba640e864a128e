"""What a run has come to: the value that its loop or program returned, in RUN/value.json.

Rank 0 writes it before the run is DONE, and it counts only then: a run that was asked to leave may
have returned early. Kept are numbers, exactly, text, lists and maps of them; all else is refused in
a sentence, never kept as something near it. JSON has no NaN and no infinity: they are written as
`{"float": "nan"}`, and a map that might be taken for that as `{"map": {...}}`. Whoever looks finds
the same value however often the run was preempted, if its loop is that exact.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftslurm.errors import FormatError, SpecError
from ftslurm.files import read_json, write_json
from ftslurm.run.layout import RunLayout

_FLOAT, _MAP = "float", "map"
"""The one key of what stands for a number that JSON does not have, and of a map that has the one
key `float` or `map`."""
_FLOATS = ("nan", "inf", "-inf")

_DEEPEST = 100
"""Lists and maps inside each other; a list that holds itself has no end."""
_MOST = 100_000
"""Values in one: whoever looks at the sweep reads all of them."""
_MOST_BITS = 14_000
"""Of an int: Python reads none of more than 4,300 digits (sys.get_int_max_str_digits)."""
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
"""JSON has such a pair for one character, and reads that."""


def value_json(layout: RunLayout) -> Path:
    return layout.root / "value.json"


def write_value(layout: RunLayout, value: Any) -> None:
    """SpecError for a value that is none of those that are kept."""
    write_json(value_json(layout), {"schema_version": 1, "value": plain(value)})


def read_value(layout: RunLayout) -> Any:
    """None where there is none, or no finished run."""
    if not layout.done.exists():
        return None
    path = value_json(layout)
    try:
        record = read_json(path)
    except FileNotFoundError:
        return None
    if "value" not in record:
        raise FormatError(f"`{path}` has no key `value`; it is not a file of ftslurm")
    return _restored(record["value"])


def plain(value: Any) -> Any:
    """As JSON has it. Numbers of numpy and torch, and arrays that hold one, become Python's."""
    try:
        return _Plain().of(value, 0)
    except SpecError:
        raise
    except Exception as error:  # noqa: BLE001 - it is somebody's object, and may raise anything
        raise SpecError(
            f"the value returned, of type {type(value).__name__}, cannot be read: it raises "
            f"{type(error).__name__}; return numbers, text, and lists and maps of them"
        ) from None


class _Plain:
    """One value."""

    def __init__(self) -> None:
        self._count = 0

    def of(self, value: Any, depth: int) -> Any:
        self._count += 1
        if self._count > _MOST:
            raise SpecError(
                f"the value returned holds more than {_MOST:,} values; write them to a file, and "
                "return what they come to"
            )
        if depth > _DEEPEST:
            raise SpecError(
                f"the value returned has lists or maps inside each other more than {_DEEPEST} "
                "deep; return less of it"
            )
        if value is None or isinstance(value, bool):
            return value
        # A subclass (numpy.float64, an Enum of texts) would be written in its own way.
        if isinstance(value, str):
            return _text(str.__str__(value))
        if isinstance(value, int):
            return _whole(int.__int__(value))
        if isinstance(value, float):
            number = float.__float__(value)
            return number if math.isfinite(number) else {_FLOAT: repr(number)}
        if isinstance(value, Mapping):
            return self._map(value, depth)
        if isinstance(value, (list, tuple)):
            return [self.of(item, depth + 1) for item in value]
        single = _single(value)
        if type(single) is not type(value):
            return self.of(single, depth + 1)
        raise SpecError(
            f"the value returned is of type {type(value).__name__}; a sweep takes numbers, text, "
            "and lists and maps of them: return one, or nothing"
        )

    def _map(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, item in value.items():
            name = _name(key)
            if name in kept:
                raise SpecError(
                    f"the value returned is a map with two keys that are `{ascii(name)[1:-1]}` as "
                    "text, which keys are in JSON; give them different names"
                )
            kept[name] = self.of(item, depth + 1)
        return {_MAP: kept} if list(kept) in ([_FLOAT], [_MAP]) else kept


def _single(value: Any) -> Any:
    """What an array holds alone; of numpy's longdouble, and of all else, what it is itself."""
    if not callable(getattr(value, "item", None)):
        return value
    try:
        return value.item()
    except (ValueError, RuntimeError):
        return value  # an array of several


def _name(key: Any) -> str:
    if isinstance(key, str):
        return _text(str.__str__(key))
    if key is None or isinstance(key, (bool, float)):
        return str(key)
    if hasattr(key, "__index__"):
        return str(_whole(operator.index(key)))
    raise SpecError(
        f"the value returned is a map with a key of type {type(key).__name__}; keys are text"
    )


def _text(text: str) -> str:
    if _PAIR.search(text):
        raise SpecError(
            f"the value returned holds the text {ascii(text[:20])}, in which two surrogates stand "
            "for one character; decode it first"
        )
    return text


def _whole(number: int) -> int:
    if number.bit_length() > _MOST_BITS:
        raise SpecError(
            f"the value returned holds a whole number of {number.bit_length()} bits, and "
            f"{_MOST_BITS} are kept; return it as a text"
        )
    return number


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if list(value) == [_FLOAT] and value[_FLOAT] in _FLOATS:
        return float(value[_FLOAT])
    if list(value) == [_MAP] and isinstance(value[_MAP], dict):
        value = value[_MAP]
    return {name: _restored(item) for name, item in value.items()}
