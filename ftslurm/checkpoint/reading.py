"""What cannot be read just now is told from what is damaged: by the cause of the CheckpointError.

An OSError as `__cause__` (EIO, ESTALE, EACCES, a timeout ...) says nothing against the file: the
same read may work later. A missing file, or something else in its place, is damage, and so is all
that is wrong with bytes that could be read; such an error has no cause.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from ftslurm.errors import CheckpointError

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """OSErrors inside become a CheckpointError: "cannot read `what`: ..."."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot read {what}: {error.strerror}") from (
            None if error.errno in _NOT_THERE else error
        )
