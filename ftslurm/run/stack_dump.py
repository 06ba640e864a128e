"""A rank writes the Python stacks of all its threads into a file of its own when it is told to.

By a handler in C that asks for no lock and allocates nothing (faulthandler), so it answers in the
midst of a native call that holds the interpreter lock. Nothing else of the rank changes.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

from ftslurm.errors import warn
from ftslurm.run.heartbeat import stacks_file
from ftslurm.run.pulse import Pulse

DUMP_SIGNAL = signal.SIGRTMIN + 3
"""glibc keeps 32 and 33 for its threads and gives 34 as SIGRTMIN; torch and its libraries use
SIGUSR2 and none above."""


def write_stacks_on_signal(pulse: Pulse) -> None:
    """From now on DUMP_SIGNAL makes this process append its stacks; before, it would end it."""
    if pulse.path is None:
        return
    try:
        dump_on_signal(stacks_file(pulse.path.parent, pulse.rank))
    except OSError as error:
        warn(f"rank {pulse.rank} cannot write its stacks ({error})")
        return
    pulse.dumps_on(DUMP_SIGNAL)


def dump_on_signal(path: Path) -> None:
    """OSError: DUMP_SIGNAL ends this process as before."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    path.unlink(missing_ok=True)
    fd = os.open(path, flags, 0o600)
    # The descriptor stays open for the life of the process: the handler must not open anything.
    # It asks for SA_RESTART by itself, so that no library sees a system call interrupted.
    faulthandler.register(DUMP_SIGNAL, file=fd, all_threads=True, chain=False)
