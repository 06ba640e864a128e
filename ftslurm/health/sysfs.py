"""What the kernel's files say: PCI functions, RDMA ports, who holds a GPU, the boot. Reads only.

All below `root`, so that tests can bring their own. What is not there gives no signal. Attributes
of a network card ask its firmware and may hang with it, so `read_sysfs` looks in a child with a
deadline. Counters of a port are read only where the port is up: on some boards reads of ports that
lead to internal bridges fill the kernel log with ACCESS_REG errors (leptonai/gpud#1164).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ftslurm.health import signals as s
from ftslurm.health.child import ticks_of
from ftslurm.health.look import Emitter, Parts, look_in_child
from ftslurm.health.signals import Failure, Gpu, Signal, normal_bus

SOURCE = "sysfs"

_NVIDIA = "0x10de"
_DISPLAY = "0x0300"
_GPU_CLASSES = ("0x0302", _DISPLAY)
_CLASS = re.compile(r"0x[0-9a-f]{6}\Z")
_VENDOR = re.compile(r"0x[0-9a-f]{4}\Z")
_SWITCH_CLASS = "0x0680"
_FABRIC_MANAGER = "nv-fabricmanage"
"""As /proc has it: 15 letters (prctl(2), PR_SET_NAME)."""
_AER = (
    ("aer_dev_fatal", s.AER_FATAL),
    ("aer_dev_nonfatal", s.AER_NONFATAL),
    ("aer_dev_correctable", s.AER_CORRECTABLE),
)
_COUNTERS = (
    "counters/symbol_error", "counters/link_error_recovery", "counters/link_downed",
    "counters/port_rcv_errors", "counters/port_xmit_discards",
    "counters/local_link_integrity_errors", "counters/excessive_buffer_overrun_errors",
    "hw_counters/rnr_nak_retry_err", "hw_counters/local_ack_timeout_err",
    "hw_counters/out_of_sequence", "hw_counters/roce_slow_restart",
)  # fmt: skip
_DEVICE = re.compile(r"/dev/nvidia(\d+)\Z")
_JOB = re.compile(
    r"^\d+:[^:\n]*:(?!/user\.slice/)\S*?/(?:(?:[^/\s]+_)?slurmstepd\.scope|slurm(?:_[^/\s]+)?/uid_\d+)"
    r"/job_(\d+)(?:/|$)",
    re.M,
)
"""Slurm's own folders of cgroup v2 and v1; below a user's slice he may name his own as he likes."""
_SHARED = ("nvidia-cuda-mps",)
"""Servers of MPS run under their client's user and outlive his job (docs.nvidia.com/deploy/mps)."""
_READ_BYTES = 4096


@dataclass(frozen=True)
class PciFunction:
    """A GPU as PCI has it. `is_lost`: its configuration space reads all ones (lspci: rev ff)."""

    bus: str
    is_lost: bool


def read_boot_id(root: Path = Path("/")) -> str:
    """`` where the kernel does not say it."""
    return _text(root / "proc/sys/kernel/random/boot_id")


def nvidia_functions(root: Path = Path("/")) -> Optional[list[PciFunction]]:
    """GPUs that the NVIDIA driver should show, by bus; None where PCI cannot be listed.

    Not one that another driver holds (vfio-pci for a virtual machine), nor a virtual function. One
    without any driver counts: that is how a GPU ends whose start has failed. But not the display
    cards of a node that has no driver at all, nor anything to compute on.
    """
    try:
        folders = sorted((root / "sys/bus/pci/devices").iterdir())
    except OSError:
        return None
    found, has_compute = [], (root / "proc/driver/nvidia/version").exists()
    for folder in folders:
        bus = normal_bus(folder.name)
        kind, vendor = _text(folder / "class"), _text(folder / "vendor")
        if not _CLASS.match(kind) or not _VENDOR.match(vendor):
            return None  # it may be a GPU, and a count without it would be one too few
        is_gpu = kind[:6] in _GPU_CLASSES and vendor == _NVIDIA
        if not bus or not is_gpu or (folder / "physfn").exists():
            continue
        driver = folder / "driver"
        if driver.is_symlink() and driver.readlink().name != "nvidia":
            continue
        has_compute = has_compute or driver.is_symlink() or kind[:6] != _DISPLAY
        # `revision` is what the kernel saw at boot; lspci reads the configuration itself.
        config = _bytes(folder / "config")[:16]
        is_lost = len(config) >= 4 and not config.strip(b"\xff")
        found.append(PciFunction(bus, is_lost or _text(folder / "revision") == "0xff"))
    return found if has_compute else []


