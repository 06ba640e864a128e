"""`python -m ... MODULE`: import one module and print how often the importer asked for files.

Counts what Python itself does: stat by the finders, files opened, folders listed; and the libraries
that are mapped afterwards. Alone in its process, as the counters cannot be taken off again.
"""

from __future__ import annotations

import importlib
import importlib._bootstrap_external as finders
import json
import sys
import time
from pathlib import Path
from typing import Any

_AUDITED = {"open": "open", "listdir": "list", "scandir": "list"}
"""Last word of an audit event."""


def counted(module: str) -> dict[str, Any]:
    calls = {"stat": 0, "open": 0, "list": 0}
    # What finders and loaders call by this name since 3.3; there is no audit event for a stat.
    stat = finders._path_stat  # type: ignore[attr-defined]

    def counted_stat(path: Any) -> Any:
        calls["stat"] += 1
        return stat(path)

    def hook(event: str, _: Any) -> None:
        kind = _AUDITED.get(event.rpartition(".")[2])
        if kind is not None:
            calls[kind] += 1

    finders._path_stat = counted_stat  # type: ignore[attr-defined]
    sys.addaudithook(hook)
    began, there = time.perf_counter(), True
    try:
        importlib.import_module(module)
    except ImportError:
        there = False
    took_s = time.perf_counter() - began
    told = dict(calls)
    maps = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    libraries = {line.split(None, 5)[5] for line in maps if "/" in line and ".so" in line}
    place = getattr(sys.modules.get(module), "__file__", None)
    return {"found": there, "calls": told, "libraries": len(libraries), "took_s": took_s,
            "file": place}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(counted(sys.argv[1])))  # noqa: T201
