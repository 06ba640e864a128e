"""RUN_ID.prom in the folder that node_exporter's textfile collector reads.

Replaced whole, readable for all; other files of the folder are left alone, but for our own user's
that no run has written anew for a week.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from ftslurm.errors import RunError, UsageError
from ftslurm.files import write_atomic

FIRST_LINE = b"# By `ftslurm metrics`, from "
KEPT_S = 7 * 86_400.0
"""Of a run that is over, or that goes on on another node, so long."""


def require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UsageError(
            f"there is no folder `{folder}`; name the one that node_exporter was given with"
            " --collector.textfile.directory"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RunError(
            f"`{folder}` may not be written by this user; have it made with mode 1777, or name one"
            " of your own that node_exporter reads"
        )


def write(folder: Path, run_id: str, source: Path, text: bytes) -> None:
    """`source`: the run directory, for people who find the file."""
    head = FIRST_LINE + str(source).encode(errors="replace").replace(b"\n", b" ") + b"\n"
    write_atomic(folder / f"{Path(run_id).name}.prom", head + text, durable=False)


def clear_old(folder: Path, *, now: Callable[[], float] = time.time) -> None:
    for path in folder.glob("*.prom"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if found.st_uid == os.getuid() and found.st_mtime < now() - KEPT_S and _is_ours(path):
                path.unlink()


def _is_ours(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as stream:
        return stream.read(len(FIRST_LINE)) == FIRST_LINE
