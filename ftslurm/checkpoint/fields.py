"""Strict reading of JSON that may be torn, rotten or foreign.

Whatever the bytes are, the outcome is a checked value or a FormatError that names file and field.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, NoReturn, Optional

from ftslurm.errors import FormatError

LARGEST = 2**63 - 1
"""No count, size or offset of ours is larger: they all have to fit a signed 64-bit integer."""


class NewerFormat(FormatError):
    """A record of a newer schema: not understood, and no sign of damage."""


@dataclass(frozen=True)
class Fields:
    """One JSON object and where it was found."""

    values: dict[str, Any]
    where: str

    def text(self, key: str) -> str:
        value = self._get(key)
        if type(value) is not str or not value:
            self._refuse(key, "a text that is not empty")
        return value

    def optional_text(self, key: str) -> Optional[str]:
        value = self._get(key)
        if value is not None and type(value) is not str:
            self._refuse(key, "a text or null")
        return value

    def count(self, key: str, *, least: int = 0) -> int:
        value = self._get(key)
        if not is_count(value) or value < least:
            self._refuse(key, f"an integer from {least} to 2**63-1")
        return value  # type: ignore[no-any-return]

    def integer(self, key: str) -> int:
        value = self._get(key)
        if type(value) is not int:
            self._refuse(key, "an integer")
        return value

    def seconds(self, key: str) -> float:
        value = self._get(key)
        if type(value) not in (int, float) or not 0 <= value <= LARGEST or not math.isfinite(value):
            self._refuse(key, "a time in seconds")
        return float(value)

    def counts(self, key: str) -> list[int]:
        value = self._get(key)
        if type(value) is not list or not all(is_count(item) for item in value):
            self._refuse(key, "a list of integers from 0 to 2**63-1")
        return value

    def objects(self, key: str) -> list[Fields]:
        value = self._get(key)
        if type(value) is not list or not all(type(item) is dict for item in value):
            self._refuse(key, "a list of objects")
        return [Fields(item, f"{self.where}: {key}[{i}]") for i, item in enumerate(value)]

    def mapping(self, key: str) -> dict[str, Any]:
        value = self._get(key)
        if type(value) is not dict:
            self._refuse(key, "an object")
        return value

    def child(self, key: str) -> Optional[Fields]:
        value = self._get(key)
        if value is not None and type(value) is not dict:
            self._refuse(key, "an object or null")
        return None if value is None else Fields(value, f"{self.where}: {key}")

    def digest(self, key: str, *, length: int = 0) -> str:
        """Lower case hex; of `length` digits unless 0."""
        value = self.text(key)
        if value.strip("0123456789abcdef") or (length and len(value) != length):
            self._refuse(key, f"a digest of {length or 'some'} lower case hex digits")
        return value

    def _get(self, key: str) -> Any:
        if key not in self.values:
            raise FormatError(f"{self.where} has no `{key}`; it is damaged or not ours")
        return self.values[key]

    def _refuse(self, key: str, expected: str) -> NoReturn:
        shown = ascii(self.values[key])[:60]
        raise FormatError(f"{self.where} has `{key}` = {shown}, expected {expected}; it is damaged")


def parse(data: bytes, *, where: str, newest: int = 1) -> Fields:
    """Parse one JSON record; refuses keys given twice, NaN and, by NewerFormat, a schema_version
    above `newest`."""
    try:
        record = json.loads(data, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is not JSON of ours ({error}); it is torn or damaged") from None
    if type(record) is not dict:
        raise FormatError(f"{where} is no JSON object; it is damaged or not ours")
    fields = Fields(record, where)
    version = fields.count("schema_version", least=1)
    if version > newest:
        raise NewerFormat(
            f"{where} has schema_version {version}, this ftslurm reads up to {newest}; use the "
            "version that wrote it or a newer one"
        )
    return fields


def is_count(value: Any) -> bool:
    """An integer (no bool, no float) from 0 to 2**63-1."""
    return type(value) is int and 0 <= value <= LARGEST


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key is given twice")
    return record


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
