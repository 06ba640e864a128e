"""A node that can be looked at as a whole: GPUs in the fake library, a PCI bus, a kernel log,
a boot, and a folder of state; and a clock that only goes when it is told to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Optional
from unittest import mock

from fakes.nvml.nodes import Node

from ftslurm.health import probe as probe_module
from ftslurm.health import signals as s
from ftslurm.health import sources
from ftslurm.health.job import JobFacts
from ftslurm.health.look import Parts
from ftslurm.health.probe import Probe, look_at, settle
from ftslurm.health.settings import HealthSettings
from ftslurm.health.state_dir import StateDir
from ftslurm.health.verdict import HARD

BUSES = [f"0000:{0x1B + 0x10 * index:02x}:00" for index in range(8)]
ECC = "ecc:dram:volatile:uncorrected"
XID_95 = "NVRM: Xid (PCI:0000:2b:00): 95, pid=7, name=python3, Uncontained: physAddr 0x12"
XID_13 = "NVRM: Xid (PCI:0000:2b:00): 13, pid=7, name=python3, Graphics SM Warp Exception on (GPC 1, TPC 3, SM 0): Out Of Range Address"  # noqa: E501


class ProbedNode:
    """The environment variable STATE_VARIABLE has to name `gpus.path`."""

    def __init__(self, folder: Path, library: str, model: str = "H100", gpus: int = 2) -> None:
        self.folder = folder
        self.now = 1_800_000_000.0
        self.slept: list[float] = []
        self.is_hasty = False
        """Its looks have no more time than the settings give."""
        folder.mkdir(exist_ok=True)
        self.gpus = Node(folder / "gpus", model, gpus)
        self.root = folder / "root"
        for bus in BUSES[:gpus]:
            self.pci(bus)
        self.boot("boot-one")
        (folder / "kern.log").touch()
        self.settings = HealthSettings(
            kernel_log=str(folder / "kern.log"),
            nvml_library=library,
            nvidia_smi=str(folder / "no-nvidia-smi"),
            sysfs_root=str(self.root),
            state_dir=str(folder / "state"),
        )

    def pci(self, bus: str) -> None:
        function = self.root / "sys/bus/pci/devices" / f"{bus}.0"
        write(function / "vendor", "0x10de")
        write(function / "class", "0x030200")
        write(function / "revision", "0xa1")
        (function / "config").write_bytes(b"\xde\x10" + bytes(62))
        (function / "driver").symlink_to("../../drivers/nvidia")

    def port(self, device: str, state: str = "4: ACTIVE") -> None:
        folder = self.root / "sys/class/infiniband" / device / "ports/1"
        write(folder / "state", state)
        write(folder / "phys_state", "5: LinkUp" if "ACTIVE" in state else "2: Polling")

    def process(
        self, pid: int, job: str, minor: int = 0, *, uid: int = 1000, start: int = 9
    ) -> None:
        """That holds a GPU; `job` is empty outside of every job's cgroup."""
        folder = self.root / "proc" / str(pid)
        (folder / "fd").mkdir(parents=True, exist_ok=True)
        if not (folder / "fd/7").is_symlink():
            (folder / "fd/7").symlink_to(f"/dev/nvidia{minor}")
        write(folder / "stat", f"{pid} (python3) S {'0 ' * 18}{start} 0")
        write(folder / "comm", "python3")
        write(folder / "status", f"Name:\tpython3\nUid:\t{uid}\t{uid}\t{uid}\t{uid}")
        step = f"/system.slice/slurmstepd.scope/job_{job}/step_0/user/task_0"
        write(folder / "cgroup", f"0::{step if job else '/user.slice'}")

    def boot(self, name: str, *, at: Optional[float] = None) -> None:
        """A week ago, if nothing else is said."""
        write(self.root / "proc/sys/kernel/random/boot_id", name)
        write(self.root / "proc/stat", f"btime {self.now - 7 * 86400 if at is None else at:.0f}")

    def log(self, *lines: str, at: Optional[float] = None) -> None:
        """As syslog keeps it."""
        stamp = datetime.fromtimestamp(self.now if at is None else at, timezone.utc).isoformat()
        with (self.folder / "kern.log").open("a") as log:
            log.write("".join(f"{stamp} node1 kernel: {line}\n" for line in lines))

    def state(self) -> StateDir:
        return StateDir(self.folder / "state")

    def look(self, context: str, job: str = "7", *, settles: bool = True, **more: Any) -> Probe:
        """A second later than what was before."""
        self.now += 1.0
        user, gpus = more.pop("user", "alice"), more.pop("gpus", (0, 1))
        facts = JobFacts("" if context == "periodic" else job, user, 1000, gpus, "node1")
        with self.state() as state, contextlib.nullcontext() if self.is_hasty else patience():
            probe = look_at(
                context, self.settings, facts, more.pop("state", state),
                clock=lambda: self.now, sleep=more.pop("sleep", self.sleep), **more,
            )  # fmt: skip
            if settles and context != "probe":
                assert not settle(state, probe)
        return probe

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@contextlib.contextmanager
def patience() -> Iterator[None]:
    """Twenty times the time for a look, as long a wait for the one before: this machine may stand
    still for some seconds."""
    times = {"_LOOK_SHARE": 14.0, "_PROBE_S": 160.0, "_LOCK_SHARE": 0.01}
    most = {"_NVML_SHORT_S": 60.0, "_SYSFS_S": 60.0}
    with mock.patch.multiple(probe_module, **times), mock.patch.multiple(sources, **most):
        yield


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def codes(probe: Probe) -> list[tuple[str, str]]:
    return [(verdict.word, verdict.code) for verdict in probe.verdicts]


def found(probe: Probe) -> list[tuple[str, str]]:
    """What is wrong; that all is well is a verdict too."""
    return [one for one in codes(probe) if one[0] != "ignore"]


def hard(probe: Probe) -> list[str]:
    return [code for word, code in codes(probe) if word in HARD]


def values(probe: Probe, kind: str) -> list[s.Value]:
    return [signal.value for signal in probe.reading.of(kind)]


def late(**_: object) -> Parts:
    """NVML, at once, as it is after its deadline."""
    parts = Parts()
    parts.signals.append(s.Signal(s.DRIVER_HANG, True, text="nvmlInit_v2 did not come back"))
    parts.failures.append(s.Failure("nvml", "nvml did not answer within 2.5 s in nvmlInit_v2"))
    return parts
