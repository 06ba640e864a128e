"""The first process inside a node: makes the namespaces look like a machine, then runs slurmd.

Runs as pid 1 of its PID namespace, so when it is killed everything in the node dies with it, and
the node's /tmp, /dev/shm and network with the namespaces. It must outlive slurmd (an init that
ends takes the node with it) and reaps whatever ends.

    node_init.py HOSTNAME ADDRESS/PREFIX CLUSTER_FOLDER SHARED_FS

Says `ready` on stdout once its namespaces exist, then waits for a line on stdin, which means that
eth0 has been plugged in.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import shared_fs

PRIVATE_MEMORY = ("/tmp", "/dev/shm")


def main() -> NoReturn:
    hostname, address, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    socket.sethostname(hostname)
    _mount(hostname, folder)
    shared_fs.lay_over(sys.argv[4], folder / "home")
    print("ready", flush=True)
    if sys.stdin.readline().strip() != "go":
        sys.exit(1)  # the one who starts nodes died
    commands = f"link set lo up\naddress add {address} dev eth0\nlink set eth0 up\n"
    subprocess.run(["ip", "-batch", "-"], input=commands, text=True, check=True)
    _let_go_of_the_caller()
    slurmd = subprocess.Popen(["slurmd", "-D", "-N", hostname])
    while True:
        pid, status = os.wait()
        if pid == slurmd.pid:
            break
    code = os.waitstatus_to_exitcode(status)
    print(f"node_init: slurmd ended with code {code}; the node stays on without it", flush=True)
    _reap_forever()


def _mount(hostname: str, folder: Path) -> None:
    for place in PRIVATE_MEMORY:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", place], check=True)
    for name in ("local", "own"):
        _bind(folder / "nodes" / hostname / name, folder / name)
    _bind(folder / "etc" / "hosts", Path("/etc/hosts"))


def _bind(source: Path, target: Path) -> None:
    subprocess.run(["mount", "--bind", str(source), str(target)], check=True)


def _let_go_of_the_caller() -> None:
    """Close the pipes to the starter: from here on stdout is the log that stderr has been."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)


def _reap_forever() -> NoReturn:
    """Collect ended processes; sleep while there are none."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            os.wait()
        except ChildProcessError:
            signal.sigwait({signal.SIGCHLD})


if __name__ == "__main__":
    main()
