"""Secrets of a spec: references to environment variables on disk, values in a rank's memory only.

`ftslurm submit` leaves `${oc.env:NAME}` as it is where the name or the value looks like a secret's,
below `user` alone; a rank reads its record through `open_record`, which puts the values in. What is
written down afterwards goes through `without_secrets`. Nothing here writes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Optional

from ftslurm.errors import SpecError
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import RunRecord, read_record

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|JWT|CREDENTIAL|AUTH", re.IGNORECASE)
"""Names of environment variables whose values never reach a file of ours."""

_IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
_REFERENCE = re.compile(r'\$\{oc\.env:([^,{}]+)(?:,("(?:[^"\\]|\\.)*"|[^,{}"]*))?\}')
_PLAIN = re.compile(r"[A-Za-z0-9_./:@+-]+")
_SHORTEST = 4
"""A value below this is no secret, and taking it out of a text would shred the text."""

_known: dict[str, str] = {}
"""value -> reference of the secrets that this process has put into a spec."""


def is_secret(name: str, value: Optional[str]) -> bool:
    """Whether an environment variable is kept as a reference: by its name, or a URL with a
    password."""
    return bool(SECRET.search(name)) or (value is not None and bool(_IN_URL.search(value)))


def reference(name: str, *default: Optional[str]) -> str:
    """As OmegaConf writes it, in a form that `resolve` reads."""
    words = [name]
    for value in default:
        text = "null" if value is None else str(value)
        words.append(text if value is None or _PLAIN.fullmatch(text) else json.dumps(text))
    return "${oc.env:" + ",".join(words) + "}"


def open_record(layout: RunLayout, environ: Mapping[str, str] = os.environ) -> RunRecord:
    """The run's record as a rank uses it, with the secrets of `spec.user` in place."""
    record = read_record(layout)
    user = resolve(record.spec.user, environ, key="user")
    return dataclasses.replace(record, spec=dataclasses.replace(record.spec, user=user))


def resolve(value: Any, environ: Mapping[str, str], *, key: str) -> Any:
    """`value` with what its references stand for; SpecError for one that stands for nothing."""
    if isinstance(value, dict):
        return {name: resolve(item, environ, key=f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        return [resolve(item, environ, key=f"{key}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole is not None:
        return _value(whole, environ, key)
    return _REFERENCE.sub(lambda match: _value(match, environ, key) or "", value)


def without_secrets(text: str) -> str:
    """`text` with references where it held a secret of this rank's spec."""
    for value, name in _known.items():
        text = text.replace(value, name)
    return text


def references(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, name of the environment variable) of each reference in a spec's values."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from references(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from references(item, f"{key}[{i}]")
    elif isinstance(value, str):
        for match in _REFERENCE.finditer(value):
            yield key, match[1]


def _value(match: re.Match[str], environ: Mapping[str, str], key: str) -> Optional[str]:
    name, default = match[1], match[2]
    if name in environ:
        if len(environ[name]) >= _SHORTEST:
            _known[environ[name]] = "${oc.env:" + name + "}"
        return environ[name]
    if default is None:
        raise SpecError(
            f"{key} is `{match[0]}`, but {name} is not set where the ranks run; export it in the "
            "shell that submits, which the job inherits, and submit again"
        )
    if default == "null":
        return None
    return str(json.loads(default)) if default.startswith('"') else default
