"""JSON of a checkpoint's records: values to bytes and bytes to values. Pure.

Reading raises FormatError and nothing else, whatever the bytes are. Unknown keys are ignored, a
newer schema_version is refused.
"""

from __future__ import annotations

import json
from typing import Any, Optional

from ftslurm.checkpoint import objects
from ftslurm.checkpoint.commit import MANIFEST_ALGORITHM, SCHEMA_VERSION
from ftslurm.checkpoint.digest import ALGORITHMS, digest
from ftslurm.checkpoint.fields import Fields, is_count, parse
from ftslurm.checkpoint.records import (
    LARGEST_CHUNK_BYTES,
    MANIFEST,
    SMALL_ALIGNMENT_BYTES,
    Chunk,
    IndexEntry,
    Manifest,
    Parent,
    ShardFile,
    ShardIndex,
    TensorRecord,
    index_name,
    piece_bytes,
    piece_problem,
    shard_name,
)
from ftslurm.errors import FormatError


def encode_manifest(manifest: Manifest) -> bytes:
    record = {"schema_version": SCHEMA_VERSION, **vars(manifest)}
    record["parent"] = None if manifest.parent is None else vars(manifest.parent)
    record["indexes"] = [vars(entry) for entry in manifest.indexes]
    record["extra"] = objects.encode(manifest.extra, key="extra")
    return _encode_lines(record)


def decode_manifest(data: bytes, *, where: str = MANIFEST) -> Manifest:
    fields = parse(data, where=where)
    algorithm = fields.text("digest_algorithm")
    if algorithm not in ALGORITHMS:
        raise FormatError(f"{where} names the digest algorithm `{algorithm}`, not known here")
    manifest = Manifest(
        run_id=fields.text("run_id"),
        attempt=fields.count("attempt"),
        step=fields.count("step"),
        parent=_decode_parent(fields),
        world_size=fields.count("world_size", least=1),
        parallelism=_decode_parallelism(fields),
        global_batch_size=fields.count("global_batch_size"),
        accumulation=fields.count("accumulation"),
        epoch=fields.count("epoch"),
        samples=fields.count("samples"),
        tokens=fields.count("tokens"),
        seed=fields.integer("seed"),
        framework=fields.text("framework"),
        framework_version=fields.text("framework_version"),
        code_commit=fields.optional_text("code_commit"),
        config_digest=fields.optional_text("config_digest"),
        image_digest=fields.optional_text("image_digest"),
        dataset_snapshot=fields.optional_text("dataset_snapshot"),
        tokenizer_digest=fields.optional_text("tokenizer_digest"),
        digest_algorithm=algorithm,
        indexes=[_decode_entry(row, rank, algorithm) for rank, row in _rows(fields, "indexes")],
        created_at=fields.seconds("created_at"),
        extra=objects.decode(fields.mapping("extra"), where=f"{where}: extra"),
    )
    if len(manifest.indexes) != manifest.world_size:
        raise FormatError(
            f"{where} lists {len(manifest.indexes)} indexes for world_size {manifest.world_size}; "
            "expected one a rank"
        )
    if manifest.parent is not None and manifest.parent.step >= manifest.step:
        raise FormatError(f"{where} of step {manifest.step} has parent {manifest.parent.step}")
    return manifest


def manifest_digest(data: bytes) -> str:
    """Identity of a step: digest of its manifest.json."""
    return digest("sha256", data)


def encode_index(index: ShardIndex) -> bytes:
    """CheckpointError, by name, when a leaf of `objects` has no JSON form."""
    return _encode_lines(
        {
            "schema_version": SCHEMA_VERSION,
            "rank": index.rank,
            "files": [
                {**vars(file), "chunks": [vars(chunk) for chunk in file.chunks]}
                for file in index.files
            ],
            "aliases": index.aliases,
            "objects": {
                key: objects.encode(value, key=key) for key, value in index.objects.items()
            },
            "tensors": [vars(tensor) for tensor in index.tensors],
        }
    )


def decode_index(data: bytes, *, algorithm: str, where: str) -> ShardIndex:
    """Checked in itself: chunks tile the files, tensors lie inside them and do not overlap."""
    fields = parse(data, where=where)
    rank = fields.count("rank")
    length = ALGORITHMS[algorithm]
    files = [_decode_file(row, shard_name(rank, i), length) for i, row in _rows(fields, "files")]
    tensors = [_decode_tensor(row, length) for _, row in _rows(fields, "tensors")]
    _check_places(tensors, {file.path: file.bytes for file in files}, where)
    aliases = fields.mapping("aliases")
    if not all(type(target) is str for target in aliases.values()):
        raise FormatError(f"{where} has an alias that is no text; it is damaged")
    return ShardIndex(
        rank=rank,
        files=files,
        tensors=tensors,
        aliases=aliases,
        objects={
            key: objects.decode(value, where=f"{where}: {key}")
            for key, value in fields.mapping("objects").items()
        },
    )


