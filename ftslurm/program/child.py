"""The program's processes: started as a group of their own, signalled and ended as one.

They never outlive the rank: the program is killed when the rank dies, what it left behind is ended
when it ends. The rank itself only waits, without polling.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ftslurm.parent import die_with_parent
from ftslurm.run.rank import STOP_SIGNALS

LEFT_BEHIND_S = 2.0
"""From TERM to KILL for what a program leaves running. With proctrack/cgroup Slurm kills it at
once; with linuxproc it would hold the job to the end of grace."""

_TICK_S = 0.05


class Inbox:
    """Wakes when a signal has come or a child has ended."""

    def __init__(self, reader: int) -> None:
        self._reader = reader
        self._selector = selectors.DefaultSelector()
        self._selector.register(reader, selectors.EVENT_READ)

    def wait(self, patience_s: float) -> None:
        if self._selector.select(max(0.0, patience_s)):
            os.read(self._reader, 512)

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Iterator[Inbox]:
        reader, writer = os.pipe()
        for descriptor in (reader, writer):
            os.set_blocking(descriptor, False)
        before = signal.set_wakeup_fd(writer)
        # Without a handler a signal leaves no byte. Those of the stop signals are in place.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        try:
            yield cls(reader)
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.set_wakeup_fd(before)
            os.close(reader)
            os.close(writer)


def start(
    program: Sequence[str], *, folder: Path, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the program with the rank's own output. OSError: it cannot be run."""
    tie_to_rank = die_with_parent()

    def prepare() -> None:
        tie_to_rank()
        os.setpgid(0, 0)
        for number in STOP_SIGNALS:
            # With proctrack/linuxproc Slurm's warn signal reaches every process of the step, and by
            # default it kills. TERM, which programs do handle, is sent when it is due.
            default = signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN
            signal.signal(number, default)

    return subprocess.Popen(
        list(program),
        stdin=subprocess.DEVNULL,
        cwd=folder,
        env=dict(environ),
        preexec_fn=prepare,
    )


def send(child: subprocess.Popen[bytes], number: int) -> bool:
    """Signal the program and what it has started: a shell would not pass TERM on. False when
    nobody is left."""
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return False
    return True


def end_rest(child: subprocess.Popen[bytes]) -> None:
    """End what an ended program has left running."""
    deadline = time.monotonic() + LEFT_BEHIND_S
    if not send(child, signal.SIGTERM):
        return
    while send(child, 0):
        if time.monotonic() >= deadline:
            send(child, signal.SIGKILL)
            return
        time.sleep(_TICK_S)
