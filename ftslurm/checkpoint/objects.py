"""Non-tensor leaves of a checkpoint as JSON, bit for bit, and nothing that could run on load.

Taken: None, bool, int, float, str, list, tuple, dict with text keys; these exact types, because a
subclass (numpy.float64, a Counter, an enum) would come back as something else. All else is refused
by name when it is saved. JSON has no infinity, NaN or tuple, so these are tagged; a key of the
user's that begins with `$` gets another one:

    float("inf") -> {"$float": "7ff0000000000000"}     the eight bytes, big endian
    (0.9, 0.95)  -> {"$tuple": [0.9, 0.95]}
    {"$x": 1}    -> {"$$x": 1}
"""

from __future__ import annotations

import math
import re
import struct
from typing import Any

from ftslurm.errors import CheckpointError, FormatError

_DEEPEST = 100
_WIDEST_INT_BITS = 8192  # Python itself refuses to parse integers above 4300 digits (14 284 bits)
_FLOAT_BITS = re.compile(r"^[0-9a-f]{16}$")


def encode(value: Any, *, key: str) -> Any:
    """JSON form of one leaf; CheckpointError naming `key` and the type when it has none."""
    return _encode(value, key, 0)


def decode(value: Any, *, where: str) -> Any:
    """The leaf that was encoded; FormatError for anything `encode` cannot have written."""
    return _decode(value, where, 0)


def _encode(value: Any, key: str, depth: int) -> Any:
    kind = type(value)
    if depth > _DEEPEST:
        raise CheckpointError(f"`{key}` is nested deeper than {_DEEPEST} levels; store less in it")
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        if value.bit_length() > _WIDEST_INT_BITS:
            raise CheckpointError(f"`{key}` is an integer of more than {_WIDEST_INT_BITS} bits")
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if kind in (list, tuple):
        items = [_encode(item, f"{key}[{i}]", depth + 1) for i, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind is dict:
        return {
            _escape(name, key): _encode(item, f"{key}.{name}", depth + 1)
            for name, item in value.items()
        }
    raise CheckpointError(
        f"`{key}` is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds tensors and None, "
        "bool, int, float, str, list, tuple, dict only: convert it in its state_dict"
    )


def _escape(name: Any, key: str) -> str:
    if type(name) is not str:
        raise CheckpointError(
            f"`{key}` has the key {name!r} ({type(name).__name__}); keys have to be text, so that "
            "they come back as they were"
        )
    return f"${name}" if name.startswith("$") else name


def _decode(value: Any, where: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise FormatError(f"{where} is nested deeper than {_DEEPEST} levels; it is damaged")
    if type(value) is list:
        return [_decode(item, where, depth + 1) for item in value]
    if type(value) is dict:
        return _decode_dict(value, where, depth)
    if type(value) is float and not math.isfinite(value):
        raise FormatError(f"{where} holds a number that is not finite; it is damaged")
    return value


def _decode_dict(value: dict[str, Any], where: str, depth: int) -> Any:
    if list(value) == ["$tuple"] and type(value["$tuple"]) is list:
        return tuple(_decode(item, where, depth + 1) for item in value["$tuple"])
    if list(value) == ["$float"]:
        bits = value["$float"]
        if type(bits) is str and _FLOAT_BITS.match(bits):
            (number,) = struct.unpack(">d", bytes.fromhex(bits))
            return number
    decoded = {}
    for name, item in value.items():
        if name.startswith("$") and not name.startswith("$$"):
            raise FormatError(f"{where} has the unknown tag `{name}`; it is damaged or newer")
        decoded[name[1:] if name.startswith("$") else name] = _decode(item, where, depth + 1)
    return decoded
