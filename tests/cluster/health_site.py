"""A site of its own on the lab cluster: the root-owned probe in Prolog and Epilog, and on each node
eight GPUs, a PCI bus and a kernel log that a test can make sick.

All of it is real but the hardware: NVML is the library of tests/fakes/nvml, which reads what its
GPUs are from a file of the node's own.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Optional

from fakes.nvml.nodes import Node, build
from lab import REPOSITORY, Lab, wait_until

GPUS = 8
XID_48 = (
    "NVRM: Xid (PCI:0000:2b:00): 48, pid=4711, name=python3, An uncorrectable double bit error "
    "(DBE) has been detected on GPU in the framebuffer at physAddr 0x12345 partition 16, "
    "subpartition 3."
)

# What Slurm is told to run. It says how long each took, and is held as long as a test says, as by
# other things that a site has in the same place.
WRAPPER = """#!/bin/sh
PATH=/usr/bin:/bin
began=$(date +%s.%N)
while [ -e {own}/hold-{name} ]; do : >{own}/held-{name}; sleep 0.1; done
seen=$(date +%s.%N)
{program} >>{own}/{name}.log 2>&1
code=$?
ended=$(date +%s.%N)
times >{own}/times
{{ read -r _; read -r user system; }} <{own}/times
echo "{name} ${{SLURM_JOB_ID:--}} $began $seen $ended $code $user $system" >>{own}/calls
exit $code
"""


class Machine:
    """A node's hardware. New, it is healthy and has no past."""

    def __init__(self, own: Path) -> None:
        self._own = own
        for left in own.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        self.gpus = Node(own / "gpus", gpus=GPUS)
        (own / "kern.log").touch()
        (own / "state").mkdir(mode=0o755)
        for index in range(GPUS):
            function = own / "root/sys/bus/pci/devices" / f"0000:{0x1B + 0x10 * index:02x}:00.0"
            function.mkdir(parents=True)
            for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("revision", "0xa1")):
                (function / name).write_text(f"{text}\n")
            (function / "config").write_bytes(b"\xde\x10" + bytes(62))
            (function / "driver").symlink_to("../../drivers/nvidia")
        (own / "root/proc").symlink_to("/proc")

    def log(self, message: str) -> None:
        """A line of the kernel's, as syslog keeps it."""
        with (self._own / "kern.log").open("a") as log:
            log.write(f"{datetime.now(timezone.utc).isoformat()} node kernel: {message}\n")

    def fall_sick(self, way: str) -> None:
        SICK[way].happen(self)

    def hold(self, name: str) -> None:
        """Let no program of this name get to its work."""
        (self._own / f"hold-{name}").touch()

    def holds(self, name: str) -> bool:
        """Whether one has begun and waits."""
        return (self._own / f"held-{name}").exists()

    def release(self, name: str) -> None:
        (self._own / f"hold-{name}").unlink(missing_ok=True)

    def calls(self, name: str = "") -> list[Call]:
        """What Slurm has run here, in the order of their ends."""
        path = self._own / "calls"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [
            Call(row[0], row[1], *map(float, row[2:5]), int(row[5]), sum(map(_seconds, row[6:])))
            for row in rows
            if name in ("", row[0])
        ]

    def says(self) -> str:
        logs = sorted(self._own.glob("*.log"))
        return "\n".join(f"--- {path}\n{path.read_text()[-2000:]}" for path in logs)


@dataclass(frozen=True)
class Call:
    """One run of a program by Slurm: a line of the wrapper's."""

    program: str
    job: str
    began: float
    seen: float
    """When it was held no more."""
    ended: float
    code: int
    cpu_s: float
    """Does not grow with what else the machine has to do."""

    @property
    def seconds(self) -> float:
        return self.ended - self.seen


@dataclass(frozen=True)
class Sickness:
    code: str
    """As the reason has it."""
    happen: Callable[[Machine], object]


