"""What this machine has for a run: memory for staging, limits, signals, interfaces.

Reads /proc and the environment, changes nothing. On a login node memory says nothing of the nodes
and is not judged; on a node of a job (`srun ftslurm doctor --here`) it is what ranks will have.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Optional

from ftslurm.doctor.cgroup import room_in_cgroup
from ftslurm.doctor.line import Line, fail, ok, skipped, warn


def check_host(
    environ: Mapping[str, str],
    *,
    staged_bytes: Optional[float],
    stop_signal: str,
    is_node: bool,
    root: Path = Path("/"),
) -> list[Line]:
    """`staged_bytes`: what the ranks of one node keep of their state in memory while it is written;
    `stop_signal`: as in cluster.signal, e.g. USR1; `is_node`: ranks will run here."""
    return [
        *(_memory_of_node(root, staged_bytes) if is_node else _memory_elsewhere()),
        _signal_clash(environ, stop_signal),
        _locked_memory(root),
        _open_files(),
        _interface(environ, root),
    ]


LEAST_SHARED_BYTES = 1 << 30
"""NCCL lays buffers of some tens of MiB a pair of ranks there, DataLoader workers their batches; a
container has 64 MiB unless it is given more."""


def _memory_of_node(root: Path, staged_bytes: Optional[float]) -> list[Line]:
    return [_shared_memory(root), _memory(root, staged_bytes)]


def _memory_elsewhere() -> list[Line]:
    told = "of the nodes, not of this machine: `srun ftslurm doctor --here` tells"
    return [skipped("host.shared_memory", told), skipped("host.memory", told)]


def _shared_memory(root: Path) -> Line:
    """Saves are staged in the ranks' own memory, not here."""
    name = "host.shared_memory"
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError as error:
        todo = "mount a tmpfs on /dev/shm: NCCL and the ranks' beats for their agents lie there"
        return fail(name, f"/dev/shm: {error.strerror}", todo)
    free = found.f_bavail * found.f_frsize
    told = f"{free / 1e9:,.2f} GB of /dev/shm free, of {found.f_blocks * found.f_frsize / 1e9:,.2f}"
    if free < LEAST_SHARED_BYTES:
        todo = "NCCL's buffers and DataLoader workers may not fit: have a larger tmpfs there"
        return warn(name, told, todo)
    return ok(name, told)


def _memory(root: Path, staged_bytes: Optional[float]) -> Line:
    """What the node has left, or the job's cgroup where that is less."""
    name = "host.memory"
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError as error:
        return skipped(name, f"/proc/meminfo: {error.strerror}")
    for line in lines:
        key, _, rest = line.partition(":")
        if key == "MemAvailable":
            of_node, of_job = 1024.0 * int(rest.split()[0]), room_in_cgroup(root)
            if of_job is not None and of_job < of_node:
                return _holds(name, "the job's memory", of_job, staged_bytes)
            return _holds(name, "memory", of_node, staged_bytes)
    return skipped(name, "/proc/meminfo tells of no MemAvailable")


def _holds(name: str, what: str, free: float, needed: Optional[float]) -> Line:
    told = f"{free / 1e9:,.1f} GB of {what} free"
    if needed is None:
        return ok(name, f"{told}; with --state-gb it is held against what a save stages")
    told = f"{told}, a save stages {needed / 1e9:,.1f} GB on a node"
    if free < needed:
        return fail(
            name,
            told,
            "spread the state over more nodes, or give the job more memory (cluster.mem)",
        )
    return ok(name, told)


def _signal_clash(environ: Mapping[str, str], stop_signal: str) -> Line:
    """NCCL's proxy dumps its state at this signal, and the rank saves nothing (nccl, proxy.cc)."""
    name = "host.signal_clash"
    set_to = environ.get("NCCL_PROXY_DUMP_SIGNAL", "")
    number = getattr(signal, f"SIG{stop_signal}", None)
    if set_to and number is not None and set_to == str(int(number)):
        return fail(
            name,
            f"NCCL_PROXY_DUMP_SIGNAL={set_to} is {stop_signal}, with which Slurm asks"
            " a run to save",
            "unset it, or choose another cluster.signal",
        )
    return ok(name, f"nobody else takes {stop_signal}")


def _locked_memory(root: Path) -> Line:
    name = "host.locked_memory"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok(name, "unlimited")
    told = f"{soft / 1e6:,.0f} MB"
    if not any((root / "sys/class/infiniband").glob("*")):
        return ok(name, f"{told}, and no RDMA device that needs more is seen here")
    if soft < 64 << 20:
        return warn(
            name,
            told,
            "RDMA needs it unlimited; ask for LimitMEMLOCK=infinity of slurmd,"
            " or PropagateResourceLimitsExcept=MEMLOCK",
        )
    return ok(name, told)


def _open_files() -> Line:
    name = "host.open_files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096 and hard < 4096:
        return warn(
            name,
            f"{soft}",
            "a rank of a large job has a connection to each other: ask for 4096 or more (nofile)",
        )
    return ok(name, f"{soft}, may be raised to {hard}")


def _interface(environ: Mapping[str, str], root: Path) -> Line:
    """One that is named has to be there; several that carry addresses make the choice a gamble."""
    name = "host.interface"
    here = sorted(path.name for path in (root / "sys/class/net").glob("*"))
    for variable, finds in (("NCCL_SOCKET_IFNAME", _nccl_finds), ("GLOO_SOCKET_IFNAME", _all_in)):
        value = environ.get(variable, "")
        if value and not finds(value, here):
            told = f"{variable}={value}, but there are {', '.join(here)}"
            return warn(name, told, "name one that all nodes have (cluster.interface)")
    return ok(name, ", ".join(here) or "none is seen here")


def _nccl_finds(value: str, here: Sequence[str]) -> bool:
    """A mark in front stands for the whole list: `^` all but these, `=` these by their whole name;
    without one each is the beginning of names. One that is found is enough (nccl, socket.cc)."""
    if value.startswith("^"):
        return True
    if value.startswith("="):
        return any(one in here for one in value[1:].split(","))
    return any(one and it.startswith(one) for one in value.split(",") for it in here)


def _all_in(value: str, here: Sequence[str]) -> bool:
    """torch binds gloo to each of them, by their whole names."""
    return all(one in here for one in value.split(","))
