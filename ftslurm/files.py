"""Durable file primitives. Everything that must survive a power cut is written through here.

On return of a `write_*` call the bytes and the name are on the device; on an error the old file,
if there was one, is untouched. Nothing here knows what the files mean.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftslurm.errors import FormatError


def fsync_folder(folder: Path) -> None:
    """Make names created, renamed or removed in `folder` durable (fsync(2), NOTES)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace `path` by `data` in one step; readers see the old bytes or the new, never a mix.

    `durable=False` leaves out both fsyncs: for progress files whose loss costs nothing.
    """
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as stream:
            os.fchmod(stream.fileno(), 0o644)
            stream.write(data)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        os.replace(name, path)  # noqa: PTH105 - `name` is a str from mkstemp
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)  # noqa: PTH108
        raise
    if durable:
        fsync_folder(path.parent)


def encode_json(record: dict[str, Any]) -> bytes:
    """The one JSON form of ours: sorted keys, indented, newline at the end, no NaN."""
    return (json.dumps(record, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def write_json(path: Path, record: dict[str, Any], *, durable: bool = True) -> None:
    """Write `record` atomically; it has to carry `schema_version`."""
    assert "schema_version" in record, f"{path.name} without schema_version"
    write_atomic(path, encode_json(record), durable=durable)


def decode_json(data: bytes, *, where: str, newest: int = 1) -> dict[str, Any]:
    """Parse a JSON record of ours. Unknown keys are kept; a newer schema_version is refused."""
    try:
        record = json.loads(data)
    except ValueError as error:
        raise FormatError(f"`{where}` is not JSON ({error}); it is torn or not ours") from None
    if not isinstance(record, dict) or not isinstance(record.get("schema_version"), int):
        raise FormatError(f"`{where}` has no integer schema_version; it is not a file of ftslurm")
    if record["schema_version"] > newest:
        raise FormatError(
            f"`{where}` has schema_version {record['schema_version']}, this ftslurm reads up to "
            f"{newest}; use the version that wrote it or a newer one"
        )
    return record


def read_json(path: Path, *, newest: int = 1) -> dict[str, Any]:
    """Read and check one JSON record; FileNotFoundError when there is none."""
    return decode_json(path.read_bytes(), where=str(path), newest=newest)


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Append one line in a single write, with a CRC so that a torn last line is told from a whole.

    O_APPEND makes lines of several writers on one host whole (open(2)); it does not over NFS, so a
    file has one writer.
    """
    body = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    line = f"{zlib.crc32(body.encode()):08x} {body}\n".encode()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line  # the writer before was cut off: its torn line stays alone
        os.write(fd, line)
    finally:
        os.close(fd)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole records of an append file; torn or damaged lines are left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    for line in data.split(b"\n"):
        crc, _, body = line.partition(b" ")
        if not body or crc != b"%08x" % zlib.crc32(body):
            continue
        yield json.loads(body)


def claim_folder(path: Path) -> bool:
    """Create `path`; True for exactly one caller (mkdir(2) is atomic on POSIX and NFS)."""
    try:
        path.mkdir()
    except FileExistsError:
        return False
    fsync_folder(path.parent)
    return True
