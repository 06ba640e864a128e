"""A line in the node's own log: Slurm keeps nothing of what a prolog or an epilog prints.

Never waits: a log service that hangs loses the line, not the node.
"""

from __future__ import annotations

import contextlib
import os

SOCKET = "/dev/log"
_MOST_BYTES = 2000
_DAEMON_WARNING = 3 * 8 + 4
"""Facility and severity of syslog(3)."""


def log_line(text: str, *, path: str = SOCKET) -> None:
    import socket  # only where there is something to tell

    line = f"<{_DAEMON_WARNING}>ftslurm-health[{os.getpid()}]: {' '.join(text.split())}"
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.setblocking(False)
        log.connect(path)
        log.send(line.encode(errors="replace")[:_MOST_BYTES])
