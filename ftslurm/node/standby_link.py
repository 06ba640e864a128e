"""What a standby and the client of a rank share: where they meet, what must be equal, messages.

They meet at an abstract socket of the run and its job: nothing is left on a disk, and each sees
which user the other is. A rank is forked only where the two processes are alike in all that a
process takes from its start; of variables that differ only the names are told, never the values.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

ANSWER_S = 5.0
"""How long either waits for the other's next word before the rank is started cold, which costs
more: what is there and silent is mostly late, on a node that is busy with its ranks' end."""

STANDARD_STREAMS = (0, 1, 2)

FORWARDED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGCONT)

# Other for each rank, attempt or job step, and read by nothing that is imported beforehand. The
# variables that name a task's own GPUs are not among them: where ranks see other devices than the
# standby, its numbers would mean other GPUs.
_FREE_PREFIXES = ("SLURM", "SRUN_", "FTSLURM_", "MASTER_", "SUBMITIT_", "PMI", "OMPI_")
_FREE = {"_", "PWD", "OLDPWD", "SHLVL"}

_NAMESPACES = ("ipc", "mnt", "net", "pid", "user", "uts")
_STATUS = (b"Umask", b"Groups", b"CapEff", b"NoNewPrivs")
_NAMED = 3
_BLOCK_BYTES = 1 << 16


def address(environ: Mapping[str, str]) -> bytes:
    """Name in the abstract namespace (unix(7)), one a run, job and network namespace."""
    run = hashlib.sha256(os.fsencode(environ["FTSLURM_RUN_DIR"])).hexdigest()[:16]
    return f"\0ftslurm-standby-{os.getuid()}-{environ.get('SLURM_JOB_ID', '')}-{run}".encode()


def is_own(connection: socket.socket) -> bool:
    """Whether the other end is a process of this user; an abstract name anybody can take."""
    size = struct.calcsize("3i")
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return bool(struct.unpack("3i", found)[1] == os.getuid())


def likeness(environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What must be equal in both processes, by kind and name. JSON values."""
    status = Path("/proc/self/status").read_bytes().splitlines()
    fields = dict(line.split(b":", 1) for line in status if b":" in line)
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "environment": {name: value for name, value in environ.items() if not _is_free(name)},
        "interpreter": {
            "path": sys.executable,
            "version": sys.version,
            "flags": [
                sys.flags.optimize,
                sys.flags.dev_mode,
                sys.flags.isolated,
                sys.flags.no_site,
            ],
            "encoding": [sys.getfilesystemencoding(), sys.stderr.encoding, sys.stderr.errors],
            "folder": os.getcwd(),  # noqa: PTH109 - a str, and the first of sys.path
        },
        "process": {
            **{name.decode(): fields.get(name, b"").decode().strip() for name in _STATUS},
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
        },
        "limits": {name: list(resource.getrlimit(getattr(resource, name))) for name in limits},
        "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES},  # noqa: PTH115
    }


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Optional[str]:
    """Of two likenesses, in a few words; None when they are equal."""
    for kind in sorted({*mine, *theirs}):
        ours, others = mine.get(kind, {}), theirs.get(kind, {})
        names = sorted(
            name for name in {*ours, *others} if ours.get(name, ...) != others.get(name, ...)
        )
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            return f"{kind}: {', '.join(names[:_NAMED])}{more}"
    return None


def send(connection: socket.socket, message: Mapping[str, Any], *, streams: bool = False) -> None:
    """One JSON line; `streams`: with this process's standard input, output and error."""
    data = json.dumps(message).encode() + b"\n"
    if streams:
        sent = socket.send_fds(connection, [data[:1]], list(STANDARD_STREAMS))
        data = data[sent:]
    connection.sendall(data)


class Lines:
    """Messages out of what a connection brings, however it is cut."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rest = b""
        self.descriptors: list[int] = []
        """Streams that came along."""

    def read(self) -> list[dict[str, Any]]:
        """What is whole after one more receive; EOFError when the other end has closed."""
        data, found, _, _ = socket.recv_fds(self._connection, _BLOCK_BYTES, len(STANDARD_STREAMS))
        self.descriptors += found
        if not data:
            raise EOFError
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in whole]

    def first(self) -> dict[str, Any]:
        """The next message; whoever sends it sends nothing more before an answer."""
        while True:
            found = self.read()
            if found:
                return found[0]


def _is_free(name: str) -> bool:
    return name in _FREE or name.startswith(_FREE_PREFIXES)
