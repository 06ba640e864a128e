"""Writes a token store: whole under its name, or not there at all.

Tokens stream through one chunk of memory into a file of a temporary name beside the target; it is
synced and takes the name in one rename. Two writers of one name end with one whole file. After
an error nothing is left; after a kill, a hidden `.NAME.*.tmp` that nobody reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from ftslurm.errors import DataError
from ftslurm.files import fsync_folder
from ftslurm.train.token_store import (
    HEADER_DIGEST,
    TOKENS,
    StoreHeader,
    content_hash,
    edge_digest,
    read_header,
)
from ftslurm.train.tokenizer import Tokenizer, token_dtype

_CHUNK_TOKENS = 1 << 20
_CHUNK_METADATA_BYTES = 1 << 10
_FILE_METADATA_BYTES = 1 << 20
_SUPERBLOCK_END_OF_FILE = 28  # of versions 2 and 3 (HDF5 File Format Specification, II.A)


class TokenWriter:
    """One store being written; made by `writing_store`."""

    def __init__(self, path: Path, fd: int, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._fd = fd
        self._num_chunks = 0
        self._buffer = np.empty(_CHUNK_TOKENS, token_dtype(tokenizer.vocab_size))
        self._filled = 0
        self._content = content_hash(tokenizer.digest, self._buffer.dtype)
        self._sources = hashlib.sha256()
        self.num_tokens = 0
        self.num_documents = 0
        # v110: all metadata carry checksums, which the older format lacks.
        self._file = h5py.File(path, "w", locking=False, libver=("v110", "v110"))
        self._reserve()
        self._tokens = self._file.create_dataset(
            TOKENS,
            shape=(0,),
            maxshape=(None,),
            chunks=(_CHUNK_TOKENS,),
            dtype=self._buffer.dtype,
        )

    def add_document(self, name: str, blocks: Iterable[bytes]) -> None:
        """Append one document and its separator; an empty one leaves no trace."""
        seen = _SeenBytes(blocks)
        for ids in self._tokenizer.encode(seen):
            self._append(ids)
        if seen.size_bytes:
            self._append(np.array([self._tokenizer.separator]))
            self._sources.update(f"{name}\0{seen.size_bytes}\0{seen.hexdigest()}\n".encode())
            self.num_documents += 1

    def _append(self, ids: NDArray[np.integer[Any]]) -> None:
        while ids.size:
            taken = ids[: _CHUNK_TOKENS - self._filled]
            self._buffer[self._filled : self._filled + taken.size] = taken
            self._filled += taken.size
            self.num_tokens += taken.size
            ids = ids[taken.size :]
            if self._filled == _CHUNK_TOKENS:
                self._flush()

    def _reserve(self) -> None:
        """Take the space of one more chunk before HDF5 asks for it.

        HDF5 cannot close a file that it could not write (2.0: it crashes the interpreter at exit);
        so a full disk has to be met here. `finish` gives back what was not used.
        """
        self._num_chunks += 1
        chunk_bytes = self._buffer.nbytes + _CHUNK_METADATA_BYTES
        os.posix_fallocate(self._fd, 0, self._num_chunks * chunk_bytes + _FILE_METADATA_BYTES)

    def _flush(self) -> None:
        self._reserve()
        tokens = self._buffer[: self._filled]
        start = self._tokens.shape[0]
        self._tokens.resize((start + tokens.size,))
        self._tokens[start:] = tokens
        self._content.update(tokens)
        self._filled = 0

    def finish(self) -> None:
        """Write what is held back and the header, and close the file."""
        self._flush()
        header = StoreHeader(
            tokenizer=self._tokenizer.name,
            tokenizer_digest=self._tokenizer.digest,
            vocab_size=self._tokenizer.vocab_size,
            separator=self._tokenizer.separator,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            sources_digest=self._sources.hexdigest(),
            snapshot=self._content.hexdigest(),
            edge_digest=edge_digest(self._tokens),
        )
        attributes = {**dataclasses.asdict(header), HEADER_DIGEST: header.digest()}
        for name, value in attributes.items():
            # Of fixed length: HDF5 keeps others in a heap without checksum, and a wrong bit there
            # makes it search for ever (seen with 2.0).
            self._file.attrs[name] = np.bytes_(value.encode()) if isinstance(value, str) else value
        self.close()
        (size_bytes,) = struct.unpack("<Q", os.pread(self._fd, 8, _SUPERBLOCK_END_OF_FILE))
        os.ftruncate(self._fd, size_bytes)

    def close(self) -> None:
        if self._file:
            self._file.close()


@contextlib.contextmanager
def writing_store(out: Path, tokenizer: Tokenizer) -> Iterator[TokenWriter]:
    """Yield a writer; when the body ends, `out` is replaced by what it wrote, durably.

    If the body or the writing fails, `out` is what it was before.
    """
    try:
        fd, name = tempfile.mkstemp(prefix=f".{out.name}.", suffix=".tmp", dir=out.parent)
    except OSError as error:
        raise DataError(f"cannot write into `{out.parent}`: {error.strerror}") from None
    temporary = Path(name)
    try:
        os.fchmod(fd, 0o644)
        writer = TokenWriter(temporary, fd, tokenizer)
        try:
            yield writer
            if not writer.num_documents:
                raise DataError(f"no text for `{out}`: all sources are empty or were left out")
            writer.finish()
        finally:
            writer.close()
        read_header(temporary)
        os.fsync(fd)
        temporary.replace(out)
        fsync_folder(out.parent)
    except OSError as error:
        # HDF5 puts its errno into a long text that ends in a stack of its own functions.
        reason = errno.errorcode.get(error.errno or 0)
        raise DataError(
            f"cannot write `{out}`: {os.strerror(error.errno) if error.errno and reason else error}"
        ) from None
    finally:
        os.close(fd)
        temporary.unlink(missing_ok=True)


class _SeenBytes:
    """Passes blocks on and keeps their size and digest."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = blocks
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        for block in self._blocks:
            self._digest.update(block)
            self.size_bytes += len(block)
            yield block

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
