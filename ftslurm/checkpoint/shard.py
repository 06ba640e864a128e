"""One rank's part of a step: written and read with every byte digested in the same pass.

Bytes come from and go to memoryviews; nothing is unpickled, cast or copied on the way. What
`write_shard` returned is durable; what `read_tensor` filled has been verified.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from ftslurm import faults
from ftslurm.checkpoint.digest import digest, new
from ftslurm.checkpoint.packing import MAX_FILE_BYTES, FilePlan, plan_files
from ftslurm.checkpoint.reading import DamagedFile, StepFile, read_small, reading
from ftslurm.checkpoint.record_json import decode_index, encode_index
from ftslurm.checkpoint.records import (
    LARGE_ALIGNMENT_BYTES,
    Chunk,
    IndexEntry,
    ShardFile,
    ShardIndex,
    TensorRecord,
    index_name,
    piece_bytes,
    piece_problem,
    shard_name,
)
from ftslurm.errors import CheckpointError, FormatError
from ftslurm.files import Patience, patiently, write_atomic

if TYPE_CHECKING:
    # At run time only a writer pays for it: it loads logging and queue, and cold verbs read only.
    from concurrent.futures import Future, ThreadPoolExecutor

CHUNK_BYTES = 32 * 1024 * 1024
_READ_BYTES = 8 * 1024 * 1024
_OPEN_FILES = 16
"""Most that a reader holds open: a step has one a rank at least, a process may open 1024 or so."""
_GATHER_BYTES = 256 * 1024
"""Smaller neighbours are joined before writing; keeps a chunk's writev far below IOV_MAX (1024)."""


@dataclass(frozen=True)
class TensorData:
    """A piece of a tensor in memory; `data` is its contiguous bytes, C order, little endian."""

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    data: memoryview


def write_shard(
    folder: Path,
    rank: int,
    tensors: Sequence[TensorData],
    *,
    objects: Mapping[str, Any],
    aliases: Mapping[str, str],
    algorithm: str,
    attempt: int = 0,
    step: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> IndexEntry:
    """Write a rank's files and index into `folder`; all of it durable on return.

    CheckpointError, by name, for a tensor or leaf that cannot be saved (before anything is written)
    and for an error of the device.

    Every byte is digested twice: by tensor for a restore, which reads single tensors and verifies
    them in that pass, and by chunk for `verify`, which also finds damage in gaps and says where.
    """
    views = [_checked_bytes(tensor) for tensor in tensors]
    # Encoded early so that a leaf without JSON form is refused before gigabytes are written.
    encode_index(ShardIndex(rank, [], [], dict(aliases), dict(objects)))
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="digest")
    try:
        whole = _Digests(views, algorithm, pool)
        files: list[ShardFile] = []
        records: list[TensorRecord] = []
        for plan in plan_files([len(view) for view in views], max_file_bytes=max_file_bytes):
            name = shard_name(rank, len(files))
            faults.point("persist", rank=rank, step=step, attempt=attempt)
            chunks = _write_file(folder / name, plan, views, algorithm, chunk_bytes, pool)
            files.append(ShardFile(name, plan.bytes, chunks))
            for i, offset in plan.places:
                records.append(_record(tensors[i], name, offset, len(views[i]), whole.get(i)))
        index = ShardIndex(rank, files, records, dict(aliases), dict(objects))
        return _write_index(folder, index, algorithm)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the shard of rank {rank} to `{folder}`: {error.strerror}"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def read_index(
    folder: Path, entry: IndexEntry, algorithm: str, *, patience: Optional[Patience] = None
) -> ShardIndex:
    """One rank's index, its bytes verified against the manifest's entry."""
    path = folder / entry.path
    data = read_small(path, patience=patience)
    if len(data) != entry.bytes or digest(algorithm, data) != entry.digest:
        raise DamagedFile(
            entry.path,
            f"`{path}` is not the index that the manifest names: {len(data)} bytes, expected "
            f"{entry.bytes}, or another digest",
        )
    index = decode_index(data, algorithm=algorithm, where=f"`{path}`")
    if index.rank != entry.rank:
        raise FormatError(f"`{path}` is of rank {index.rank}, expected {entry.rank}")
    return index


def read_tensor(folder: Path, record: TensorRecord, algorithm: str, into: memoryview) -> None:
    """Fill `into` (record.bytes long) and verify it; for many tensors use one ShardReader."""
    with ShardReader(folder, algorithm) as reader:
        reader.read(record, into)


class ShardReader:
    """Reads tensors of one step, file by file if they come in that order. A context manager."""

    def __init__(self, folder: Path, algorithm: str) -> None:
        self._folder = folder
        self._algorithm = algorithm
        self._files: dict[str, StepFile] = {}

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def read(self, record: TensorRecord, into: memoryview) -> None:
        """Fill `into`, digesting in the same pass; CheckpointError if it is not what was saved."""
        target = _flat(into)
        if len(target) != record.bytes:
            raise CheckpointError(
                f"the buffer for `{record.key}` has {len(target)} bytes, expected {record.bytes}"
            )
        path = self._folder / record.file
        hasher = new(self._algorithm)
        with reading(f"`{record.key}` from `{path}`"):
            for start in range(0, record.bytes, _READ_BYTES):
                piece = target[start : start + _READ_BYTES]
                if self._file(record.file).read_at(piece, record.offset + start) < len(piece):
                    raise DamagedFile(
                        record.file, f"`{path}` ends inside `{record.key}`; it is truncated"
                    )
                hasher.update(piece)
        if hasher.hexdigest() != record.digest:
            raise DamagedFile(
                record.file,
                f"`{record.key}` in `{path}` (offset {record.offset}, {record.bytes} bytes) does "
                "not have the digest it was saved with; the file is damaged",
            )

    def _file(self, name: str) -> StepFile:
        if name not in self._files:
            if len(self._files) == _OPEN_FILES:
                self._files.pop(next(iter(self._files))).close()
            self._files[name] = StepFile(self._folder / name)
        return self._files[name]


