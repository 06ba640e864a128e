"""Secrets of a spec: references to environment variables on disk, values in a rank's memory only.

`ftslurm submit` leaves `${oc.env:NAME}` as it is where the name or the value looks like a secret's,
below `user` alone; a rank reads its record through `open_record`, which puts the values in. What is
written down afterwards goes through `without_secrets`. A value that the submitter's shell has put
into a text is found by `held_secret`. Nothing here writes.
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

_SHORTEST_HELD = 8
"""Below this a text holds a value by chance."""
_HARMLESS_NAME = re.compile(r"AUTHOR(?!IZ)|TOKENI[SZ]|TOKENS|KEYBOARD|KEYMAP", re.IGNORECASE)
"""GIT_AUTHOR_EMAIL, TOKENIZER_NAME, TOKENS_PER_BATCH: what SECRET takes along."""
_WORD = r"(?:[A-Z]?[a-z]{1,12}|[A-Z]{1,12})"
_HARMLESS_VALUE = re.compile(
    r"\d+"
    rf"|{_WORD}([-_./ ]{_WORD}){{0,2}}"  # kerberos, auth/munge; four words may be a pass phrase
    r"|[\w.+-]+@[\w-]+(\.[\w-]+)+"  # mail
    r"|\w+://[^?@]+"  # a place in the net, without a password or a query
)
_SCHEME = re.compile(r"^\w+:(?=/(?!/))")

_known: dict[str, str] = {}
"""value -> reference of the secrets that this process has put into a spec."""


def is_secret(name: str, value: Optional[str]) -> bool:
    """Whether an environment variable is kept as a reference: by its name, or a URL with a
    password."""
    return bool(SECRET.search(name)) or (value is not None and bool(_IN_URL.search(value)))


def held_secret(text: str, environ: Mapping[str, str]) -> Optional[str]:
    """Name of the environment variable whose value, which may be a secret, is in `text`."""
    for name, value in environ.items():
        if len(value) >= _SHORTEST_HELD and value in text and _may_be_secret(name, value):
            return name
    return None


def _may_be_secret(name: str, value: str) -> bool:
    """Narrower than `is_secret`, which costs nothing where it errs; this refuses a run."""
    if _IN_URL.search(value):
        return True
    if not SECRET.search(_HARMLESS_NAME.sub("", name)) or _HARMLESS_VALUE.fullmatch(value):
        return False
    return not _is_path(value)


def _is_path(value: str) -> bool:
    """SSH_AUTH_SOCK, XAUTHORITY, `FILE:/tmp/x`, a list of paths. Base64 may begin with `/`: then
    the folder that a path would begin with is not there."""
    path = _SCHEME.sub("", value)
    if path.startswith("/"):
        return os.path.lexists("/" + path.lstrip("/").partition("/")[0])
    return os.path.lexists(os.path.expanduser(path))  # noqa: PTH111


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
    for place, text, is_name in _walk(value, key):
        if not is_name:
            for match in _REFERENCE.finditer(text):
                yield place, match[1]


def texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of all texts in a spec's values, names of keys included."""
    for place, text, _ in _walk(value, key):
        yield place, text


def _walk(value: Any, key: str) -> Iterator[tuple[str, str, bool]]:
    """(dotted key, text, whether the text is itself the name of a key)."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield key, str(name), True
            yield from _walk(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _walk(item, f"{key}[{i}]")
    elif isinstance(value, str):
        yield key, value, False


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
