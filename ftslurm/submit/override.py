"""One override of the command line, parsed by Hydra; where it is a plain one, in a shorter way.

Hydra's parser takes half a millisecond for `seed=17`, and a sweep has thousands of these. What is
plainly KEY=NUMBER or KEY=WORD is put together here, as Hydra's grammar 1.3 would have it; all else
is Hydra's to read.
"""

from __future__ import annotations

import functools
import re
import shlex
from typing import Any, Optional

from ftslurm.errors import SpecError

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_INT = r"[+-]?(?:0|[1-9][0-9]*)"
_PLAIN = re.compile(
    rf"(?P<plus>\+{{0,2}})(?P<key>{_NAME}(?:(?:\.{_NAME})+|(?:/{_NAME})+)?)="
    rf"(?:(?P<int>{_INT})|(?P<float>{_INT}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)|(?P<word>{_NAME}))"
)
_RESERVED = {"true", "false", "null", "inf", "nan"}


def plain_override(text: str) -> Optional[Any]:
    """Hydra's `Override` of KEY=NUMBER or KEY=WORD, None for whatever else."""
    from hydra.core.override_parser.types import Override, OverrideType, ValueType

    match = _PLAIN.fullmatch(text)
    if match is None:
        return None
    value: Any = match["word"]
    if value is None:
        value = int(match["int"]) if match["int"] is not None else float(match["float"])
    elif value.lower() in _RESERVED:
        return None
    kinds = (OverrideType.CHANGE, OverrideType.ADD, OverrideType.FORCE_ADD)
    return Override(
        type=kinds[len(match["plus"])],
        key_or_group=match["key"],
        value_type=ValueType.ELEMENT,
        _value=value,
        input_line=text,
    )


@functools.lru_cache(maxsize=4096)
def parsed(text: str) -> Any:
    """Hydra's `Override`, which is nobody's to change; SpecError for what is none."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    plain = plain_override(text)
    if plain is not None:
        return plain
    key, equals, _ = text.partition("=")
    if not equals or not key.strip():
        raise SpecError(f"`{text}` is no override; write KEY=VALUE or GROUP=OPTION")
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        raise SpecError(
            f"`{text}` is not in Hydra's grammar; put the value in quotes of its own: "
            + quoted(text)
        ) from None


def quoted(text: str) -> str:
    """The override as a shell has to be given it for Hydra to take its value as one text."""
    key, _, value = text.partition("=")
    escaped = value.replace('"', '\\"')
    return shlex.quote(f'{key}="{escaped}"')
