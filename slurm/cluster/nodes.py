"""Nodes: each one a set of namespaces (network, UTS, mount, PID, IPC) around one slurmd.

A node is switched off by killing its first process; nothing pins its namespaces, so its memory,
its mounts and its network end with it. What it wrote to its own disk folder stays.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import clients
import image
import network
from errors import ClusterError
from identity import Identity
from processes import (
    daemon_environment,
    end_processes,
    find_child,
    identify_process,
    is_running,
    poll,
    run,
    tail,
)
from record import Record

INIT = Path(__file__).resolve().parent / "node_init.py"
NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child")
REGISTER_TIMEOUT_S = 90
MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")


def make_node_folder(identity: Identity, node: str) -> None:
    folder = identity.node_folder(node)
    (folder / "spool").mkdir(parents=True, exist_ok=True)
    (folder / "own").mkdir(exist_ok=True)
    disk = folder / "local"
    disk.mkdir(exist_ok=True)
    disk.chmod(0o1777)


def start_node(identity: Identity, record: Record, node: str) -> None:
    """Switch a node on; its slurmd registers by itself some moments later."""
    if is_on(record, node):
        raise ClusterError(f"node `{node}` is already on")
    prefix = identity.subnet.rpartition("/")[2]
    address = f"{identity.node_address(node)}/{prefix}"
    inside = [sys.executable, "-S", str(INIT), node, address, str(identity.folder)]
    inside.append(record.settings.shared_fs)
    with identity.log(f"{node}.log").open("ab") as log:
        process = subprocess.Popen(
            ["unshare", *NAMESPACES, "--mount-proc", *image.lay_over(record.image, inside)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=daemon_environment(identity.slurm_conf),
            cwd=identity.folder,
            start_new_session=True,
        )
    record.nodes[node] = [identify_process(process.pid)]
    record.save()
    assert process.stdin is not None and process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise ClusterError(f"node `{node}` did not start; {tail(identity.log(f'{node}.log'))}")
    first = find_child(process.pid)
    if first is None:
        raise ClusterError(f"node `{node}` ended at once; {tail(identity.log(f'{node}.log'))}")
    record.nodes[node].append(identify_process(first))
    record.save()
    if not record.settings.scontrol:
        set_scontrol(identity, record, node, present=False)
    network.plug_in(identity, node, pid=first)
    with process.stdin as pipe:
        pipe.write("go\n")
    process.stdout.close()


def kill_node(record: Record, node: str) -> None:
    """Power off: every process of the node ends by SIGKILL, its memory is gone."""
    if not is_on(record, node):
        raise ClusterError(f"node `{node}` is already off")
    end_processes(record.nodes[node])


def remove_cgroups(nodes: list[str]) -> None:
    """What slurmd leaves of its tree, one a node; nothing of a node that is on."""
    for node in nodes:
        for folder, _, _ in os.walk(MEMORY_CGROUPS / f"slurm_{node}", topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()


def is_on(record: Record, node: str) -> bool:
    return any(is_running(process) for process in record.nodes.get(node, []))


def first_process(record: Record, node: str) -> int:
    """The host's pid of the node's pid 1, for `nsenter --target PID --all`."""
    return record.nodes[node][-1].pid


def make_without_scontrol(identity: Identity) -> None:
    """The folder that, laid over /usr/bin, takes scontrol away: device 0/0 there means `deleted`
    (overlayfs.rst, whiteouts). A file bound over it would be a command that fails instead."""
    identity.without_scontrol.mkdir(mode=0o755)
    os.mknod(identity.without_scontrol / "scontrol", stat.S_IFCHR, os.makedev(0, 0))


def set_scontrol(identity: Identity, record: Record, node: str, *, present: bool) -> None:
    """Take scontrol away from a node that is on, or give it back; jobs there run on."""
    layers = f"ro,lowerdir={identity.without_scontrol}:/usr/bin"
    without = ["mount", "-t", "overlay", "-o", layers, "overlay", "/usr/bin"]
    # With its PID namespace: umount reads /proc/self, and /proc there is the node's.
    enter = ["nsenter", f"--target={first_process(record, node)}", "--mount", "--pid"]
    run([*enter, *(["umount", "--lazy", "/usr/bin"] if present else without)])


def read_states(record: Record) -> dict[str, str]:
    """What slurmctld thinks of each node, as `sinfo` words (`idle`, `down*`, `mixed`)."""
    form = ["--noheader", "--Node", "--partition=low", "--format=%N %T"]
    shown = clients.try_to_ask(record, "sinfo", *form)
    if shown.returncode != 0:
        return {}
    return dict(line.split() for line in shown.stdout.splitlines())


def wait_until_idle(identity: Identity, record: Record, nodes: list[str]) -> None:
    missing = list(nodes)

    def registered() -> bool:
        states = read_states(record)
        missing[:] = [node for node in nodes if states.get(node) != "idle"]
        return not missing

    if not poll(registered, timeout_s=REGISTER_TIMEOUT_S, interval_s=0.1):
        logs = [tail(identity.log(f"{node}.log")) for node in missing[:2]]
        raise ClusterError(
            f"slurmd of {', '.join(missing)} did not register with slurmctld in "
            f"{REGISTER_TIMEOUT_S} s\n" + "\n".join([*logs, tail(identity.log("slurmctld.log"))])
        )