def gres_signal(count: int) -> Signal:
    """The number of GPUs that Slurm was told of, which its configuration knows and no file here."""
    return Signal(s.GPU_COUNT_GRES, count)


def read_sysfs(
    *,
    deadline_s: float,
    root: Path = Path("/"),
    rdma: bool = True,
    job: str = "",
    uid: Optional[int] = None,
    left: Collection[str] = (),
) -> Parts:
    """PCI and RDMA; with `job`, also the processes it or its user (`uid`) left on the GPUs; and
    which are still there of those that a look before has found (`left`, by their `where`).

    A hang is a Failure of `sysfs`, not of the GPU's driver.
    """

    def look(emitter: Emitter) -> None:
        emitter.calling("PCI")
        for signal in pci_signals(root):
            emitter.emit(signal)
        for signal in fabric_manager_signals(root):
            emitter.emit(signal)
        functions = nvidia_functions(root)
        if functions is None:
            emitter.emit(Failure(SOURCE, "the PCI devices cannot be listed"))
        for function in functions or ():
            emitter.emit(Gpu(None, "", function.bus))
        if job or left:
            emitter.calling("/proc")
            for signal in leftover_signals(root, job=job, uid=uid, left=left):
                emitter.emit(signal)
        if rdma:
            for port in rdma_ports(root):
                emitter.calling(f"RDMA port {port.parent.parent.name}/{port.name}")
                for signal in port_signals(port):
                    emitter.emit(signal)

    return look_in_child(look, source=SOURCE, deadline_s=deadline_s)[0]


def pci_signals(root: Path) -> Iterator[Signal]:
    functions = nvidia_functions(root)
    if functions is None:
        return
    yield Signal(s.GPU_COUNT_PCI, len(functions))
    for function in functions:
        gpu = Gpu(None, "", function.bus)
        if function.is_lost:
            yield Signal(s.GPU_LOST, True, gpu=gpu, text="PCI reads revision ff")
            continue
        folder = root / "sys/bus/pci/devices" / f"{function.bus}.0"
        for name, kind in _AER:
            total = _aer_total(_text(folder / name))
            if total is not None:
                yield Signal(kind, total, gpu=gpu)


def fabric_manager_signals(root: Path) -> Iterator[Signal]:
    """Whether it runs, on a board whose NVSwitches are seen here; others have none to run."""
    classes = (root / "sys/bus/pci/devices").glob("*/class")
    has_switch = any(
        _text(path)[:6] == _SWITCH_CLASS and _text(path.with_name("vendor")) == _NVIDIA
        for path in classes
    )
    # Where /proc is mounted with hidepid, a user does not see the process of root.
    if not has_switch or not _text(root / "proc/1/comm"):
        return
    is_there = any(_text(path) == _FABRIC_MANAGER for path in (root / "proc").glob("[0-9]*/comm"))
    yield Signal(s.FABRIC_MANAGER, "active" if is_there else "no process")


def rdma_ports(root: Path) -> list[Path]:
    """The folders of all ports; [] without RDMA."""
    return sorted((root / "sys/class/infiniband").glob("*/ports/*"))