def _checked_bytes(tensor: TensorData) -> memoryview:
    problem = piece_problem(tensor.dtype, tensor.global_shape, tensor.offsets, tensor.shape)
    view = _flat(tensor.data)
    if problem is None and piece_bytes(tensor.dtype, tensor.shape) != len(view):
        problem = f"{len(view)} bytes do not fit {tensor.dtype} of shape {tuple(tensor.shape)}"
    if problem is not None:
        raise CheckpointError(f"`{tensor.key}` cannot be saved: {problem}")
    return view


def _flat(view: memoryview) -> memoryview:
    # memoryview.cast refuses views that have a 0 in their shape.
    return view.cast("B") if view.nbytes else memoryview(bytearray())


class _Digests:
    """Digests of whole tensors; the large ones are worked out in `pool` while files are written."""

    def __init__(
        self, views: Sequence[memoryview], algorithm: str, pool: ThreadPoolExecutor
    ) -> None:
        self._views = views
        self._algorithm = algorithm
        self._pending = {
            i: pool.submit(digest, algorithm, view)
            for i, view in enumerate(views)
            if len(view) >= _GATHER_BYTES
        }

    def get(self, position: int) -> str:
        if position in self._pending:
            return self._pending[position].result()
        return digest(self._algorithm, self._views[position])


def _record(
    tensor: TensorData, file: str, offset: int, size_bytes: int, content_digest: str
) -> TensorRecord:
    return TensorRecord(
        key=tensor.key,
        dtype=tensor.dtype,
        global_shape=tuple(tensor.global_shape),
        offsets=tuple(tensor.offsets),
        shape=tuple(tensor.shape),
        file=file,
        offset=offset,
        bytes=size_bytes,
        digest=content_digest,
    )


def _write_index(folder: Path, index: ShardIndex, algorithm: str) -> IndexEntry:
    data = encode_index(index)
    name = index_name(index.rank)
    write_atomic(folder / name, data)
    return IndexEntry(index.rank, name, len(data), digest(algorithm, data))


def _write_file(
    path: Path,
    plan: FilePlan,
    views: Sequence[memoryview],
    algorithm: str,
    chunk_bytes: int,
    pool: ThreadPoolExecutor,
) -> list[Chunk]:
    """Digest chunks in `pool` while they are written; fsyncs. Never writes over a file."""
    pending: list[tuple[int, Future[str]]] = []
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    # The folder is there: rank 0 has made it, and has said so to the others.
    fd = patiently(lambda: os.open(path, flags, 0o644), path.parent, announced=True)
    try:
        with _Flusher(fd) as flusher:
            for parts in _cut(_laid_out(plan, views), chunk_bytes):
                pending.append((sum(map(len, parts)), pool.submit(digest, algorithm, *parts)))
                _write_all(fd, parts)
                flusher.poke()
        os.fsync(fd)
    finally:
        os.close(fd)
    chunks, end = [], 0
    for size_bytes, future in pending:
        chunks.append(Chunk(end, size_bytes, future.result()))
        end += size_bytes
    return chunks


class _Flusher:
    """Keeps the device busy while the page cache fills: one fdatasync after another in a thread.

    Measured: 1 GiB in 2.1 s, as with O_DIRECT (2.1 s, but only from aligned memory), against 2.7 s
    with one fsync at the end; and dirty pages do not pile up to stall the training loop.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        from concurrent.futures import ThreadPoolExecutor

        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="flush")
        self._flush: Optional[Future[None]] = None

    def __enter__(self) -> _Flusher:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._thread.shutdown(wait=True)
        if kind is None:
            self._collect()

    def poke(self) -> None:
        """Something was written. Starts a flush unless one is running."""
        if self._flush is None or self._flush.done():
            self._collect()
            self._flush = self._thread.submit(os.fdatasync, self._fd)

    def _collect(self) -> None:
        # Linux reports a failed write-back once per open file: a later fsync would say all is well.
        if self._flush is not None:
            self._flush.result()


def _laid_out(plan: FilePlan, views: Sequence[memoryview]) -> Iterator[memoryview]:
    """The bytes of a file in order, gaps as zeros."""
    zeros = memoryview(bytes(LARGE_ALIGNMENT_BYTES))
    end = 0
    for position, offset in plan.places:
        yield zeros[: offset - end]
        yield views[position]
        end = offset + len(views[position])
    yield zeros[: plan.bytes - end]


def _cut(views: Iterable[memoryview], chunk_bytes: int) -> Iterator[list[memoryview]]:
    """The same bytes as lists of `chunk_bytes` each, the last one shorter."""
    parts: list[memoryview] = []
    room = chunk_bytes
    for view in views:
        rest = view
        while rest:
            parts.append(rest[:room])
            rest = rest[room:]
            room -= len(parts[-1])
            if room == 0:
                yield _gather(parts)
                parts, room = [], chunk_bytes
    if parts:
        yield _gather(parts)


def _gather(parts: list[memoryview]) -> list[memoryview]:
    """Join runs of small neighbours; large parts stay where they are in memory."""
    gathered: list[memoryview] = []
    joined = bytearray()
    for part in parts:
        if len(part) < _GATHER_BYTES:
            joined += part
            continue
        if joined:
            gathered.append(memoryview(joined))
            joined = bytearray()
        gathered.append(part)
    return [*gathered, memoryview(joined)] if joined else gathered


def _write_all(fd: int, parts: list[memoryview]) -> None:
    left = list(parts)
    while left:
        count = os.writev(fd, left)
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