def _encode_lines(record: dict[str, Any]) -> bytes:
    """JSON with one element of each list or object a line.

    json.dumps(indent=...) leaves the C encoder: ten times slower for an index of 10 000 tensors.
    """
    parts = []
    for key, value in record.items():
        if value and isinstance(value, list):
            body = "[\n " + ",\n ".join(_compact(item) for item in value) + "\n]"
        elif value and isinstance(value, dict):
            lines = [f"{_compact(name)}: {_compact(item)}" for name, item in value.items()]
            body = "{\n " + ",\n ".join(lines) + "\n}"
        else:
            body = _compact(value)
        parts.append(f"{_compact(key)}: {body}")
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode("ascii")


def _compact(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _rows(fields: Fields, key: str) -> list[tuple[int, Fields]]:
    return list(enumerate(fields.objects(key)))


def _decode_parent(fields: Fields) -> Optional[Parent]:
    row = fields.child("parent")
    if row is None:
        return None
    length = ALGORITHMS[MANIFEST_ALGORITHM]
    return Parent(step=row.count("step"), digest=row.digest("digest", length=length))


def _decode_parallelism(fields: Fields) -> dict[str, int]:
    sizes = fields.mapping("parallelism")
    if not all(is_count(size) and size for size in sizes.values()):
        raise FormatError(f"{fields.where} has a parallelism that is no positive integer")
    return sizes


def _decode_entry(row: Fields, rank: int, algorithm: str) -> IndexEntry:
    entry = IndexEntry(
        rank=row.count("rank"),
        path=row.text("path"),
        bytes=row.count("bytes", least=1),
        digest=row.digest("digest", length=ALGORITHMS[algorithm]),
    )
    if entry.rank != rank or entry.path != index_name(rank):
        raise FormatError(
            f"{row.where} is `{ascii(entry.path)}` of rank {entry.rank}, expected "
            f"`{index_name(rank)}` of rank {rank}"
        )
    return entry


def _decode_file(row: Fields, name: str, length: int) -> ShardFile:
    file = ShardFile(
        path=row.text("path"),
        bytes=row.count("bytes"),
        chunks=[
            Chunk(
                offset=chunk.count("offset"),
                bytes=chunk.count("bytes", least=1),
                digest=chunk.digest("digest", length=length),
            )
            for _, chunk in _rows(row, "chunks")
        ],
    )
    if file.path != name:
        raise FormatError(f"{row.where} is named {ascii(file.path)}, expected `{name}`")
    end = 0
    for chunk in file.chunks:
        if chunk.offset != end or chunk.bytes > LARGEST_CHUNK_BYTES:
            raise FormatError(f"{row.where} has chunks with a gap, an overlap or above 64 MiB")
        end += chunk.bytes
    if end != file.bytes:
        raise FormatError(f"{row.where} has chunks of {end} bytes in all, expected {file.bytes}")
    return file


def _decode_tensor(row: Fields, length: int) -> TensorRecord:
    record = TensorRecord(
        key=row.text("key"),
        dtype=row.text("dtype"),
        global_shape=tuple(row.counts("global_shape")),
        offsets=tuple(row.counts("offsets")),
        shape=tuple(row.counts("shape")),
        file=row.text("file"),
        offset=row.count("offset"),
        bytes=row.count("bytes"),
        digest=row.digest("digest", length=length),
    )
    problem = piece_problem(record.dtype, record.global_shape, record.offsets, record.shape)
    if problem is None and piece_bytes(record.dtype, record.shape) != record.bytes:
        problem = f"{record.bytes} bytes do not fit {record.dtype} of shape {record.shape}"
    if problem is not None:
        raise FormatError(f"{row.where} ({ascii(record.key)}): {problem}; it is damaged")
    return record


def _check_places(tensors: list[TensorRecord], sizes: dict[str, int], where: str) -> None:
    """Each record inside its file, aligned, and no byte in two records."""
    end = {path: 0 for path in sizes}
    for record in sorted(tensors, key=lambda item: (item.file, item.offset, item.bytes)):
        name = ascii(record.key)
        if record.file not in sizes:
            raise FormatError(f"{where}: {name} lies in {ascii(record.file)}, not a file of it")
        if record.offset % SMALL_ALIGNMENT_BYTES:
            raise FormatError(f"{where}: {name} lies at {record.offset}, no multiple of 64")
        if record.offset + record.bytes > sizes[record.file]:
            raise FormatError(f"{where}: {name} reaches over the end of `{record.file}`")
        if record.bytes and record.offset < end[record.file]:
            raise FormatError(f"{where}: {name} overlaps another tensor in `{record.file}`")
        end[record.file] = max(end[record.file], record.offset + record.bytes)
