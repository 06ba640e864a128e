"""Rename that never replaces anything, not even an empty folder: durable on return, else undone as
far as the file system lets it."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from ftslurm import faults
from ftslurm.files import fsync_folder, is_listed, patiently

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def rename_new(source: Path, target: Path) -> None:
    """FileExistsError when `target` exists in any form.

    rename(2) replaces an empty folder without a word; renameat2(2) with RENAME_NOREPLACE does not.
    NFS and some other file systems have no flags (EINVAL): there a look beforehand has to do, which
    leaves a window of microseconds in which somebody could create an empty folder.
    """
    moved = patiently(source.lstat, source)
    patiently(lambda: _rename(source, target, moved), source)
    try:
        fsync_folder(target.parent)
        if source.parent != target.parent:
            fsync_folder(source.parent)
    except OSError:
        # What is said to have failed must not be found there later; what somebody else has put
        # there meanwhile stays.
        if _is_at(target, moved):
            with contextlib.suppress(OSError):
                target.rename(source)
        raise


def _rename(source: Path, target: Path, moved: os.stat_result) -> None:
    faults.point("rename", name=source.name)
    number = _rename_noreplace(source, target)
    if number in _UNSUPPORTED:
        number = _rename_plainly(source, target)
    # A file server whose answer was lost has done it, and says to the next try that `source` is
    # gone or that `target` exists.
    if number and not _is_at(target, moved):
        raise OSError(number, os.strerror(number), str(source), None, str(target))


def _rename_plainly(source: Path, target: Path) -> int:
    """0 or an errno."""
    if os.path.lexists(target) or is_listed(target):
        return errno.EEXIST
    try:
        source.rename(target)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _is_at(path: Path, moved: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.lstat(), moved)
    except OSError:
        return False


def _rename_noreplace(source: Path, target: Path) -> int:
    """0 or an errno; ENOSYS where the C library has no renameat2 (glibc before 2.28)."""
    import ctypes  # here, because it would be a third of the start-up time of `ftslurm verify`

    library = ctypes.CDLL(None, use_errno=True)
    try:
        call = library.renameat2
    except AttributeError:
        return errno.ENOSYS
    call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    done: int = call(
        _AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE
    )
    return 0 if done == 0 else ctypes.get_errno()
