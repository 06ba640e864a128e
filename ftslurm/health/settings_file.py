"""The one file of settings that a root-owned copy reads.

A file that is missing or torn, or says what cannot be, stops no probe and never drains: it means
shadow mode, and a complaint that says so. What is right in it holds all the same, so that a
misspelt limit does not change where is looked.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ftslurm.errors import FormatError
from ftslurm.health.root_only import check_root_only
from ftslurm.health.settings import SHADOW_MODE, HealthSettings, near, wrong_values

SCHEMA_VERSION = 1
_MOST_BYTES = 1 << 20
_EXPECTED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list of texts",
    dict: "a number for each rule",
}


def to_record(settings: HealthSettings) -> dict[str, Any]:
    """What the file holds."""
    return {"schema_version": SCHEMA_VERSION, **asdict(settings)}


def read_settings(path: Path) -> tuple[HealthSettings, str]:
    """(settings, complaint): mode is shadow where there is a complaint. Never raises."""
    try:
        record = json.loads(_read(path))
    except OSError as error:
        return _broken({}, f"`{path}` cannot be read ({error.strerror})")
    except FormatError as error:
        return _broken({}, str(error))
    except (ValueError, RecursionError):
        return _broken({}, f"`{path}` is not JSON; it is torn or not ours")
    return settings_of(record, where=str(path))


def settings_of(record: object, *, where: str) -> tuple[HealthSettings, str]:
    """The same of what was read from `where`."""
    if not isinstance(record, dict):
        return _broken({}, f"`{where}` is no JSON object")
    version = record.get("schema_version")
    if version != SCHEMA_VERSION:
        return _broken({}, f"`{where}` has schema_version {version!r}, not {SCHEMA_VERSION}")
    values, complaints = _typed({key: record[key] for key in record if key != "schema_version"})
    for key, sentence in list(wrong_values(HealthSettings(**values))):
        values.pop(key, None)
        complaints.append(f"{key} {sentence}")
    if complaints:
        return _broken(values, f"in `{where}`, {complaints[0]}")
    return HealthSettings(**values), ""


def _broken(values: Mapping[str, Any], complaint: str) -> tuple[HealthSettings, str]:
    settings = HealthSettings(**{**values, "mode": SHADOW_MODE})
    return settings, f"{complaint}; no node is drained (shadow mode) until that file is right"


def _read(path: Path) -> bytes:
    if os.geteuid() == 0:
        check_root_only(path.absolute())  # it names a command and a library that root will run
    # Without O_NONBLOCK, a FIFO in its place would have the probe wait for a writer (fifo(7)).
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as stream:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FormatError(f"`{path}` is no regular file")
        data = stream.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise FormatError(f"`{path}` has more than {_MOST_BYTES} bytes")
    return data


def _typed(record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values that are of their key's type, and a sentence for each other one."""
    values: dict[str, Any] = {}
    complaints = []
    defaults = vars(HealthSettings())
    for key, value in record.items():
        if key not in defaults:
            complaints.append(f"there is no key `{key}`{near(key, defaults)}")
        elif not _is_like(defaults[key], value):
            expected = _EXPECTED[type(defaults[key])]
            complaints.append(f"{key} is {json.dumps(value)[:80]}; give {expected}")
        else:
            values[key] = value
    return values, complaints


def _is_like(default: object, value: object) -> bool:
    if isinstance(default, float):
        return type(value) in (int, float)
    if type(value) is not type(default):
        return False
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    if isinstance(value, dict):
        return all(type(number) in (int, float) for number in value.values())
    return True
