"""Whether a run directory is ours alone to write. Asked before anything in it is executed.

A run directory holds code, a script and a pickle, which do as their writer pleases. It is used when
it, RUN/submit and the pickle belong to this user and nobody else may write there; what somebody
else may only read does no harm. Of a task of a sweep, whose code lies beside it, the same holds for
the sweep's folder. ACLs of POSIX show up in the group bits (acl(5)); those of NFSv4 do
not. A folder above that others write into is common and not refused, so whoever may rename the run
directory away could still put another run of this user's in its place, never one of his own.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from ftslurm.errors import RunError
from ftslurm.run.layout import RunLayout

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def require_own(layout: RunLayout) -> None:
    """RunError unless what is there is ours; what is missing is for its reader to miss."""
    shared = [layout.root.parent] if layout.code.is_symlink() else []
    for path in (*shared, layout.root, layout.submit, layout.call):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        _check(path, found, uid=os.geteuid())


def _check(path: Path, found: os.stat_result, *, uid: int) -> None:
    if found.st_uid != uid:
        raise RunError(
            f"`{path}` belongs to user {found.st_uid} and this process is user {uid}'s; nothing of "
            "it is executed: name a run of your own, or become its owner"
        )
    if found.st_mode & _WRITABLE_BY_OTHERS:
        raise RunError(
            f"`{path}` may be written by others than you (mode "
            f"{stat.S_IMODE(found.st_mode):04o}), so nothing of it is executed; look whether it is "
            f"still what you submitted, then `chmod go-w {shlex.quote(str(path))}`"
        )
