"""Named points at which a test or a drill may break the product on purpose.

A plan is read from the environment variable FTSLURM_FAULTS; without it a point costs one
dictionary look-up and does nothing. Each entry is ACTION@POINT followed by conditions, entries
are separated by `;`:

    FTSLURM_FAULTS="kill@before_commit:rank=0:step=20:attempt=1;enospc@persist:rank=1"

Actions: kill (SIGKILL to this process), exit (code 1), enospc, eio (OSError), hang (for ever).
"""

from __future__ import annotations

import errno
import os
import signal
import time
from typing import NoReturn

from ftslurm.errors import UsageError

ENVIRONMENT = "FTSLURM_FAULTS"

POINTS = (
    "step",  # a training step has begun
    "staged",  # the snapshot is in host buffers
    "persist",  # a shard file is about to be written
    "before_commit",  # all is written and fsynced; no COMMITTED yet
    "before_rename",  # COMMITTED is inside the temporary folder
    "after_rename",  # the step is published; latest.json and retention have not run
    "restored",  # state is loaded, no step trained
)


def point(name: str, **facts: int) -> None:
    """Reach the named point; breaks here if the plan says so. `facts`: rank, step, attempt."""
    plan = os.environ.get(ENVIRONMENT)
    if plan:
        for entry in plan.split(";"):
            if _matches(entry.strip(), name, facts):
                _break(entry.partition("@")[0].strip(), name)


def _matches(entry: str, name: str, facts: dict[str, int]) -> bool:
    if not entry:
        return False
    _, _, target = entry.partition("@")
    wanted, *conditions = target.split(":")
    if wanted not in POINTS:
        raise UsageError(f"{ENVIRONMENT}: `{wanted}` is no point; choose from {', '.join(POINTS)}")
    if wanted != name:
        return False
    pairs = [condition.partition("=") for condition in conditions]
    return all(facts.get(key) == int(value) for key, _, value in pairs)


def _break(action: str, name: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "exit":
        os._exit(1)
    elif action in ("enospc", "eio"):
        number = errno.ENOSPC if action == "enospc" else errno.EIO
        raise OSError(number, f"{os.strerror(number)} (fault injected at {name})")
    elif action == "hang":
        _hang()
    else:
        raise UsageError(
            f"{ENVIRONMENT}: `{action}` is no action; use kill, exit, enospc, eio, hang"
        )


def _hang() -> NoReturn:
    while True:
        time.sleep(60)
