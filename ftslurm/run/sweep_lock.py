"""One at a time queues tasks of a sweep or gives their arrays more room, and nobody once it is
cancelled: who submits it, who follows it, who resumes it, a task that ends.

Without the lock, two of them could find the same task queued by nobody and queue it twice. A file
system without locks gives none, and no protection; that is said.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import shlex
import time
from collections.abc import Callable, Iterator
from typing import Optional

from ftslurm.errors import RunError, warn
from ftslurm.files import is_listed
from ftslurm.run.sweep_layout import SweepLayout

POLL_S = 0.2
PASSING_S = 10.0
"""A task that ends has the lock for as long as Slurm takes to answer it."""


def is_closed(layout: SweepLayout) -> bool:
    """Whether somebody has cancelled the sweep, from whichever machine. OSError when that cannot be
    told."""
    return is_listed(layout.closed)


def require_open(layout: SweepLayout) -> None:
    """RunError for a sweep that was cancelled."""
    if is_closed(layout):
        raise RunError(
            f"`{layout.root}` was cancelled, and nothing of it is queued any more; `ftslurm resume "
            f"{shlex.quote(str(layout.root))}` lets it go on"
        )


@contextlib.contextmanager
def queueing(
    layout: SweepLayout,
    *,
    wait_s: Optional[float] = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """RunError when another holds it for longer than `wait_s` (None: PASSING_S). Not to be entered
    twice in one process: closing one's second descriptor of the file gives a POSIX lock up
    (fcntl(2))."""
    until = clock() + (PASSING_S if wait_s is None else wait_s)
    with layout.lock.open("w") as stream:
        while not _is_taken(stream.fileno()):
            if clock() >= until:
                raise RunError(
                    f"another process queues tasks of `{layout.root}` just now (a submit that is "
                    "still at work, or a resume); wait for its word and try again"
                )
            sleep(POLL_S)
        yield


@contextlib.contextmanager
def waiting_in_line(layout: SweepLayout) -> Iterator[bool]:
    """Of many that would wait for the lock to do the same the one that does. False for the others:
    whoever is in line looks later than now. Where there are no locks all are."""
    with layout.line.open("w") as stream:
        error = _refusal(stream.fileno())
        yield error is None or not _is_of_another(error)


def _is_taken(fd: int) -> bool:
    """Whether the lock is ours now, or cannot be had here at all."""
    error = _refusal(fd)
    if error is None:
        return True
    if _is_of_another(error):
        return False
    warn(f"this file system has no locks ({error}); see that nobody else queues this sweep's tasks")
    return True


def _is_of_another(error: OSError) -> bool:
    """Who has the lock; else there are no locks here."""
    return error.errno in (errno.EACCES, errno.EAGAIN)


def _refusal(fd: int) -> Optional[OSError]:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error
    return None
