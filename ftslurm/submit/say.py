"""Where submit's talk goes, and its answer for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def speaker(*, as_json: bool) -> Callable[[str], None]:
    """Not between the JSON."""
    return _to_stderr if as_json else _to_stdout


def print_json(record: dict[str, Any]) -> None:
    print(json.dumps(record, indent=1, sort_keys=True))  # noqa: T201


def _to_stdout(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201
