"""Where submit's talk goes, and its answer for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Optional


def speaker(*, as_json: bool) -> Callable[[str], None]:
    """Not between the JSON."""
    return _to_stderr if as_json else _to_stdout


def print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record, indent=1, sort_keys=True))  # noqa: T201


def repeated(tasks: Mapping[int, Hashable], what: str) -> Optional[str]:
    """A sentence on tasks that are `what`, as a later override may hide what an earlier one has
    named several values of; None where each is another. `tasks`: number -> all that is in it."""
    first: dict[Hashable, int] = {}
    pairs = [
        (one, number)
        for number, of in tasks.items()
        if (one := first.setdefault(of, number)) != number
    ]
    if not pairs:
        return None
    one, other = pairs[0]
    more = f"; {len(pairs) - 1} more repeat another" if len(pairs) > 1 else ""
    return f"tasks {one} and {other} are {what}{more}"


def _to_stdout(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201
