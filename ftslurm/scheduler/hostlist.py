"""Slurm's hostlists as values: `rack[0-1]_n[01-03]` <-> the names, in Slurm's order.

Pure. What is malformed, or would expand beyond all clusters, is refused with a sentence.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from ftslurm.errors import UsageError

MAX_HOSTS = 65_536
"""Slurm's own bound on one hostlist (MAX_RANGE in hostlist.c is 64k)."""

_NAME = re.compile(r"[A-Za-z0-9._-]*")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")
_LAST_NUMBER = re.compile(r"^(.*?)(\d{1,18})(\D*)$")


def expand(text: str) -> list[str]:
    """Names of a hostlist in the order in which Slurm lists them; UsageError when malformed."""
    if not text:
        raise UsageError("hostlist is empty; write names or ranges like `n[01-03,7]`")
    names: list[str] = []
    for part in _split(text):
        pieces = _pieces(part, text)
        count = 1
        for choices in pieces:
            count *= len(choices)
        if len(names) + count > MAX_HOSTS:
            raise UsageError(f"hostlist `{text[:60]}` names more than {MAX_HOSTS} hosts")
        # The last bracket runs fastest, as in `scontrol show hostnames`.
        names.extend("".join(choice) for choice in itertools.product(*pieces))
    return names


def compress(names: Iterable[str]) -> str:
    """A hostlist that expands to exactly `names`, order and repetitions kept."""
    groups: list[tuple[str, str, list[str]]] = []
    for name in names:
        match = _LAST_NUMBER.match(name)
        prefix, number, suffix = match.groups() if match else (name, "", "")
        if groups and number and groups[-1][:2] == (prefix, suffix) and groups[-1][2]:
            groups[-1][2].append(number)
        else:
            groups.append((prefix, suffix, [number] if number else []))
    return ",".join(_render(*group) for group in groups)


def _split(text: str) -> list[str]:
    """Parts between commas that are outside brackets."""
    parts: list[str] = []
    part, depth = "", 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _malformed(text, "brackets do not pair")
        if character == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += character
    if depth:
        raise _malformed(text, "a bracket is not closed")
    return [*parts, part]


def _pieces(part: str, text: str) -> list[list[str]]:
    """Alternating literal texts and bracket choices of one part."""
    if not part:
        raise _malformed(text, "a name between commas is empty")
    pieces = []
    for index, piece in enumerate(re.split(r"[\[\]]", part)):
        if index % 2:
            pieces.append(_choices(piece, text))
        elif _NAME.fullmatch(piece):
            pieces.append([piece])
        else:
            raise _malformed(text, f"`{piece}` is no part of a host name")
    return pieces


def _choices(inside: str, text: str) -> list[str]:
    choices: list[str] = []
    for item in inside.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _malformed(text, f"`[{inside}]` holds something other than numbers and ranges")
        first, last = match[1], match[2] if match[2] is not None else match[1]
        low, high = int(first), int(last)
        if high < low:
            raise _malformed(text, f"range `{item}` runs backwards")
        if len(choices) + high - low + 1 > MAX_HOSTS:
            raise UsageError(f"hostlist `{text[:60]}` names more than {MAX_HOSTS} hosts")
        # Zero padding is the width of the first number: [08-10] is 08, 09, 10.
        choices.extend(str(number).zfill(len(first)) for number in range(low, high + 1))
    return choices


def _render(prefix: str, suffix: str, numbers: list[str]) -> str:
    if len(numbers) < 2:
        return prefix + "".join(numbers) + suffix
    ranges: list[list[str]] = []
    for number in numbers:
        last = ranges[-1][-1] if ranges else None
        if last is not None and number == str(int(last) + 1).zfill(len(ranges[-1][0])):
            ranges[-1].append(number)
        else:
            ranges.append([number])
    inside = ",".join(row[0] if len(row) == 1 else f"{row[0]}-{row[-1]}" for row in ranges)
    return f"{prefix}[{inside}]{suffix}"


def _malformed(text: str, why: str) -> UsageError:
    return UsageError(f"hostlist `{text[:60]}` is malformed: {why}; write e.g. `n[01-03,7]-ib`")
