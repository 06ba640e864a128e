"""What a checkpoint says about itself: manifest and index as plain values.

Names of files are computed from rank and position, never taken from a file, so no record can lead
outside its step folder. `record_json` has the JSON of these values, `commit` has COMMITTED.

A step folder holds, and holds nothing else:

    shard-00000-000.bin   raw bytes of rank 0's tensors, little endian, C order, gaps zero
    index-00000.json      what lies where in rank 0's shard files, and rank 0's other leaves
    manifest.json         the step as a whole, and the digest of each index
    COMMITTED             the digest of the manifest; written last
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

MANIFEST = "manifest.json"

LARGE_ALIGNMENT_BYTES = 4096
"""Of tensors of at least this size and of whole files: pages, and blocks of direct I/O."""
SMALL_ALIGNMENT_BYTES = 64
"""Of all other tensors: a cache line, and more than any dtype needs."""
LARGEST_CHUNK_BYTES = 64 * 1024 * 1024

ITEM_BYTES = {
    **dict.fromkeys(["bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"], 1),
    **dict.fromkeys(["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"], 1),
    **dict.fromkeys(["float4_e2m1fn_x2"], 1),
    **dict.fromkeys(["int16", "uint16", "float16", "bfloat16"], 2),
    **dict.fromkeys(["int32", "uint32", "float32", "complex32"], 4),
    **dict.fromkeys(["int64", "uint64", "float64", "complex64"], 8),
    **dict.fromkeys(["complex128"], 16),
}
"""dtype (torch's name without `torch.`) -> bytes of one element."""


def shard_name(rank: int, position: int) -> str:
    return f"shard-{rank:05d}-{position:03d}.bin"


def index_name(rank: int) -> str:
    return f"index-{rank:05d}.json"


@dataclass(frozen=True)
class TensorRecord:
    """One rank's piece of one tensor."""

    key: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where the piece begins in the global tensor."""
    shape: tuple[int, ...]
    """Of the piece; a 0 in it makes the piece empty."""
    file: str
    offset: int
    bytes: int
    digest: str

    @property
    def end(self) -> int:
        """First byte in the file that is not of this piece any more."""
        return self.offset + self.bytes


@dataclass(frozen=True)
class Chunk:
    offset: int
    bytes: int
    digest: str


@dataclass(frozen=True)
class ShardFile:
    """A file, cut into chunks without gaps; chunks cover padding as well."""

    path: str
    bytes: int
    chunks: list[Chunk]


@dataclass(frozen=True)
class ShardIndex:
    """All that one rank saved."""

    rank: int
    files: list[ShardFile]
    tensors: list[TensorRecord]
    aliases: dict[str, str]
    """Key -> key of the tensor it shares its storage with (tied weights), in any rank's index."""
    objects: dict[str, Any]
    """Leaves that are no tensors. They belong to this rank; equal keys of ranks do not collide."""


@dataclass(frozen=True)
class IndexEntry:
    """The manifest's line for one rank's index."""

    rank: int
    path: str
    bytes: int
    digest: str


@dataclass(frozen=True)
class Parent:
    """The committed step a trajectory continued from."""

    step: int
    digest: str
    """Of its manifest, as in its COMMITTED."""


@dataclass(frozen=True)
class Manifest:
    """The step as a whole."""

    run_id: str
    attempt: int
    step: int
    parent: Optional[Parent]
    """The step committed or restored before this one; None: trained from step 0."""
    world_size: int
    parallelism: dict[str, int]
    """dp, tp, pp, cp, ep."""
    global_batch_size: int
    accumulation: int
    """Micro-batches of the next step already accumulated; 0 at a step boundary."""
    epoch: int
    samples: int
    """Consumed over all ranks since step 0."""
    tokens: int
    seed: int
    framework: str
    framework_version: str
    code_commit: Optional[str]
    config_digest: Optional[str]
    image_digest: Optional[str]
    dataset_snapshot: Optional[str]
    tokenizer_digest: Optional[str]
    digest_algorithm: str
    """Of indexes, chunks and tensors."""
    indexes: list[IndexEntry]
    """One a rank, in order of rank."""
    created_at: float
    """UTC seconds."""
    extra: dict[str, Any] = field(default_factory=dict)


def piece_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Size of a contiguous piece."""
    size = ITEM_BYTES[dtype]
    for length in shape:
        size *= length
    return size


def piece_problem(
    dtype: str, global_shape: tuple[int, ...], offsets: tuple[int, ...], shape: tuple[int, ...]
) -> Optional[str]:
    """Why this cannot be a piece of such a tensor; None when it can."""
    if dtype not in ITEM_BYTES:
        return f"dtype {ascii(dtype)} is not known"
    if not len(global_shape) == len(offsets) == len(shape):
        return f"shape {shape} at {offsets} has other dimensions than {global_shape}"
    if any(at + length > whole for at, length, whole in zip(offsets, shape, global_shape)):
        return f"shape {shape} at {offsets} reaches out of {global_shape}"
    return None
