"""The few calls of Slurm that a node makes about itself, each bounded and counted.

Every call that does not come back well in its time is a SchedulerError; what a drain that was cut
off has done is then not known. slurmctld that is away keeps scontrol for 9 s or longer (seen).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ftslurm.errors import FormatError, SchedulerError
from ftslurm.health.child import Ended, run_command
from ftslurm.health.node_state import (
    LISTING_FORMAT,
    Listing,
    NodeState,
    parse_listing,
    parse_node,
)

Runner = Callable[[Sequence[str], float], Ended]
"""(argv, seconds)."""

_LIMIT_BYTES = 32 << 20
"""sinfo tells a node once for each of its partitions: 10,000 nodes of ten are some 6 MB."""
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


def run_slurm(argv: Sequence[str], deadline_s: float) -> Ended:
    """With the few variables that change what Slurm prints, or where it looks, set or left out:
    SLURM_TIME_FORMAT, SINFO_FORMAT and their like would change the text."""
    env = {"PATH": os.environ.get("PATH") or _PATH, "LC_ALL": "C", "TZ": "UTC"}
    if "SLURM_CONF" in os.environ:
        env["SLURM_CONF"] = os.environ["SLURM_CONF"]
    return run_command(argv, deadline_s=deadline_s, env=env, limit_bytes=_LIMIT_BYTES)


class SlurmNode:
    def __init__(self, node: str, call_s: float, runner: Runner) -> None:
        self.node = node
        self.calls = 0
        self._call_s = call_s
        self._runner = runner

    def read(self) -> NodeState:
        """Comes before all that changes the node: `ALL` and `n[1-9]` do not come past it."""
        text = self._run(["scontrol", "show", "node", self.node])
        try:
            return parse_node(text, self.node)
        except FormatError as error:
            raise SchedulerError(str(error)) from None

    def drain(self, reason: str) -> None:
        """The running job is not disturbed. Overwrites whatever reason is there."""
        argv = ["scontrol", "update", f"NodeName={self.node}", "State=DRAIN"]
        self._run([*argv, f"Reason={reason}"])

    def undrain(self) -> None:
        """Takes off DRAIN and its reason, and nothing else."""
        self._run(["scontrol", "update", f"NodeName={self.node}", "State=UNDRAIN"])

    def listing(self) -> Listing:
        return parse_listing(
            self._run(["sinfo", "--all", "--noheader", "--Node", f"--format={LISTING_FORMAT}"])
        )

    def _run(self, argv: list[str]) -> str:
        self.calls += 1
        ended = self._runner(argv, self._call_s)
        call = " ".join(argv[:3])
        if ended.is_late or ended.is_abandoned:
            raise SchedulerError(f"`{call}` was cut off after {self._call_s:g} s")
        if ended.is_cut:
            raise SchedulerError(f"`{call}` had more to say than is read")
        if ended.code != 0:
            said = ended.stderr.decode(errors="replace").strip()[:200]
            raise SchedulerError(f"`{call}` ended with {ended.code}: {said or 'no word'}")
        return ended.stdout.decode(errors="replace")
