"""When nodes were out of service, and the reason on record: `sacctmgr show event`.

slurmdbd keeps an event from the moment at which a node is drained or goes down until it is in
service again; a site may show a user fewer. Asked once; nothing is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from ftslurm.errors import SchedulerError
from ftslurm.scheduler.slurm import Runner, run_command
from ftslurm.scheduler.slurm_parse import at

ASK_S = 30.0

# A reason may hold the delimiter: it comes last.
FIELDS = ("NodeName", "TimeStart", "TimeEnd", "State", "User", "Reason")


@dataclass(frozen=True)
class NodeEvent:
    node: str
    begin_at: float
    """UTC seconds."""
    end_at: Optional[float]
    """None: it goes on."""
    state: str
    """`DRAIN`, `DOWN*`"""
    by: str
    """Who has set the reason, as Slurm prints him."""
    reason: str


def read_events(since: str, until: str, *, run: Runner = run_command) -> list[NodeEvent]:
    """Those that lie in the window in part; times as sacct takes them. SchedulerError when nobody
    answers."""
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "event", "events=node",
            f"start={since}", f"end={until}", f"format={','.join(FIELDS)}"]  # fmt: skip
    done = run(argv, ASK_S)
    if done.rc != 0:
        raise SchedulerError(f"sacctmgr has no answer ({done.stderr.strip()[-200:]})")
    return parse_events(done.stdout.splitlines())


def parse_events(lines: Sequence[str]) -> list[NodeEvent]:
    """Lines that are none are left out: a reason may have a newline in it."""
    found = []
    for line in lines:
        values = line.split("|", len(FIELDS) - 1)
        begin_at = at(values[1]) if len(values) == len(FIELDS) else None
        if begin_at is not None:
            node, _, end, state, by, reason = values
            found.append(NodeEvent(node, begin_at, at(end), state, by, reason))
    return found
