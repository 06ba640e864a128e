"""Digests by name. The only place that knows which algorithms a checkpoint may use.

`xxh3_128` finds every accident at memory speed; `sha256` is for runs that must be auditable.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol, Union

from ftslurm.errors import FormatError, UsageError

ALGORITHMS = {"xxh3_128": 32, "sha256": 64}
"""Name -> length of the digest in hex digits."""

Buffer = Union[bytes, bytearray, memoryview]


class Hasher(Protocol):
    """What `hashlib` objects offer; update() releases the GIL in both implementations."""

    def update(self, data: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


def new(algorithm: str) -> Hasher:
    """A fresh hasher."""
    if algorithm == "sha256":
        import hashlib  # here, as OpenSSL is a tenth of the start-up time of `ftslurm status`

        return hashlib.sha256()
    if algorithm == "xxh3_128":
        try:
            import xxhash
        except ImportError:
            raise UsageError(
                f"the digests are xxh3_128, and the Python that runs this, `{sys.executable}`, has "
                "no xxhash; use the one that ftslurm was installed with, or install xxhash there"
            ) from None
        hasher: Hasher = xxhash.xxh3_128()
        return hasher
    raise FormatError(f"digest algorithm is `{algorithm}`; choose {' or '.join(ALGORITHMS)}")


def digest(algorithm: str, *views: Buffer) -> str:
    """Digest, in hex, of the views as if they were joined."""
    hasher = new(algorithm)
    for view in views:
        hasher.update(view)
    return hasher.hexdigest()
