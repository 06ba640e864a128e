"""Durable file primitives. Everything that must survive a power cut is written through here.

On return of a `write_*` call the bytes and the name are on the device; on an error the old file,
if there was one, is untouched. Nothing here knows what the files mean.

The file system is shared by many nodes, and one node's view of it may be late: a name that was
once looked up in vain stays away for as long as the client remembers that (NFS acdirmax, 60 s by
nfs(5); FUSE negative_timeout), while a fresh listing of its folder has it. So what is listed and
cannot be opened is waited for, as is what ESTALE was said of; see `patiently` and `Patience`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, TypeVar

from ftslurm import faults
from ftslurm.errors import FormatError, warn

_Value = TypeVar("_Value")

VIEW_LAG_S = 75.0
"""How long what another node has made may stay out of sight here before it counts as missing."""
STUMBLE_S = 2.0
"""How long a read or write that failed is tried again: a soft NFS mount or a server that fails over
says EIO or ETIMEDOUT once; a broken disk says it for ever."""

_STUMBLES = frozenset({errno.EIO, errno.ETIMEDOUT, errno.EAGAIN, errno.EREMOTEIO})


@dataclass
class Patience:
    """Shared by looks at many files, so that all of them together wait no longer than one would.

    After a wait in vain for what is listed, the time is over in which the others were due too, so a
    file that is gone is said to be gone at once. An error that did not pass is not waited for again
    until `renew`.
    """

    is_past_lag: bool = False
    error_s: float = 0.0
    """The longest wait in vain for an error to pass."""

    def renew(self) -> None:
        """Another matter begins: an error may pass there. What was due stays due."""
        self.error_s = 0.0

    def wait_s(self, error: OSError, path: Path, *, announced: bool) -> float:
        """How long from its beginning a look that ends in `error` is worth repeating."""
        if error.errno == errno.ENOENT:
            # A link into nowhere is listed too, and will not lead anywhere later.
            is_late = not self.is_past_lag and (
                announced or (is_listed(path, patience=self) and not path.is_symlink())
            )
            return VIEW_LAG_S if is_late else 0.0
        wait_s = VIEW_LAG_S if error.errno == errno.ESTALE else 0.0
        wait_s = STUMBLE_S if error.errno in _STUMBLES else wait_s
        return wait_s if wait_s > self.error_s else 0.0

    def lose(self, error: OSError, waited_s: float) -> None:
        """A wait of `waited_s` for `error` to pass was in vain."""
        if error.errno == errno.ENOENT:
            self.is_past_lag = self.is_past_lag or waited_s > 0
        else:
            self.error_s = max(self.error_s, waited_s)


def patiently(
    work: Callable[[], _Value],
    path: Path,
    *,
    announced: bool = False,
    patience: Optional[Patience] = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> _Value:
    """What `work` returns, which needs `path` and may be done again, once this node sees `path`.

    Tried again for VIEW_LAG_S: ESTALE, and ENOENT for what its folder lists or, with `announced`,
    what another process has said to be there. For STUMBLE_S: errors that often pass. All else is
    raised at once, so that a file that was never there costs one listing. `patience` is what looks
    before this one have left. Of a pause no more counts than was meant: a process that was stopped
    in it has not looked any more often.
    """
    patience = patience or Patience()
    waited_s, pause_s = 0.0, 0.05
    while True:
        began_at = clock()
        try:
            return work()
        except OSError as error:
            wait_s = patience.wait_s(error, path, announced=announced)
            waited_s += clock() - began_at
            if waited_s + pause_s > wait_s:
                patience.lose(error, wait_s)
                raise
        sleep(pause_s)
        waited_s += pause_s
        pause_s = min(2 * pause_s, 1.0)


def is_listed(path: Path, *, patience: Optional[Patience] = None) -> bool:
    """Whether its folder names it: a listing is read afresh, where stat and open may be answered
    from what this node found, or did not find, some time ago. OSError when that cannot be told."""
    if path.parent == path:
        return True
    try:
        return path.name in list_folder(path.parent, patience=patience)
    except (FileNotFoundError, NotADirectoryError):
        return False


def list_folder(path: Path, *, patience: Optional[Patience] = None) -> list[str]:
    """Names in `path`; FileNotFoundError when there is no such folder."""

    def names() -> list[str]:
        faults.point("list_folder", name=path.name)
        return os.listdir(path)  # noqa: PTH208

    return patiently(names, path, patience=patience)


def fsync_folder(folder: Path) -> None:
    """Make names created, renamed or removed in `folder` durable (fsync(2), NOTES)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace `path` by `data` in one step; readers see the old bytes or the new, never a mix.

    `durable=False` leaves out both fsyncs and every second try: for progress files, whose loss
    costs nothing and whose writer has better things to do than to wait.
    """
    if durable:
        patiently(lambda: _write_atomic(path, data, durable=True), path.parent)
    else:
        _write_atomic(path, data, durable=False)


def _write_atomic(path: Path, data: bytes, *, durable: bool) -> None:
    faults.point("write_file", name=path.name)
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}.tmp")
    try:
        _create(temporary, data, durable=durable)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        fsync_folder(path.parent)


def write_new(path: Path, data: bytes) -> None:
    """Write a file of a folder that nobody looks into yet, which becomes durable and appears as a
    whole later. FileExistsError where there is one of that name."""
    faults.point("write_file", name=path.name)
    _create(path, data, durable=False)


def _create(path: Path, data: bytes, *, durable: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o644)
        left = memoryview(data)
        while left:
            # A disk that fills up takes a part, then says so.
            left = left[os.write(fd, left) :]
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)


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
    except (ValueError, RecursionError) as error:
        raise FormatError(f"`{where}` is not JSON ({error}); it is torn or not ours") from None
    if not isinstance(record, dict) or not isinstance(record.get("schema_version"), int):
        raise FormatError(f"`{where}` has no integer schema_version; it is not a file of ftslurm")
    if record["schema_version"] > newest:
        raise FormatError(
            f"`{where}` has schema_version {record['schema_version']}, this ftslurm reads up to "
            f"{newest}; use the version that wrote it or a newer one"
        )
    return record


def read_json(
    path: Path, *, newest: int = 1, patience: Optional[Patience] = None
) -> dict[str, Any]:
    """Read and check one JSON record; FileNotFoundError when there is none."""
    return decode_json(read_bytes(path, patience=patience), where=str(path), newest=newest)


def read_bytes(path: Path, *, patience: Optional[Patience] = None) -> bytes:
    """The whole of a file outside the checkpoints; FileNotFoundError when there is none."""

    def read() -> bytes:
        faults.point("read_file", name=path.name)
        with path.open("rb", buffering=0) as stream:
            data = stream.readall()
            # What another node appends to may seem to end where this one last saw it end; a client
            # that has met the end asks for the size again (seen with FUSE).
            while os.fstat(stream.fileno()).st_size > len(data):
                more = stream.readall()
                if not more:
                    break
                data += more
        return data

    return patiently(read, path, patience=patience)


def append_record(path: Path, record: dict[str, Any], *, durable: bool = False) -> None:
    """Append one line in a single write, with a CRC so that a torn last line is told from a whole.

    O_APPEND makes lines of several writers on one host whole (open(2)); it does not over NFS, so a
    file has one writer. Not tried again: a part of the line may have been written. `durable`: line
    and file name are on the device on return.
    """
    append_records(path, [record], durable=durable)


def append_records(path: Path, records: Iterable[dict[str, Any]], *, durable: bool = False) -> None:
    """As `append_record`, with many lines in a single write."""
    lines = b"".join(_line(record) for record in records)
    faults.point("append", name=path.name)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            lines = b"\n" + lines  # the writer before was cut off: its torn line stays alone
        while lines:
            # A disk that fills up takes a part, then says so.
            lines = lines[os.write(fd, lines) :]
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    if durable:
        fsync_folder(path.parent)


def _line(record: dict[str, Any]) -> bytes:
    body = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{zlib.crc32(body.encode()):08x} {body}\n".encode()


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole records of an append file; torn or damaged lines are left out."""
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        return
    for line in data.split(b"\n"):
        crc, _, body = line.partition(b" ")
        if not body or crc != b"%08x" % zlib.crc32(body):
            continue
        yield json.loads(body)


def claim_folder(path: Path) -> bool:
    """Create `path`; True for exactly one caller (mkdir(2) is atomic on POSIX and NFS).

    False also to the one who has made it when the answer of the file server was lost.
    """

    def make() -> None:
        faults.point("make_folder", name=path.name)
        path.mkdir()

    try:
        patiently(make, path.parent)
    except FileExistsError:
        return False
    fsync_folder(path.parent)
    return True


@contextlib.contextmanager
def best_effort(what: str) -> Iterator[None]:
    """A note that cannot be written (disk full, I/O error) costs a warning, not what it is about.
    `what` the reader then lacks, e.g. `not in the journal`."""
    try:
        yield
    except OSError as error:
        warn(f"{what}: {error}")
