"""How many files a rank asks its file system for when it begins: counted in Python, without strace.

A lower bound, and called that: what the dynamic loader looks for in vain, and what libraries open
by themselves, is not in it. The import is done in a child, and nothing is kept of it.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from ftslurm.doctor import import_calls

_LIMIT_S = 120.0


def count_calls(python: str, module: str) -> dict[str, Any]:
    """As import_calls.py tells; `error` where nothing could be counted."""
    try:
        done = subprocess.run(
            [python, "-m", import_calls.__name__, module],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    lines = (done.stdout if done.returncode == 0 else done.stderr).splitlines()
    if done.returncode != 0 or not lines:
        return {"error": lines[-1] if lines else "it printed nothing"}
    told: dict[str, Any] = json.loads(lines[-1])
    return told