SICK: Mapping[str, Sickness] = {
    "dead NVLink": Sickness("NVLINK-DOWN", lambda node: node.gpus.set(1, "link:3", 0)),
    "Xid 48": Sickness("XID48", lambda node: node.log(XID_48)),
    "remap failure": Sickness("REMAP-FAIL", lambda node: node.gpus.set(1, "remap_failure", 1)),
    "GPU lost": Sickness("GPU-LOST", lambda node: node.gpus.set(1, "code:*", 15)),
    "driver hang": Sickness(
        "DRV-HANG", lambda node: node.gpus.set(1, "hang:nvmlDeviceGetMemoryErrorCounter", 1)
    ),
}


class HealthSite:
    """The root copy, installed once for the lab, and the nodes as it sees them."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.own = lab.folder / "own"
        self.folder = lab.folder / "site"
        self.prefix = self.folder / "ftslurm"
        self.folder.mkdir(exist_ok=True)
        self.library = build(self.folder, f'-DSTATE_FILE="{self.own}/gpus"')
        self.looks_at = {
            "nvml_library": str(self.library),
            "nvidia_smi": str(self.folder / "no-nvidia-smi"),
            "sysfs_root": str(self.own / "root"),
            "kernel_log": str(self.own / "kern.log"),
        }
        installer = str(REPOSITORY / "slurm/install_node.py")
        lab.run_as_root("/usr/bin/python3", installer, f"--prefix={self.prefix}")
        self.nodes: dict[str, Machine] = {}

    def renew(self) -> None:
        """All nodes healthy and without a past; the settings as a site has them."""
        for node in self.lab.nodes:
            self.nodes[node] = Machine(self.lab.folder / "nodes" / node / "own")
        self.configure()

    def configure(self, **settings: Any) -> None:
        """The settings that the root copy reads, the same on all nodes."""
        path = self.prefix / "etc/health.json"
        defaults = {"schema_version": 1, "state_dir": str(self.own / "state"), **self.looks_at}
        path.write_text(json.dumps({**defaults, **settings}))

    def run_in_slurm(
        self,
        *programs: str,
        **settings: Any,
    ) -> None:
        """Have Slurm run these at their times; `settings` of the cluster beside."""
        names = {"healthcheck": "health_check"}
        for name in programs:
            path = self.folder / name
            path.write_text(
                WRAPPER.format(
                    name=name,
                    program=self.prefix / "site" / f"{name}.sh",
                    own=self.own,
                )
            )
            path.chmod(0o755)
            settings[names.get(name, name)] = str(path)
        self.lab.change_settings(**settings)

    def wait_until_held(self, nodes: Sequence[str], program: str) -> None:
        """Until Slurm has begun it on all of these, and none has got to its work."""
        wait_until(
            lambda: all(self.nodes[node].holds(program) for node in nodes) or None,
            timeout_s=90,
            seen=self.says,
        )

    def release(self, program: str) -> None:
        for node in self.nodes.values():
            node.release(program)

    def wait_for_call(self, node: str, program: str, job: str, *, timeout_s: float = 60) -> Call:
        """Until Slurm has run it there for that job."""

        def called() -> Optional[Call]:
            calls = self.nodes[node].calls(program)
            return next((call for call in calls if call.job == job), None)

        return wait_until(called, timeout_s=timeout_s, seen=self.says)

    def reason(self, node: str) -> str:
        """Why a node is drained; empty when it is not."""
        shown = self.lab.run_as_root("scontrol", "show", "node", node)
        state = re.search(r"State=(\S+)", shown)
        found = re.search(r"Reason=(.*)", shown)
        assert state is not None, shown
        return found[1] if found and "DRAIN" in state[1] else ""

    def drained(self) -> dict[str, str]:
        found = {node: self.reason(node) for node in self.lab.nodes}
        return {node: reason for node, reason in found.items() if reason}

    def overrides(self) -> list[str]:
        """Of a run, so that its own look at a node sees the same hardware."""
        return [f"health.{key}={value}" for key, value in self.looks_at.items()]

    def says(self) -> str:
        shown = [self.lab.run_as_root("sinfo", "-R"), self.lab.run_as_root("sinfo", "-N")]
        shown += [f"{node}:\n{machine.says()}" for node, machine in self.nodes.items()]
        return "\n".join(shown)


def _seconds(text: str) -> float:
    """`0m0.130000s`, as a shell's `times` writes it."""
    minutes, _, seconds = text.rstrip("s").partition("m")
    return 60 * int(minutes) + float(seconds)
