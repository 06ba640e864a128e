"""From text to token ids, a document at a time; every document ends with a separator.

The byte tokenizer takes any bytes and needs nothing installed. A `tokenizers` JSON file takes
UTF-8 text. Neither adds special tokens of its own but the separator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ftslurm.errors import DataError, UsageError

BYTES = "bytes"

_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<eos>", "</s>", "[SEP]")
_PIECE_BYTES = 1 << 20


class Tokenizer(Protocol):
    """What a token store needs to know of a tokenizer."""

    name: str
    digest: str
    vocab_size: int
    separator: int

    def encode(self, blocks: Iterable[bytes]) -> Iterator[NDArray[np.integer[Any]]]:
        """Ids of one document given in blocks; UnicodeDecodeError if it is no text for it."""
        ...


def open_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or the path of a JSON file of the `tokenizers` library."""
    return ByteTokenizer() if name == BYTES else FileTokenizer(Path(name))


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest unsigned type that holds every id, little-endian."""
    for dtype in ("u1", "<u2", "<u4"):
        if vocab_size <= np.iinfo(dtype).max + 1:
            return np.dtype(dtype)
    raise DataError(f"a vocabulary of {vocab_size} does not fit 32 bits")


class ByteTokenizer:
    """Ids 0 to 255 are the bytes themselves, 256 separates documents."""

    name = BYTES
    separator = 256
    vocab_size = 257
    digest = hashlib.sha256(b"ftslurm bytes: ids 0-255 bytes, 256 separator").hexdigest()

    def encode(self, blocks: Iterable[bytes]) -> Iterator[NDArray[np.integer[Any]]]:
        for block in blocks:
            yield np.frombuffer(block, np.uint8)


class FileTokenizer:
    """A tokenizer of the `tokenizers` library, read from its JSON file.

    Long documents go through in pieces that end at a line's end, so that memory stays bounded;
    tokens that would span such a line's end are split there, the same way each time.
    """

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise UsageError(
                f"tokenizer `{path}` needs the `tokenizers` package; install the extra "
                "`ftslurm[tokenizers]`, or use `--tokenizer bytes`"
            ) from None
        try:
            data = path.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except OSError as error:
            raise DataError(f"cannot read tokenizer `{path}`: {error.strerror}") from None
        except ValueError as error:
            raise DataError(
                f"`{path}` is no JSON file of the tokenizers library ({error}); "
                "name one, or `bytes`"
            ) from None
        # A saved file may carry both; they would cut documents short or fill them up unasked.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = path.name
        self.digest = hashlib.sha256(data).hexdigest()
        ids = list(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.vocab_size = max(ids, default=-1) + 1
        known = [self._tokenizer.token_to_id(token) for token in _END_OF_TEXT]
        found = [token for token in known if token is not None]
        self.separator: int = found[0] if found else self.vocab_size
        self.vocab_size = max(self.vocab_size, self.separator + 1)

    def encode(self, blocks: Iterable[bytes]) -> Iterator[NDArray[np.integer[Any]]]:
        for piece in _text_pieces(blocks):
            encoding = self._tokenizer.encode(piece, add_special_tokens=False)
            yield np.asarray(encoding.ids, np.uint32)


def _text_pieces(blocks: Iterable[bytes]) -> Iterator[str]:
    """UTF-8 text in pieces that end at a line's end where there is one within the bound."""
    held = b""
    for block in blocks:
        held += block
        while len(held) > _PIECE_BYTES:
            cut = held.rfind(b"\n", 0, _PIECE_BYTES) + 1 or _character_start(held, _PIECE_BYTES)
            yield held[:cut].decode()
            held = held[cut:]
    if held:
        yield held.decode()


def _character_start(data: bytes, place: int) -> int:
    """The last place at or before `place` where a UTF-8 character may start."""
    for back in range(4):
        if data[place - back] & 0xC0 != 0x80:
            return place - back
    return place
