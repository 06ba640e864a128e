"""Whether only root can change what lies at a path. Asked before root runs or believes anything.

Looks and never changes. A folder with the sticky bit may be written by all: what is root's in it
can be moved or removed by root alone (unlink(2), EPERM). ACLs of POSIX show up in the group bits
(acl(5)); those of NFSv4 do not.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ftslurm.errors import FormatError

ROOT = 0
_MOST_LINKS = 40
"""As many as the kernel follows (path_resolution(7))."""


def others_may_write(mode: int, *, sticky_is_safe: bool = False) -> bool:
    """Whether anyone but its owner may, by a mode as stat(2) gives it."""
    may = bool(mode & (stat.S_IWGRP | stat.S_IWOTH))
    return may and not (sticky_is_safe and mode & stat.S_ISVTX)


def check_root_only(path: Path) -> None:
    """FormatError unless `path` and the way to it are root's, and nobody else may write there.
    OSError where something of it is missing."""
    check_way_to(path)
    _check_mode(path, sticky_is_safe=False)


def check_way_to(path: Path, *, links: int = _MOST_LINKS) -> None:
    """The same of all folders and links by which `path` is reached, itself among them if it is a
    link; it need not be there."""
    for place in (*reversed(path.parents), path):
        try:
            found = place.lstat()
        except FileNotFoundError:
            if place == path:
                return
            raise
        if found.st_uid != ROOT:
            raise FormatError(
                f"`{place}` belongs to user {found.st_uid}, so root does not trust it"
            )
        if stat.S_ISLNK(found.st_mode):
            if not links:
                raise FormatError(f"`{place}` is a link that leads through too many others")
            target = os.path.normpath(place.parent / os.readlink(place))  # noqa: PTH115
            check_way_to(Path(target), links=links - 1)
        if place != path:
            _check_mode(place, sticky_is_safe=True)


def _check_mode(place: Path, *, sticky_is_safe: bool) -> None:
    mode = stat.S_IMODE(place.stat().st_mode)
    if others_may_write(mode, sticky_is_safe=sticky_is_safe):
        raise FormatError(
            f"`{place}` may be written by others than root (mode {mode:04o}), so root does not "
            "trust it"
        )
