"""Named points at which a test or a drill may break the product on purpose.

A plan is read from the environment variable FTSLURM_FAULTS; without it a point costs one
dictionary look-up and does nothing. Each entry is ACTION@POINT followed by conditions, entries
are separated by `;`:

    FTSLURM_FAULTS="kill@before_commit:rank=0:step=20:attempt=1;estale@read_step:rank=1:times=3"

Actions: kill (SIGKILL to this process), exit (code 1), hang (for ever), stop (SIGSTOP to this
process), hold (for ever, with the interpreter lock held in native code), slow (real work of
`seconds=S`, then goes on), sleep (the same time without work), or an error number by its name in
lower case (enospc, eio, estale, edquot ...): an OSError. Conditions: rank, attempt, and what the
point says of itself (step, or the name of the file); `since=N`: from step N on; `times=N` breaks N
times in a process and is mended then.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections import Counter
from typing import NoReturn, Union

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
    "requeued",  # the job is queued again, and is not kept off any node yet
    # The file primitives; each try passes its point, so `times` may be outlasted.
    "read_file",  # a record outside the checkpoints: run.json, attempt.json, events.jsonl ...
    "write_file",  # any small file, atomically
    "append",  # a line of a journal
    "make_folder",  # an exclusive mkdir: attempts, temporary steps, quarantine
    "list_folder",
    "rename",  # publishing a step, or putting one aside
    "read_step",  # COMMITTED, a manifest or an index
    "read_shard",  # bytes of tensors
)

# Facts that a point need not know: the environment of ranks and of the batch loop has them.
_FROM_ENVIRONMENT = {"rank": "SLURM_PROCID", "attempt": "FTSLURM_ATTEMPT"}

_broken: Counter[str] = Counter()
"""How often each entry has broken something in this process."""


def point(name: str, /, **facts: Union[int, str]) -> None:
    """Reach the named point; breaks here if the plan says so."""
    plan = os.environ.get(ENVIRONMENT)
    if plan:
        for entry in plan.split(";"):
            if _matches(entry.strip(), name, facts):
                _break(entry.partition("@")[0].strip(), name, _pairs(entry))


def _matches(entry: str, name: str, facts: dict[str, Union[int, str]]) -> bool:
    if not entry:
        return False
    _, _, target = entry.partition("@")
    wanted = target.split(":")[0]
    if wanted not in POINTS:
        raise UsageError(f"{ENVIRONMENT}: `{wanted}` is no point; choose from {', '.join(POINTS)}")
    if wanted != name:
        return False
    pairs = _pairs(entry)
    times, since = pairs.pop("times", None), pairs.pop("since", None)
    pairs.pop("seconds", None)
    if since is not None and int(facts.get("step", -1)) < int(since):
        return False
    if not all(_fact(key, facts) == value for key, value in pairs.items()):
        return False
    _broken[entry] += 1
    return times is None or _broken[entry] <= int(times)


def _pairs(entry: str) -> dict[str, str]:
    return dict(condition.split("=", 1) for condition in entry.split(":")[1:])


def _fact(key: str, facts: dict[str, Union[int, str]]) -> str:
    if key in facts or key not in _FROM_ENVIRONMENT:
        return str(facts.get(key))
    return os.environ.get(_FROM_ENVIRONMENT[key], "")


def _break(action: str, name: str, pairs: dict[str, str]) -> None:
    number = getattr(errno, action.upper(), None)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "exit":
        os._exit(1)
    elif action == "hang":
        _hang()
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "hold":
        # One call that takes for ever; it does not let go of the lock.
        re.match("(a+)+$", "a" * 64 + "b")
    elif action == "slow":
        _work(float(pairs["seconds"]))
    elif action == "sleep":
        time.sleep(float(pairs["seconds"]))
    elif isinstance(number, int):
        raise OSError(number, f"{os.strerror(number)} (fault injected at {name})")
    else:
        raise UsageError(
            f"{ENVIRONMENT}: `{action}` is no action; use kill, exit, hang, stop, hold, slow, "
            "sleep, or an error number by name, e.g. estale"
        )


def _hang() -> NoReturn:
    while True:
        time.sleep(60)


def _work(seconds: float) -> None:
    """By this thread's clock, so that it is as much work on a busy processor."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
