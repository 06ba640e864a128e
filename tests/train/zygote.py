"""Starts rank processes by fork from one process that has torch loaded: 0.1 s instead of 4 s each.

Reads one JSON order a line on stdin, answers one line on stdout. Ends, with all it started, when
its stdin closes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import Any

# Read, not imported: each rank imports the package from where its order says.
LATE = run_path(str(Path(__file__).parents[2] / "ftslurm" / "train" / "late_imports.py"))["LATE"]


def main() -> None:
    for name in ("torch", *LATE):
        import_module(name)
    running: set[int] = set()
    for line in sys.stdin:
        order = json.loads(line)
        if "reap" in order:
            _, status = os.waitpid(order["reap"], 0)
            running.discard(order["reap"])
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                become_rank(order)
            running.add(answer)
        print(answer, flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def become_rank(order: dict[str, Any]) -> None:
    """Be what the batch loop would have started; never returns."""
    code = 1
    try:
        os.environ.clear()
        os.environ.update(order["environ"])
        with open(order["log"], "ab", buffering=0) as log, open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.path[:0] = order["python_path"]
        import_module("ftslurm.train.entry").main()
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except Exception:  # noqa: BLE001 - a test's own process: into its log
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
