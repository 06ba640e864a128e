"""`python -m ftslurm.agent.keep [--after S] COMMAND...`: runs the agents' srun, and again where it
ends early.

Beside the ranks, for as long as the batch script lives that started it: without agents nobody
would see a hang. TERM ends both, USR1 (a new attempt begins) ends a pause, that of `--after` too.
Loads next to nothing, not even typing and subprocess: it is started once in each job.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

from ftslurm.errors import EXIT_FAILED, EXIT_OK, warn
from ftslurm.parent import die_with_parent

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0)
"""Before it is started again; from the first on where it had lived for LONG_S."""
LONG_S = 180.0
"""Agents whose leader does not come leave after 120 s (main.LEADER_WITHIN_S)."""
LEAVE_S = 2.0
"""With a dead node among its own, srun stays for as long as KillWait."""
_LOOK_S = 5.0
_MOST_FILES = 1024
_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD})
_IGNORED = (signal.SIGUSR1, signal.SIGPIPE, signal.SIGXFSZ)
"""By the batch script, which has begun this, and by Python: exec(2) would hand that on."""


def main(argv: Sequence[str]) -> int:
    # Waited for one by one, in place of handlers. A signal that is blocked is kept.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it leaves nothing to wait for
    parent, tries = os.getppid(), 0
    if argv[0] == "--after":
        if not _pause(float(argv[1]), parent):
            return EXIT_OK
        argv = argv[2:]
    while True:
        began = time.monotonic()
        srun = _start(argv)
        while srun is not None and not _has_ended(srun):
            if _next(_LOOK_S) == signal.SIGTERM or os.getppid() != parent:
                _end(srun)
                return EXIT_OK
        tries = 0 if time.monotonic() - began > LONG_S else tries
        pause_s = PAUSES_S[min(tries, len(PAUSES_S) - 1)]
        if not _pause(pause_s, parent):
            return EXIT_OK
        tries += 1


def _start(argv: Sequence[str]) -> int | None:
    """Its pid. None: it cannot be started now, with a full process table perhaps."""
    tie_to_keeper = die_with_parent(signal.SIGTERM)
    try:
        pid = os.fork()
    except OSError as error:
        warn(f"the agents are not started: {error}; tried again")
        return None
    if pid:
        return pid
    try:
        tie_to_keeper()
        for number in _IGNORED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.closerange(3, _MOST_FILES)  # whatever the batch shell had open
        os.execvp(argv[0], list(argv))
    except OSError as error:
        warn(f"the agents are not started: {error}; tried again")
    finally:
        os._exit(EXIT_FAILED)


def _has_ended(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG) != (0, 0)


def _next(within_s: float) -> int | None:
    """The next signal, None when none comes."""
    found = signal.sigtimedwait(_SIGNALS, max(0.0, within_s))
    return None if found is None else found.si_signo


def _pause(seconds: float, parent: int) -> bool:
    """False: leave."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        number = _next(min(_LOOK_S, deadline - time.monotonic()))
        if number == signal.SIGTERM or os.getppid() != parent:
            return False
        if number == signal.SIGUSR1:
            return True
    return True


def _end(srun: int) -> None:
    os.kill(srun, signal.SIGTERM)
    deadline = time.monotonic() + LEAVE_S
    while not _has_ended(srun) and time.monotonic() < deadline:
        _next(deadline - time.monotonic())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
