"""A token store: one HDF5 file of token ids, read as sequences; safe to open anywhere, any time.

Whatever is wrong with a file is one DataError when the store is made, so before step 0: missing,
empty, foreign, cut short, of a newer schema, or with other tokens at its ends than were written.
`verify` reads every token. A store holds no file open across a fork and takes no file lock.

Layout, schema_version 1: dataset `tokens` (1-D, chunked, unsigned little-endian, as narrow as the
vocabulary allows) and the attributes of the file that `StoreHeader` lists. Sequence i of length L
is tokens[i * L : i * L + L + 1], inputs and targets one apart.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

import h5py
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ftslurm.errors import DataError, UsageError
from ftslurm.files import patiently

FORMAT = "ftslurm tokens"
SCHEMA_VERSION = 1
TOKENS = "tokens"
HEADER_DIGEST = "header_digest"

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_EDGE_TOKENS = 1 << 16
_VERIFY_TOKENS = 1 << 22
# What h5py raises for damaged metadata, depending on the structure that is hit.
_H5_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError)

Tokens = NDArray[np.unsignedinteger[Any]]
Sample = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True)
class StoreHeader:
    """What a file says of itself: its attributes, under these names."""

    tokenizer: str
    tokenizer_digest: str
    vocab_size: int
    separator: int
    """The id that ends each document."""
    num_tokens: int
    num_documents: int
    sources_digest: str
    """sha256 over name, size and sha256 of each document."""
    snapshot: str
    """Digest of the content: `content_hash` over all token bytes. A run is bound to it."""
    edge_digest: str
    """Digest of the first and last 65536 tokens, checked whenever the file is opened."""
    format: str = FORMAT
    schema_version: int = SCHEMA_VERSION

    def digest(self) -> str:
        """Kept as `header_digest`, so that a changed attribute is seen."""
        record = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(record.encode()).hexdigest()


class TokenStore:
    """Sequences of `sequence_length` tokens and their targets.

    Each process opens the file for itself at its first read, so a store may be carried through
    fork, pickle and DataLoader workers.
    """

    def __init__(self, path: Union[str, Path], sequence_length: int) -> None:
        if sequence_length < 1:
            raise UsageError(f"a sequence of {sequence_length} tokens is none; ask for 1 or more")
        self.path = Path(path)
        self.sequence_length = sequence_length
        self.header = read_header(self.path)
        self._tokens: Optional[h5py.Dataset] = None
        self._pid = 0
        if not len(self):
            raise DataError(
                f"`{self.path}` holds {self.header.num_tokens} tokens; one sequence of "
                f"{sequence_length} takes {sequence_length + 1}: build it from more text, or "
                "train on shorter sequences"
            )

    def __len__(self) -> int:
        return max(0, (self.header.num_tokens - 1) // self.sequence_length)

    @property
    def vocab_size(self) -> int:
        return self.header.vocab_size

    @property
    def tokenizer_digest(self) -> str:
        return self.header.tokenizer_digest

    @property
    def snapshot(self) -> str:
        return self.header.snapshot

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Many at once: what a DataLoader calls instead of `__getitem__` for a batch."""
        rows = self.read(indices).astype(np.int64)
        return [(row[:-1], row[1:]) for row in rows]

    def read(self, indices: ArrayLike) -> Tokens:
        """Rows of sequence_length + 1 tokens as they are stored, in the order asked for."""
        wanted = np.asarray(indices, np.int64).reshape(-1)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"`{self.path}` has sequences 0 to {len(self) - 1}")
        rows = np.empty((wanted.size, self.sequence_length + 1), self.open().dtype)
        by_place = np.argsort(wanted, kind="stable")
        breaks = np.flatnonzero(np.diff(wanted[by_place]) != 1) + 1
        for run in np.split(by_place, breaks):
            if run.size:
                read = self._read_run(int(wanted[run[0]]), run.size)
                rows[run, :-1] = read[:-1].reshape(run.size, -1)
                rows[run, -1] = read[self.sequence_length :: self.sequence_length]
        return rows

    def _read_run(self, first: int, count: int) -> Tokens:
        """The tokens of `count` consecutive sequences, and the one that follows them."""
        length = self.sequence_length
        wanted = slice(first * length, (first + count) * length + 1)
        try:
            return patiently(lambda: self._read_once(wanted), self.path)
        except _H5_ERRORS as error:
            raise DataError(
                f"cannot read sequence {first} and on of `{self.path}` ({error}); check it with "
                f"`ftslurm data describe --verify {self.path}`"
            ) from None

    def _read_once(self, wanted: slice) -> Tokens:
        try:
            return self.open()[wanted]  # type: ignore[no-any-return]
        except OSError as error:
            if error.errno == errno.ESTALE:
                self.close()
            raise

    def open(self) -> h5py.Dataset:
        """This process's own handle; opened when it has none yet, refused if the file changed."""
        if self._tokens is None or self._pid != os.getpid():
            # First let go of what a fork left: HDF5 would share its descriptor with a second open.
            self.close()
            if read_header(self.path) != self.header:
                raise DataError(
                    f"`{self.path}` was replaced while the run reads it; a run keeps its data: "
                    "put the old file back, or start a new run"
                )
            # Kept: looking the data set up by name takes ten times as long as a read.
            self._tokens, self._pid = open_hdf5(self.path)[TOKENS], os.getpid()
        return self._tokens

    def close(self) -> None:
        tokens, self._tokens = self._tokens, None
        if tokens is not None:
            tokens.file.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokens": None}


