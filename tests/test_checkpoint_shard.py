"""A rank's shard: bytes go out and come back through memory views, digested on the way."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import content, names, skip_fsync
from hypothesis import given, settings
from hypothesis import strategies as st

from ftslurm.checkpoint import shard
from ftslurm.checkpoint.digest import ALGORITHMS, digest
from ftslurm.checkpoint.records import IndexEntry, ShardIndex
from ftslurm.checkpoint.shard import ShardReader, TensorData, read_index, read_tensor, write_shard
from ftslurm.errors import CheckpointError, FormatError

PAGE = 4096


@pytest.fixture(autouse=True, scope="module")
def only_bytes_matter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        skip_fsync(monkeypatch)
        yield


def tensor(key: str, count: int) -> TensorData:
    return TensorData(key, "uint8", (count,), (0,), (count,), memoryview(content(key, count)))


def save(folder: Path, tensors: list[TensorData], **changes: Any) -> tuple[IndexEntry, ShardIndex]:
    options: dict[str, Any] = {
        "objects": {},
        "aliases": {},
        "algorithm": "xxh3_128",
        "chunk_bytes": PAGE,
        **changes,
    }
    entry = write_shard(folder, 3, tensors, **options)
    return entry, read_index(folder, entry, options["algorithm"])


def load(folder: Path, index: ShardIndex, algorithm: str = "xxh3_128") -> dict[str, bytes]:
    loaded = {}
    with ShardReader(folder, algorithm) as reader:
        for record in index.tensors:
            into = bytearray(record.bytes)
            reader.read(record, memoryview(into))
            loaded[record.key] = bytes(into)
    return loaded


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bytes_come_back_and_digests_are_those_of_the_file(tmp_path: Path, algorithm: str) -> None:
    tensors = [tensor(str(size), size) for size in (0, 1, 63, 64, 65, 4095, 4096, 4097, 300_000)]
    entry, index = save(
        tmp_path, tensors, algorithm=algorithm, objects={"a": (1, [None])}, aliases={"x": "64"}
    )
    assert load(tmp_path, index, algorithm) == {t.key: bytes(t.data) for t in tensors}
    assert (index.rank, index.objects, index.aliases) == (3, {"a": (1, [None])}, {"x": "64"})
    assert entry.digest == digest(algorithm, (tmp_path / entry.path).read_bytes())
    (file,) = index.files
    data = (tmp_path / file.path).read_bytes()
    assert len(data) == file.bytes
    assert len(file.chunks) == -(-len(data) // PAGE)
    for chunk in file.chunks:
        part = data[chunk.offset : chunk.offset + chunk.bytes]
        assert digest(algorithm, part) == chunk.digest
    covered = set()
    for record in index.tensors:
        assert digest(algorithm, data[record.offset : record.end]) == record.digest
        covered |= set(range(record.offset, record.end))
    assert not any(byte for position, byte in enumerate(data) if position not in covered)


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 20_000), max_size=12),
    chunk_bytes=st.sampled_from([64, 1000, PAGE, 1 << 20]),
    max_file_bytes=st.sampled_from([PAGE, 30_000, 1 << 30]),
)
def test_any_sizes_come_back(
    tmp_path_factory: Any, sizes: list[int], chunk_bytes: int, max_file_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    tensors = [tensor(str(position), size) for position, size in enumerate(sizes)]
    _, index = save(folder, tensors, chunk_bytes=chunk_bytes, max_file_bytes=max_file_bytes)
    assert load(folder, index) == {t.key: bytes(t.data) for t in tensors}


def test_views_of_other_element_types_and_shapes_are_taken_as_bytes(tmp_path: Path) -> None:
    numbers: Any = memoryview(bytearray(content("n", 48))).cast("d")
    square: Any = memoryview(bytearray(content("s", 48))).cast("f", shape=[3, 4])
    tensors = [
        TensorData("n", "float64", (6,), (0,), (6,), numbers),
        TensorData("s", "float32", (3, 4), (0, 0), (3, 4), square),
    ]
    _, index = save(tmp_path, tensors)
    into: Any = memoryview(bytearray(48)).cast("f", shape=[3, 4])
    (record,) = [record for record in index.tensors if record.key == "s"]
    read_tensor(tmp_path, record, "xxh3_128", into)
    assert into.tolist() == square.tolist()


def test_a_rank_without_tensors_has_an_index_and_no_file(tmp_path: Path) -> None:
    _, index = save(tmp_path, [])
    assert (index.files, index.tensors) == ([], [])
    assert names(tmp_path) == ["index-00003.json"]


def test_nothing_is_written_when_a_leaf_or_a_tensor_cannot_be_saved(tmp_path: Path) -> None:
    short = TensorData("w", "float32", (4,), (0,), (4,), memoryview(b"12345678"))
    strange = TensorData("w", "qint8", (4,), (0,), (4,), memoryview(b"1234"))
    outside = TensorData("w", "uint8", (4,), (1,), (4,), memoryview(b"1234"))
    for bad in (short, strange, outside):
        with pytest.raises(CheckpointError, match="`w` cannot be saved"):
            save(tmp_path, [tensor("ok", 9), bad])
    with pytest.raises(CheckpointError, match=r"`loader\.rng` is a builtins\.set"):
        save(tmp_path, [tensor("ok", 9)], objects={"loader": {"rng": {1}}})
    assert names(tmp_path) == []


@pytest.mark.parametrize("action", ["enospc", "eio"])
def test_an_error_of_the_device_fails_the_save_with_a_sentence(
    tmp_path: Path, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTSLURM_FAULTS", f"{action}@persist:rank=3:step=7:attempt=2")
    with pytest.raises(CheckpointError, match="cannot write the shard of rank 3"):
        save(tmp_path, [tensor("w", 9)], step=7, attempt=2)
    save(tmp_path, [tensor("w", 9)], step=8, attempt=2)


def test_a_flush_that_fails_in_its_thread_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fdatasync(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path, [tensor("w", 9)])


def test_a_digest_that_fails_in_its_thread_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(algorithm: str, *views: memoryview) -> str:
        raise MemoryError("no room for a hasher")

    monkeypatch.setattr(shard, "digest", broken)
    with pytest.raises(MemoryError):
        save(tmp_path, [tensor("w", 1_000_000)])


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.writev, os.preadv
    monkeypatch.setattr(os, "writev", lambda fd, parts: write(fd, [parts[0][:1000]]))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: read(fd, [into[0][:999]], at))
    tensors = [tensor("a", 5000), tensor("b", 10)]
    _, index = save(tmp_path, tensors)
    assert load(tmp_path, index) == {t.key: bytes(t.data) for t in tensors}


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    save(tmp_path, [tensor("w", 9)])
    with pytest.raises(CheckpointError, match="File exists"):
        save(tmp_path, [tensor("w", 9)])


def test_a_large_tensor_gets_a_file_of_its_own_above_the_limit(tmp_path: Path) -> None:
    tensors = [tensor("a", 5000), tensor("b", 90_000), tensor("c", 5000), tensor("d", 3)]
    _, index = save(tmp_path, tensors, max_file_bytes=20_000)
    assert {record.key: record.file[-7:-4] for record in index.tensors} == {
        "a": "000",
        "b": "001",
        "c": "002",
        "d": "002",
    }


@pytest.mark.parametrize("position", [0, 64, 4095, 9999])
def test_a_flipped_bit_is_found_by_the_read_that_brings_it(tmp_path: Path, position: int) -> None:
    _, index = save(tmp_path, [tensor("w", 10_000)])
    path = tmp_path / index.files[0].path
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="`w` in .* is damaged|the file is damaged"):
        load(tmp_path, index)


def test_a_truncated_a_missing_and_a_changed_file_are_named(tmp_path: Path) -> None:
    entry, index = save(tmp_path, [tensor("w", 10_000)])
    path = tmp_path / index.files[0].path
    os.truncate(path, 9_000)
    with pytest.raises(CheckpointError, match="truncated"):
        load(tmp_path, index)
    path.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        load(tmp_path, index)
    os.truncate(tmp_path / entry.path, entry.bytes - 1)
    with pytest.raises(CheckpointError, match="not the index that the manifest names"):
        read_index(tmp_path, entry, "xxh3_128")
    (tmp_path / entry.path).unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        read_index(tmp_path, entry, "xxh3_128")


def test_a_buffer_of_another_size_is_refused(tmp_path: Path) -> None:
    _, index = save(tmp_path, [tensor("w", 100)])
    with pytest.raises(CheckpointError, match="99 bytes, expected 100"):
        read_tensor(tmp_path, index.tensors[0], "xxh3_128", memoryview(bytearray(99)))


def test_an_unknown_digest_algorithm_is_refused() -> None:
    with pytest.raises(FormatError, match="choose xxh3_128 or sha256"):
        digest("md5", b"x")


def test_a_reader_leaves_no_file_open(tmp_path: Path) -> None:
    _, index = save(tmp_path, [tensor("w", 100)])
    before = len(names(Path("/proc/self/fd")))
    load(tmp_path, index)
    assert len(names(Path("/proc/self/fd"))) == before


def test_a_step_of_more_files_than_a_process_may_open_is_read(tmp_path: Path) -> None:
    _, index = save(tmp_path, [tensor(f"w{i}", PAGE) for i in range(80)], max_file_bytes=PAGE)
    assert len(index.files) == 80
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(names(Path("/proc/self/fd"))) + 40, limits[1]))
    try:
        loaded = load(tmp_path, index)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert loaded == {f"w{i}": bytes(content(f"w{i}", PAGE)) for i in range(80)}
