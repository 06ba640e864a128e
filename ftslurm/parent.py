"""A process that ends with the one that started it (Linux).

Loads next to nothing: what keeps the agents going is started once in each job.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # prctl(2)
_libc = ctypes.CDLL(None, use_errno=True)


def tie_to_parent() -> None:
    """From here on this process is killed when its parent ends."""
    parent = os.getppid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def die_with_parent(number: int = signal.SIGKILL) -> Callable[[], None]:
    """A preexec_fn: the child gets signal `number` when the thread that started it ends."""
    parent = os.getpid()

    def set_death_signal() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)

    return set_death_signal
