"""What touches a file system that may hang is done in a child, which is not waited for for ever.

A call that a file server does not answer takes no signal, not even KILL. So the child that makes it
is left to itself once it has been silent for too long; whatever becomes of its parent, it ends at
the next value that nobody takes, having cleared up as its own code says.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Callable, Optional

from ftslurm.errors import RunError

LIMIT_S = 120.0
"""A trial takes milliseconds; on a file server that is busy, seconds."""
LEAVES_S = 5.0
HANGS = (
    "its file server is away or overloaded: the kernel's log and whoever runs it tell more; name"
    " another folder with --runs"
)
_VALUE, _RAISED, _END = "value", "raised", "end"


class SilentError(RunError):
    """The child has not said anything for so long."""


def in_time(
    make: Callable[[], Iterator[Any]],
    *,
    limit_s: float = LIMIT_S,
    warn_s: float = 10.0,
    say: Callable[[str], None] = lambda text: None,
) -> Generator[Any, None, None]:
    """What `make` yields in a child, as it comes; its exception where it ends with one, RunError
    where it is killed. SilentError after `limit_s` without a value, which is said to come (`say`)
    after `warn_s`."""
    reader, writer = Pipe(duplex=False)
    if sys.stdout is not None:
        sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _give(make, reader, writer)
    writer.close()
    try:
        while True:
            if not reader.poll(warn_s):
                say(f"the file system has not answered for {warn_s:.0f} s")
                if not reader.poll(limit_s - warn_s):
                    raise SilentError(f"no answer within {limit_s:.0f} s")
            try:
                kind, value = reader.recv()
            except (EOFError, OSError):  # in between, or in the midst of a value
                raise RunError("the process that tried the file system was killed") from None
            if kind == _END:
                return
            if kind == _RAISED:
                raise value
            yield value
    finally:
        reader.close()
        _part_with(pid)


_ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def _give(make: Callable[[], Iterator[Any]], reader: Connection, writer: Connection) -> None:
    """In the child; never comes back."""
    try:
        for number in _ENDINGS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup(1) has it
                signal.signal(number, _leave)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # trials wait for children of their own
        reader.close()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in {0, 1, 2} - {writer.fileno()}:  # which it has where ours were closed
            os.dup2(null, fd)  # whoever reads ours, waits for their end
        last: tuple[str, Any] = (_END, None)
        try:
            with contextlib.closing(make()) as values:  # type: ignore[type-var]
                for value in values:
                    _hand_on(writer, value)
        except Exception as error:  # noqa: BLE001 - raised again in the parent
            last = (_RAISED, error)
        _ignore_endings()
        writer.send(last)
    finally:
        os._exit(0)


def _hand_on(writer: Connection, value: Any) -> None:
    try:
        writer.send((_VALUE, value))
    except OSError:
        _ignore_endings()
        raise


def _leave(number: int, frame: Optional[FrameType]) -> None:
    """Once: a second signal would be raised into what is cleared up on the way out."""
    _ignore_endings()
    raise SystemExit(128 + number)


def _ignore_endings() -> None:
    for number in _ENDINGS:
        signal.signal(number, signal.SIG_IGN)


def _part_with(pid: int) -> None:
    """It ends with what it is about; one that hangs is nobody's to wait for."""
    deadline = time.monotonic() + LEAVES_S
    # Nobody's child is left once it has ended, where we were started with SIGCHLD ignored.
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