def describe(path: Union[str, Path], *, verify: bool = False) -> dict[str, Any]:
    """All that a store says of itself, as plain JSON; `verify` reads every token first."""
    header = read_header(Path(path))
    if verify:
        _verify_tokens(Path(path), header)
    size_bytes = Path(path).stat().st_size
    return {"path": str(path), "size_bytes": size_bytes, **dataclasses.asdict(header)}


def read_header(path: Path) -> StoreHeader:
    """The file's checked header; nothing stays open. DataError for anything but a whole store."""
    handle = open_hdf5(path)
    try:
        header = _decode_header(path, handle)
        tokens = handle[TOKENS]
        if tokens.shape != (header.num_tokens,):
            raise DataError(
                f"`{path}` has tokens of shape {tokens.shape}, its header says "
                f"{header.num_tokens}; it is damaged: copy or build it again"
            )
        if edge_digest(tokens) != header.edge_digest:
            raise DataError(
                f"`{path}` does not hold the tokens it was written with (its ends have another "
                "digest); copy or build it again"
            )
    except _H5_ERRORS as error:
        raise DataError(
            f"`{path}` is a damaged HDF5 file ({error}); copy or build it again"
        ) from None
    finally:
        handle.close()
    return header


def open_hdf5(path: Path) -> h5py.File:
    """Open for reading; DataError when there is no whole HDF5 file."""
    try:
        with path.open("rb") as stream:
            signature = stream.read(len(_SIGNATURE))
    except FileNotFoundError:
        raise DataError(
            f"there is no token store `{path}`; make one: `ftslurm data build SOURCE... {path}`"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read `{path}`: {error.strerror}; expected a token store") from None
    if signature != _SIGNATURE:
        what = "no HDF5 file" if signature else "empty"
        raise DataError(f"`{path}` is {what}; expected a token store made by `ftslurm data build`")
    try:
        # No lock: a published store never changes, and flock fails on many NFS and Lustre mounts.
        # No chunk cache: with it, each read of a sequence would read its whole chunk (measured:
        # 3,700 sequences a second with the default cache, 75,000 without).
        return h5py.File(path, "r", locking=False, rdcc_nbytes=0)
    except _H5_ERRORS as error:
        raise DataError(
            f"`{path}` is no whole HDF5 file ({error}); copy or build it again"
        ) from None


def edge_digest(tokens: h5py.Dataset) -> str:
    digest = hashlib.sha256(tokens[:_EDGE_TOKENS].tobytes())
    digest.update(tokens[max(0, tokens.shape[0] - _EDGE_TOKENS) :].tobytes())
    return digest.hexdigest()


def content_hash(tokenizer_digest: str, dtype: np.dtype[Any]) -> Any:
    """The hash that token bytes are fed to; equal bytes of another meaning start differently."""
    return hashlib.sha256(f"{tokenizer_digest} {dtype.str}\n".encode())


def _decode_header(path: Path, handle: h5py.File) -> StoreHeader:
    if _text(handle, "format") != FORMAT:
        raise DataError(
            f"`{path}` is an HDF5 file but no token store; build one with `ftslurm data build`"
        )
    version = int(handle.attrs["schema_version"])
    if version > SCHEMA_VERSION:
        raise DataError(
            f"`{path}` has schema_version {version}, this ftslurm reads up to {SCHEMA_VERSION}; "
            "use the version that wrote it or a newer one"
        )
    values: dict[str, Any] = {}
    for item in dataclasses.fields(StoreHeader):
        is_number = item.type == "int"
        values[item.name] = int(handle.attrs[item.name]) if is_number else _text(handle, item.name)
    header = StoreHeader(**values)
    if _text(handle, HEADER_DIGEST) != header.digest():
        raise DataError(f"`{path}` has a damaged header; copy or build it again")
    return header


def _text(handle: h5py.File, name: str) -> str:
    """A text attribute, "" for none; only fixed-length ones are read (see `TokenWriter.finish`)."""
    # Not `get`, which takes a damaged attribute for one that is not there.
    value = handle.attrs[name] if name in list(handle.attrs) else b""
    return value.decode() if isinstance(value, bytes) else ""


def _verify_tokens(path: Path, header: StoreHeader) -> None:
    handle = open_hdf5(path)
    try:
        tokens = handle[TOKENS]
        digest = content_hash(header.tokenizer_digest, tokens.dtype)
        for start in range(0, header.num_tokens, _VERIFY_TOKENS):
            digest.update(tokens[start : start + _VERIFY_TOKENS].tobytes())
    except _H5_ERRORS as error:
        raise DataError(f"cannot read all of `{path}` ({error}); copy or build it again") from None
    finally:
        handle.close()
    if digest.hexdigest() != header.snapshot:
        raise DataError(
            f"`{path}` has tokens with digest {digest.hexdigest()[:16]}..., its header says "
            f"{header.snapshot[:16]}...; it is damaged: copy or build it again"
        )
