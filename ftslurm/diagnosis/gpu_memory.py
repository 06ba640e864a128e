"""Whether the memory of the job's GPUs is back, before ranks are placed on them again.

Reads only. NVML is asked in a process of its own, `python -m ftslurm.diagnosis.gpu_memory`, as a
call may hang in the driver. Where there is no driver, nothing is asked; what the driver does not
tell is held against no GPU, nor is memory that the kernel uses too, for page cache say: that of a
GPU which is a NUMA node. Memory counts against a GPU if processes of this job's earlier attempts
have it. In a job with all GPUs that are seen, so does what nobody living is known to hold.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from ctypes import c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Optional

from ftslurm.health.nvml import LIBRARY, Nvml
from ftslurm.health.nvml_types import SUCCESS, Memory, PciInfo
from ftslurm.health.signals import normal_bus
from ftslurm.run.process_stat import process_stat

WITHIN_S = 4.0
"""From the end of the last process until its memory counts as not coming back: the driver gives
80 GiB back in about a second."""
DRIVER_S = 5.0
"""More for NVML to start, on a node that is busy ending ranks: on a GPU without persistence mode
the driver loads first."""
HELD_BYTES = 2 << 30
"""Less is no trouble to a rank: a service's context, the driver's own."""
_LOOK_S = 0.2
DEVICE = Path("/dev/nvidiactl")
"""Is there with the driver."""

DEADLINE_S = WITHIN_S + DRIVER_S

OURS, OTHERS, ENDED = "ours", "others", "ended"
"""A process on a GPU: of an attempt in this job; living and none of these; not there any more."""
NOBODY = "no process that is there"


@dataclass(frozen=True)
class GpuUse:
    """One GPU's memory."""

    bus: str
    used_bytes: Optional[int] = None
    """None: not told."""
    processes: Mapping[int, Optional[int]] = field(default_factory=dict)
    """Pid -> bytes, None: not told."""


def held(gpus: Sequence[GpuUse], whose: Callable[[int], str], *, per_node: int) -> dict[str, str]:
    """PCI address -> how much of its memory an earlier attempt still has. `whose`: of a pid, OURS,
    OTHERS or ENDED; `per_node`: how many GPUs of a node the job has."""
    has_all = len(gpus) <= per_node
    found = {}
    for gpu in gpus:
        words = {pid: whose(pid) for pid in gpu.processes}
        # On a GPU that may be another job's, who has ended may have been that one's.
        olds = (OURS, ENDED) if has_all else (OURS,)
        old = {pid: gpu.processes[pid] for pid, word in words.items() if word in olds}
        living = [gpu.processes[pid] for pid, word in words.items() if word == OTHERS]
        size_bytes = sum(size or 0 for size in old.values())
        if has_all and gpu.used_bytes is not None and None not in living:
            size_bytes = max(size_bytes, gpu.used_bytes - sum(size or 0 for size in living))
        if size_bytes >= HELD_BYTES:
            found[gpu.bus] = f"{size_bytes / 2**30:.1f} GiB are taken by {_by_whom(old, words)}"
    return found


def _by_whom(old: Mapping[int, Optional[int]], words: Mapping[int, str]) -> str:
    if not old:
        return NOBODY
    names = [f"{pid} ({'has ended' if words[pid] == ENDED else 'lives'})" for pid in sorted(old)]
    return f"process{'es' if len(names) > 1 else ''} {', '.join(names[:5])} of an earlier attempt"


def has_owner(told: str) -> bool:
    """Of a word of `held`: whether it names who has the memory."""
    return not told.endswith(NOBODY)


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ftslurm.diagnosis.gpu_memory")
    parser.add_argument("--job", required=True, help="its raw id")
    parser.add_argument("--gpus", type=int, required=True, help="that it has on this node")
    parser.add_argument("--library", default=LIBRARY)
    options = parser.parse_args(argv)
    deadline = time.monotonic() + WITHIN_S
    nvml = Nvml(options.library)
    gpus: list[GpuUse] = []
    found: dict[str, str] = {}
    if nvml.start() == SUCCESS:
        while True:
            gpus = read(nvml)
            found = held(gpus, lambda pid: whose(pid, options.job), per_node=options.gpus)
            if not found or time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_S)
        nvml.stop()
    print(json.dumps({"gpus": len(gpus), "held": found}))  # noqa: T201
    return 0


