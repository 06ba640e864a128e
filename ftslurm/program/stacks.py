"""A process of a program writes its Python stacks when its node's agent asks for them.

From its first should_stop() on, by the signal and the handler that ranks have (run/stack_dump.py),
into a file beside the rank's heartbeat. One that handles that signal itself is left as it is. What
it forks has the handler too, and is not asked. Never raises.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from ftslurm.program.environment import CALLS_FILE
from ftslurm.run.heartbeat import program_stacks_file


def answer_agents() -> None:
    """Once a process; nothing where there is no heartbeat."""
    calls_file = os.environ.get(CALLS_FILE)
    if calls_file is None:
        return
    # Late: a program outside of a run needs none of it.
    from ftslurm.run.stack_dump import DUMP_SIGNAL, dump_on_signal

    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if signal.getsignal(DUMP_SIGNAL) is signal.SIG_DFL:
            path = Path(calls_file)
            rank = int(path.name.rpartition("-")[2])
            dump_on_signal(program_stacks_file(path.parent, rank, os.getpid()))
