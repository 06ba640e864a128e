"""Until when a rank that was asked to leave may save, as its node's agent has been told by Slurm.

A small file beside the ranks' beats: no shared storage is in the way in a grace time. The agent
writes it (agent/deadline.py), ranks read it and never depend on it: without, what was frozen at
submit holds (submit/deadline.py). Times are CLOCK_MONOTONIC, one clock for all of a node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

from ftslurm.errors import FormatError
from ftslurm.files import read_json, write_json
from ftslurm.run.heartbeat import beats_folder, deadline_file, is_private, make_private

MARGIN_S = 5.0
"""Agreeing on the stop step, the last barrier, and asking for the requeue (0.1 s, seen)."""

LONG_PAST_S = 600.0
"""A rank learns late of its signal where its thread is in a library: minutes, while it compiles."""

APART_S = 1.0
"""Less is no nearer deadline: nodes are told of one a little apart."""

LEAST_S = 1.0
MOST_S = 3600.0
"""For a save that nothing hurries, as at a person's signal; past this the file system counts as
failed."""

# By what it is told.
PREEMPTED, TIME_LIMIT, ENDING = "preempted", "time_limit", "ending"
"""ENDING: the job is being torn down, its processes are killed after KillWait."""
SUBMIT = "submit"
"""The site's settings when the run was submitted."""
AGENTS = "agents"
"""A signal of the agents' own, for a slow node: nothing ends the job."""


@dataclass(frozen=True)
class Deadline:
    """The latest moment at which a save still helps."""

    until: float
    """time.monotonic() on this node."""
    by: str


def kill_s(kill_wait_s: float) -> float:
    """Seconds from Slurm's last TERM to its KILL, which come 5 s apart even with KillWait below."""
    return max(kill_wait_s, 5.0)


def write_deadline(environ: Mapping[str, str], attempt: int, deadline: Deadline) -> bool:
    """Tell the ranks of `attempt` on this node; False: they have no place to look."""
    folder = beats_folder(environ, attempt)
    if folder is None:
        return False
    make_private(folder)
    record = {"schema_version": 1, "until": deadline.until, "by": deadline.by}
    write_json(deadline_file(folder), record, durable=False)
    return True


def read_deadline(
    environ: Mapping[str, str], attempt: int, *, asked_at: float = -math.inf
) -> Optional[Deadline]:
    """None: nothing was told, it cannot be read, or it was long past when the ranks were asked to
    leave, at `asked_at` by time.monotonic(): of another signal, which they did not get."""
    folder = beats_folder(environ, attempt)
    if folder is None or not is_private(folder):
        return None
    try:
        record = read_json(deadline_file(folder))
        told = Deadline(float(record["until"]), str(record["by"]))
    except (OSError, FormatError, KeyError, TypeError, ValueError):
        return None
    return told if told.until >= asked_at - LONG_PAST_S else None
