"""A fleet of nodes as slurmctld keeps it, behind the texts of scontrol and sinfo.

Does what update_node of node_mgr.c does: DRAIN writes the reason over the one that is there,
UNDRAIN takes off that flag alone and with it the reason, stamps are whole seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Optional

from ftslurm.health.child import Ended
from ftslurm.health.reason import stamp

NOW = 1_800_000_000.0


@dataclass
class FleetNode:
    state: str = "IDLE"
    """As `scontrol show node` prints it."""
    reason: str = ""
    by: str = "root"
    at: float = 0.0

    @property
    def is_drained(self) -> bool:
        return "DRAIN" in self.state.split("+")


@dataclass
class Fleet:
    nodes: dict[str, FleetNode]
    now: float = NOW
    gres: str = "gpu:h100:8(S:0-1)"
    calls: list[list[str]] = field(default_factory=list)
    drains: list[tuple[float, str]] = field(default_factory=list)
    """(stamp, node) of all that were ever set."""
    broken: dict[str, Ended] = field(default_factory=dict)
    """What a call ends with instead: by `show`, `update` or `sinfo`."""
    before: Optional[Callable[[str], None]] = None
    """Called before each call is served, with its kind."""

    def run(self, argv: Sequence[str], deadline_s: float) -> Ended:
        kind = "sinfo" if argv[0] == "sinfo" else argv[1]
        if self.before:
            self.before(kind)
        self.calls.append(list(argv))
        if kind in self.broken:
            return self.broken[kind]
        if kind == "sinfo":
            return ended(stdout=self._listing())
        if kind == "show" and argv[3] not in self.nodes:
            return ended(1, stderr=f"Node {argv[3]} not found")
        if kind == "show":
            return ended(stdout=self.text(argv[3]))
        given = dict(word.split("=", 1) for word in argv[2:])
        self._update(given["NodeName"], given["State"], given.get("Reason", ""))
        return ended()

    def drained(self) -> list[str]:
        return [name for name, node in self.nodes.items() if node.is_drained]

    def updates(self) -> list[list[str]]:
        return [call for call in self.calls if call[1] == "update"]

    def text(self, name: str) -> str:
        node = self.nodes[name]
        by = f" [{node.by}@{self._time(node.at)}]"
        told = f"   Reason={node.reason}{by}\n" if node.reason else ""
        return (
            f"NodeName={name} Arch=x86_64 CoresPerSocket=32 \n   CPUAlloc=0 CPUTot=64 CPULoad=0.1\n"
            f"   Gres={self.gres}\n   OS=Linux 5.14.0 #1 SMP State=of the art\n"
            f"   State={node.state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A\n"
            f"   Partitions=low,high \n   CfgTRES=cpu=64,gres/gpu=8\n{told}\n"
        )

    def _update(self, name: str, state: str, reason: str) -> None:
        node = self.nodes[name]
        flags = [flag for flag in node.state.split("+") if flag != "DRAIN"]
        if state == "UNDRAIN":
            node.state, node.reason = "+".join(flags), ""
            return
        assert state == "DRAIN" and reason, (state, reason)
        node.state = "+".join([*flags, "DRAIN"])
        node.reason, node.by, node.at = reason, "root", float(int(self.now))
        self.drains.append((node.at, name))

    def _listing(self) -> str:
        rows = []
        for name, node in sorted(self.nodes.items()):
            by, at = (node.by, self._time(node.at)) if node.reason else ("Unknown", "Unknown")
            rows += [f"{name}|{at}|{by}|{self.gres}|{node.reason or 'none'}"] * 2
        return "\n".join(rows) + "\n"

    @staticmethod
    def _time(at: float) -> str:
        return stamp(at).rstrip("Z")


def fleet(*names: str, **rest: object) -> Fleet:
    return Fleet({name: FleetNode() for name in names}, **rest)


def ended(
    code: Optional[int] = 0, *, stdout: str = "", stderr: str = "", is_late: bool = False
) -> Ended:
    return Ended(code, stdout.encode(), stderr.encode(), is_late, False, 1, "1", 0.0)


LATE = ended(-15, is_late=True)
AWAY = ended(1, stderr="slurm_load_node error: Unable to contact slurm controller")
