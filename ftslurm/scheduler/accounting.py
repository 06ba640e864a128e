"""What Slurm has on record of a job's runs, and says of its nodes: sacct -D and scontrol show node.

Asked with a short deadline, once; None means that nobody can say just now, never that nothing
happened. Parsing is apart from asking, so that recorded outputs of any version can test it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from ftslurm.errors import SchedulerError
from ftslurm.scheduler.hostlist import compress
from ftslurm.scheduler.job_table import JobRun, Table, known_fields
from ftslurm.scheduler.protocol import CLOCKS_S
from ftslurm.scheduler.slurm import Runner, run_command
from ftslurm.scheduler.slurm_parse import at

TIMEOUT_S = 3.0
"""An answer takes 0.2 s; the batch shell that asks may have a grace period of seconds."""

DELIMITER = "^|^"
"""No field that is asked for holds text of a user's, and still: a `|` in one would shift the rest
(-P alone cannot tell)."""

# FailedNode is of 23.02, Restarts of 24.11.
FIELDS = ("JobID", "State", "ExitCode", "Start", "End", "Reason", "FailedNode", "Restarts")

_NODE_NAME = re.compile(r"^NodeName=(\S+)")
_STATE = re.compile(r"\bState=(\S+)")
_GRES = re.compile(r"\sGres=(\S+)")
_REASON = re.compile(r"\bReason=(.*?)(?: \[([^\[\]\s@]+)@(\S+?)\])?\s*$")


@dataclass(frozen=True)
class NodeState:
    node: str
    state: str
    """`IDLE+DRAIN`, `DOWN*`, `MIXED`"""
    reason: str
    """Empty: none is set."""
    reason_at: Optional[float]
    """UTC seconds at which the reason was set."""
    gres: str = ""
    """`gpu:h100:8(S:0-1),nic:2`; empty: it has none."""


def read_runs(
    job_id: str, *, run: Runner = run_command, timeout_s: float = TIMEOUT_S
) -> Optional[list[JobRun]]:
    """All runs of a job, oldest first; None when accounting does not answer (no slurmdbd, or it is
    away). An empty list: it answers, and knows nothing of the job (yet)."""
    deadline = time.monotonic() + timeout_s
    names = _known_fields(run, timeout_s)
    left_s = deadline - time.monotonic()
    if names is None or left_s <= 0:
        return None
    argv = ["sacct", "--duplicates", "--noheader", "--parsable2", f"--delimiter={DELIMITER}",
            f"--jobs={job_id}", f"--format={','.join(names)}"]  # fmt: skip
    try:
        done = run(argv, left_s)
    except SchedulerError:
        return None
    return parse_runs(done.stdout, names) if done.rc == 0 else None


def run_of_attempt(
    runs: Sequence[JobRun], restart_count: int, claimed_at: float
) -> Optional[JobRun]:
    """The run of a job in which an attempt was claimed, the job's `restart_count`-th from 0; None:
    not on record. sacct also lists older jobs that had the same number."""
    told = [run for run in runs if run.restarts is not None]
    if told:
        return next((run for run in reversed(told) if run.restarts == restart_count), None)
    return nearest_run(runs, claimed_at)  # before 24.11


def nearest_run(runs: Sequence[JobRun], claimed_at: float) -> Optional[JobRun]:
    """The oldest run that was under way then, else the nearest by what clocks may differ: a job may
    start again 5 s after its end (seen). 22.05 can lose the start of a run."""
    near = min(runs, key=lambda run: _seconds_off(run, claimed_at), default=None)
    return near if near is not None and _seconds_off(near, claimed_at) <= CLOCKS_S else None


def _seconds_off(run: JobRun, at_s: float) -> float:
    early = 0.0 if run.start_at is None else run.start_at - at_s
    late = 0.0 if run.end_at is None else at_s - run.end_at
    return max(0.0, early, late)


def read_nodes(
    nodes: Sequence[str], *, run: Runner = run_command, timeout_s: float = TIMEOUT_S
) -> Optional[dict[str, NodeState]]:
    """State and reason of each node; None when slurmctld does not answer in time."""
    if not nodes:
        return {}
    # --all: a node of hidden partitions alone is `not found` else (22.05, seen).
    argv = ["scontrol", "--oneliner", "--all", "show", "node", compress(nodes)]
    try:
        done = run(argv, timeout_s)
    except SchedulerError:
        return None
    found = parse_nodes(done.stdout)
    return found if found or done.rc == 0 else None


def parse_runs(text: str, names: Sequence[str]) -> list[JobRun]:
    return list(Table(names, DELIMITER).runs(text.split("\n")))


def parse_nodes(text: str) -> dict[str, NodeState]:
    """`scontrol -o show node`."""
    found = {}
    for line in text.splitlines():
        name, state = _NODE_NAME.search(line), _STATE.search(line)
        if name is None or state is None:
            continue
        reason, gres = _REASON.search(line), _GRES.search(line)
        found[name[1]] = NodeState(
            name[1],
            state[1],
            reason[1].strip() if reason else "",
            at(reason[3] or "") if reason else None,
            "" if gres is None or gres[1] == "(null)" else gres[1],
        )
    return found


def _known_fields(run: Runner, timeout_s: float) -> Optional[list[str]]:
    try:
        done = run(["sacct", "--helpformat"], timeout_s)
    except SchedulerError:
        return None
    return known_fields(done.stdout, FIELDS) if done.rc == 0 else None