def port_signals(port: Path) -> Iterator[Signal]:
    """State, rate, and the counters of a port that is up."""
    where = f"{port.parent.parent.name}/{port.name}"
    state, physical = _named(port / "state"), _named(port / "phys_state")
    if not state:
        return
    yield Signal(s.RDMA_STATE, state, where=where)
    if physical:
        yield Signal(s.RDMA_PHYS_STATE, physical, where=where)
    if state != "ACTIVE":
        return
    rate = re.match(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec", _text(port / "rate"))
    if rate:
        yield Signal(s.RDMA_RATE, float(rate.group(1)), where=where)
    for path in _COUNTERS:
        name = path.partition("/")[2]
        value = _count(_text(port / path))
        if value is not None:
            yield Signal(s.RDMA_COUNTER, value, where=f"{where}/{name}")


def leftover_signals(
    root: Path, *, job: str, uid: Optional[int] = None, left: Collection[str] = ()
) -> Iterator[Signal]:
    """Holders of /dev/nvidiaN in the job's cgroup, or in none but of its user; and those of `left`.

    A process of another job on the node is none, nor a daemon: those belong to root, or to a user
    who holds no job, or are those of MPS. A requeued job has its number again, so that a process of
    before is known by its start.
    """
    buses = _device_buses(root)
    for folder in sorted((root / "proc").glob("[0-9]*")):
        devices = _held_devices(folder)
        if not devices:
            continue
        owner, name = _JOB.search(_text(folder / "cgroup")), _text(folder / "comm")
        is_ours = owner.group(1) == job if owner else bool(uid) and _uid(folder) == uid
        pid = f"{folder.name}-{ticks_of(int(folder.name), root / 'proc')}"
        where = f"{pid}/{'job' if owner else 'user'}"
        if name in _SHARED or not (is_ours or where in left):
            continue
        for minor in sorted(devices):
            bus = buses.get(minor, "")
            yield Signal(
                s.LEFTOVER_PROCESS,
                int(folder.name),
                gpu=Gpu(None, "", bus) if bus else None,
                where=where,
                text=name,
            )


def _device_buses(root: Path) -> dict[int, str]:
    """Bus by the number in /dev/nvidiaN, which is not NVML's index."""
    buses = {}
    for folder in (root / "proc/driver/nvidia/gpus").glob("*"):
        minor = re.search(r"^Device Minor:\s*(\d{1,4})\s*$", _text(folder / "information"), re.M)
        if minor:
            buses[int(minor.group(1))] = normal_bus(folder.name)
    return buses


def _held_devices(process: Path) -> set[int]:
    held = set()
    try:
        for descriptor in (process / "fd").iterdir():
            try:
                match = _DEVICE.search(str(descriptor.readlink()))
            except OSError:  # closed meanwhile
                continue
            if match:
                held.add(int(match.group(1)))
    except OSError:  # ended meanwhile, or not ours to see
        pass
    return held


def _uid(process: Path) -> Optional[int]:
    match = re.search(r"^Uid:\s+(\d{1,10})\b", _text(process / "status"), re.M)
    return int(match.group(1)) if match else None


def _aer_total(text: str) -> Optional[int]:
    """Of lines `NAME COUNT`, the last of which is the total (sysfs-bus-pci-devices-aer_stats)."""
    match = re.search(r"^TOTAL_ERR_\w+ (\d{1,20})$", text, re.M)
    return int(match.group(1)) if match else None


def _named(path: Path) -> str:
    """`ACTIVE` of `4: ACTIVE` (Linux drivers/infiniband/core/sysfs.c)."""
    match = re.match(r"\d{1,2}: ([A-Za-z][A-Za-z_ ]{1,30})\Z", _text(path))
    return match.group(1) if match else ""


def _count(text: str) -> Optional[int]:
    return int(text) if re.match(r"[0-9]{1,20}\Z", text) else None


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb", buffering=0) as stream:
            return stream.read(_READ_BYTES) or b""
    except OSError:
        return b""


def _text(path: Path) -> str:
    return _bytes(path).decode("ascii", errors="replace").strip()
