"""`python -u -m ftslurm.node.standby_rank MODULE ARGUMENTS...`: a rank out of the node's standby.

The process that Slurm starts and signals in the rank's place. It hands its environment and its
standard streams to the standby, which forks the rank (standby.py), passes signals on and ends as
the rank ends. Where no standby answers within ANSWER_S, or one that is not like this process, it
becomes `python -u -m MODULE ARGUMENTS...` and says so in one line. Standard library only.

The stop signals stay blocked until the rank can take them (run/rank.py): none is lost, none kills a
rank that is starting.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
from typing import NoReturn, Optional

from ftslurm.errors import EXIT_FAILED, EXIT_USAGE
from ftslurm.node.standby_link import (
    ANSWER_S,
    FORWARDED,
    Lines,
    address,
    is_own,
    likeness,
    send,
)
from ftslurm.run.rank import STOP_SIGNALS


class NoStandby(Exception):
    """Why the rank is started cold."""


def main(argv: list[str]) -> NoReturn:
    if not argv:
        _say("usage: python -u -m ftslurm.node.standby_rank MODULE ARGUMENTS...")
        raise SystemExit(EXIT_USAGE)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        connection, lines = _order(argv)
    except NoStandby as reason:
        _say(f"this rank starts cold: {reason}")
        os.execv(sys.executable, [sys.executable, "-u", "-m", *argv])
    _end_as(_status(connection, lines))


def _order(argv: list[str]) -> tuple[socket.socket, Lines]:
    """Ask for a rank; from here on it is the standby's to start."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(ANSWER_S)
    try:
        connection.connect(address(os.environ))
        if not is_own(connection):
            raise NoStandby("another user's process has the standby's name")
        order = {
            "module": argv[0],
            "arguments": argv[1:],
            "environ": dict(os.environ),
            "cpus": sorted(os.sched_getaffinity(0)),
            "likeness": likeness(os.environ),
        }
        send(connection, order)
        lines = Lines(connection)
        answer = lines.first()
        if "refused" in answer:
            raise NoStandby(f"it is not like the standby ({answer['refused']})")
        # Only now: streams on their way to a process that has stopped would never be closed.
        send(connection, {"go": True}, streams=True)
    except ConnectionRefusedError:
        raise NoStandby("this node has no standby that is ready") from None
    except (OSError, EOFError) as error:  # a timeout too
        raise NoStandby(f"the standby gave no answer ({error or 'it has ended'})") from None
    connection.settimeout(None)
    return connection, lines


def _status(connection: socket.socket, lines: Lines) -> int:
    """Pass signals on until the rank has ended; its status, as wait(2) has it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for caught in FORWARDED:
        signal.signal(caught, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    group = None
    while True:
        ready, _, _ = select.select([connection.fileno(), reader], [], [])
        try:
            if reader in ready:
                for number in os.read(reader, 512):
                    send(connection, {"signal": number})
            for message in lines.read() if connection.fileno() in ready else []:
                if "status" in message:
                    return int(message["status"])
                group = message["pid"]
        except (OSError, EOFError):
            _give_up(group)


def _give_up(group: Optional[int]) -> NoReturn:
    if group is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    _say("the standby has ended, and this rank with it; the next attempt starts cold")
    os._exit(EXIT_FAILED)


def _end_as(status: int) -> NoReturn:
    """End with the rank's code, or by the signal that ended it."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left its own
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def _say(text: str) -> None:
    print(f"ftslurm: {text}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