@dataclass(frozen=True)
class Told:
    """What a look has told."""

    held: Mapping[str, str] = field(default_factory=dict)
    """As `held`, after WITHIN_S; at once where all is back."""
    is_unseen: bool = False
    """There is a driver, and none of its GPUs is shown here: they are in other steps' sight."""


def look_argv(job_id: str, per_node: int, library: str) -> list[str]:
    """The command that looks; empty where there is nothing to look at. Ends within DEADLINE_S but
    for a driver that hangs."""
    if not per_node or (library == LIBRARY and not DEVICE.exists()):
        return []
    return [
        *(sys.executable, "-m", "ftslurm.diagnosis.gpu_memory"),
        *(f"--job={job_id}", f"--gpus={per_node}", f"--library={library}"),
    ]


def parse(said: bytes) -> Told:
    """ValueError: it has said nothing."""
    for line in reversed(said.splitlines()):  # a library may print as well
        record = json.loads(line)
        held = {str(bus): str(what) for bus, what in record["held"].items()}
        return Told(held, record["gpus"] == 0)
    raise ValueError("no word")


def read(nvml: Nvml, *, numa: Path = Path("/sys/devices/system/node")) -> list[GpuUse]:
    """Of the GPUs that NVML shows; in a job's device cgroup those of the step."""
    _, count = nvml.device_count()
    gpus = []
    for index in range(count):
        code, device = nvml.device(index)
        if code:
            continue
        _, pci = nvml.filled("nvmlDeviceGetPciInfo_v3", device, PciInfo)
        code, memory = nvml.filled("nvmlDeviceGetMemoryInfo_v2", device, Memory)
        bus = normal_bus(pci.busId.decode(errors="replace"))
        _, processes = nvml.processes(device)
        # The slices of a partitioned GPU may be of other jobs, and their processes are not shown.
        mig_code, modes = nvml.numbers("nvmlDeviceGetMigMode", device, 2)
        is_cut = mig_code == SUCCESS and modes[0] == 1
        if _is_numa_node(nvml, device, numa):
            gpus.append(GpuUse(bus))
        else:
            gpus.append(GpuUse(bus, None if code or is_cut else memory.used, processes))
    return gpus


def _is_numa_node(nvml: Nvml, device: c_void_p, numa: Path) -> bool:
    """As on GH200 and GB200. A node with CPUs is that which the GPU is plugged in to."""
    code, node = nvml.number("nvmlDeviceGetNumaNodeId", device)
    if code:
        return False
    try:
        return not numa.joinpath(f"node{node}", "cpulist").read_text().strip()
    except OSError:
        return True  # in doubt


def whose(pid: int, job_id: str, *, proc: Path = Path("/proc")) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ENDED
    except PermissionError:
        return OTHERS  # another user's, which /proc need not show (hidepid)
    found = process_stat(pid)
    if found is None or found.state in "ZX":
        return ENDED
    try:
        environ = proc.joinpath(str(pid), "environ").read_bytes().split(b"\0")
    except OSError:
        return OTHERS
    # What the batch script has started beside the ranks is in no step, and what a person has in one
    # (srun --overlap --jobid) is of no attempt.
    names = {word.partition(b"=")[0] for word in environ}
    of_attempt = {b"SLURM_STEP_ID", b"FTSLURM_ATTEMPT"} <= names
    return OURS if of_attempt and f"SLURM_JOB_ID={job_id}".encode() in environ else OTHERS


if __name__ == "__main__":
    sys.exit(main())
