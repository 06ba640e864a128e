"""The records of a checkpoint: what was written comes back, what is damaged is refused."""

import copy
import enum
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from checkpoints import make_manifest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftslurm.checkpoint import objects
from ftslurm.checkpoint.commit import Commit, decode_commit, encode_commit
from ftslurm.checkpoint.coverage import coverage_problems
from ftslurm.checkpoint.packing import plan_files
from ftslurm.checkpoint.record_json import (
    decode_index,
    decode_manifest,
    encode_index,
    encode_manifest,
)
from ftslurm.checkpoint.records import (
    Chunk,
    IndexEntry,
    Parent,
    ShardFile,
    ShardIndex,
    TensorRecord,
)
from ftslurm.errors import CheckpointError, FormatError

# No deadline: other tests may hold the processor.
CALM = settings(deadline=None, max_examples=100)
D32, D64 = "0" * 32, "a" * 64
BEYOND = st.sampled_from([-1, 2**63, 2**63 - 1, 10**300, 0, 1, 4096, 1e308, -0.0, 0.5, True, None])
JSON = st.recursive(
    BEYOND
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["../x", "/etc/passwd", "shard-00000-000.bin", "sha256", "md5", "$tuple"]),
    lambda child: (
        st.lists(child, max_size=3)
        | st.dictionaries(
            st.text(max_size=4) | st.sampled_from(["$float", "$x"]), child, max_size=3
        )
    ),
    max_leaves=6,
)
LEAVES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**200), max_value=2**200)
    | st.floats()
    | st.text(st.characters() | st.sampled_from("\ud800\u2028$"), max_size=6),
    lambda child: (
        st.lists(child, max_size=4)
        | st.lists(child, max_size=4).map(tuple)
        | st.dictionaries(
            st.text(max_size=4) | st.sampled_from(["$float", "$tuple", "$$x"]), child, max_size=4
        )
    ),
    max_leaves=12,
)


class Colour(enum.IntEnum):
    RED = 1


def record(key: str = "w", **changes: Any) -> TensorRecord:
    values: dict[str, Any] = {
        "key": key,
        "dtype": "float32",
        "global_shape": (4, 2),
        "offsets": (0, 0),
        "shape": (4, 2),
        "file": "shard-00000-000.bin",
        "offset": 0,
        "bytes": 32,
        "digest": D32,
    }
    return TensorRecord(**{**values, **changes})


def index(*tensors: TensorRecord, **changes: Any) -> ShardIndex:
    chunks = [Chunk(0, 4096, D32), Chunk(4096, 4096, D32)]
    values: dict[str, Any] = {
        "rank": 0,
        "files": [ShardFile("shard-00000-000.bin", 8192, chunks)],
        "tensors": list(tensors or [record(), record("b", offset=64)]),
        "aliases": {"head": "w"},
        "objects": {"scheduler": {"best": float("inf"), "betas": (0.9, 0.95)}},
    }
    return ShardIndex(**{**values, **changes})


MANIFEST = make_manifest(
    20,
    [IndexEntry(rank, f"index-{rank:05d}.json", 100, D32) for rank in (0, 1)],
    parent=Parent(10, D64),
    extra={"note": (1, "two")},
)
COMMIT = Commit(20, "gpt-test", "sha256", D64)


def read_index(data: bytes) -> ShardIndex:
    return decode_index(data, algorithm="xxh3_128", where="index")


FORMS: dict[str, tuple[bytes, Callable[[bytes], Any], Any]] = {
    "manifest": (encode_manifest(MANIFEST), decode_manifest, MANIFEST),
    "index": (encode_index(index()), read_index, index()),
    "commit": (encode_commit(COMMIT), decode_commit, COMMIT),
}


def bits(value: Any) -> Any:
    """The value with each float as its eight bytes and each type by name, for strict equality."""
    if isinstance(value, float):
        return ("float", struct.pack(">d", value))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [bits(item) for item in value])
    if isinstance(value, dict):
        return ("dict", [(key, bits(item)) for key, item in value.items()])
    return (type(value).__name__, value)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything inside a JSON value."""
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in children:
        yield (*path, key)
        if isinstance(child, (dict, list)):
            yield from places(child, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    changed = copy.deepcopy(value)
    target = changed
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = new
    return changed


@pytest.mark.parametrize("form", FORMS)
def test_a_record_comes_back_as_it_was_written(form: str) -> None:
    data, decode, value = FORMS[form]
    assert decode(data) == value


@CALM
@given(value=LEAVES)
def test_a_leaf_comes_back_bit_for_bit_with_its_types_and_order(value: Any) -> None:
    data = json.dumps(objects.encode(value, key="x"), allow_nan=False)
    assert bits(objects.decode(json.loads(data), where="x")) == bits(value)


@pytest.mark.parametrize(
    "value",
    [{1, 2}, b"x", Counter("ab"), {1: 2}, Colour.RED, object(), 1 << 9000, 1j],
    ids=lambda value: type(value).__name__,
)
def test_a_leaf_without_a_json_form_is_refused_by_name(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"`extra\.sampler\[1\]`"):
        objects.encode({"sampler": [0, value]}, key="extra")


def test_a_number_too_large_for_a_float_does_not_become_infinity() -> None:
    with pytest.raises(FormatError, match="not finite"):
        objects.decode(json.loads("[1e999]"), where="x")


def test_a_leaf_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="nested deeper"):
        objects.encode(loop, key="loop")


@CALM
@given(data=st.data(), form=st.sampled_from(sorted(FORMS)))
def test_changed_json_is_read_or_refused_and_never_breaks_the_reader(data: Any, form: str) -> None:
    encoded, decode, _ = FORMS[form]
    original = json.loads(encoded)
    path = data.draw(st.sampled_from(list(places(original))))
    changed = json.dumps(replaced(original, path, data.draw(JSON))).encode()
    try:
        decode(changed)
    except FormatError as error:
        assert len(str(error)) > 20


@CALM
@given(data=st.data(), form=st.sampled_from(sorted(FORMS)))
def test_changed_bytes_are_read_or_refused_and_never_break_the_reader(data: Any, form: str) -> None:
    encoded, decode, _ = FORMS[form]
    start = data.draw(st.integers(0, len(encoded)))
    length = data.draw(st.integers(0, 8))
    changed = encoded[:start] + data.draw(st.binary(max_size=8)) + encoded[start + length :]
    try:
        decode(changed)
    except FormatError as error:
        assert len(str(error)) > 20


def test_every_flipped_bit_of_committed_is_refused_or_names_another_manifest() -> None:
    data = encode_commit(COMMIT)
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            try:
                assert decode_commit(bytes(changed)) != COMMIT
            except FormatError:
                continue


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"7", b"[" * 100_000, b"\xff\xfe", b"{}"])
def test_what_is_no_record_at_all_is_refused(data: bytes) -> None:
    for _, decode, _ in FORMS.values():
        with pytest.raises(FormatError):
            decode(data)


def test_a_key_given_twice_is_refused() -> None:
    data = encode_commit(COMMIT).replace(b' "step"', b' "step": 3,\n "step"')
    with pytest.raises(FormatError, match="twice"):
        decode_commit(data)


@pytest.mark.parametrize("form", FORMS)
def test_a_newer_schema_is_refused_and_unknown_keys_are_not(form: str) -> None:
    encoded, decode, value = FORMS[form]
    fields = json.loads(encoded)
    newer = json.dumps({**fields, "schema_version": 2}).encode()
    with pytest.raises(FormatError, match="newer"):
        decode(newer)
    wider = json.dumps({**fields, "zzz": 1}, sort_keys=True, indent=1).encode() + b"\n"
    assert decode(wider) == value


# What an index must not say. path into the JSON, the lie, what the refusal speaks of.
LIES = [
    (("files", 0, "path"), "../../etc/passwd", "expected `shard-00000-000.bin`"),
    (("files", 0, "path"), "/etc/passwd", "expected `shard-00000-000.bin`"),
    (("files", 0, "path"), "shard-00001-000.bin", "expected `shard-00000-000.bin`"),
    (("files", 0, "bytes"), 8193, "expected 8193"),
    (("files", 0, "chunks", 1, "offset"), 4095, "gap"),
    (("files", 0, "chunks", 1, "bytes"), 2**40, "64 MiB"),
    (("files", 0, "chunks", 1, "bytes"), 0, "bytes"),
    (("files", 0, "chunks", 0, "digest"), "0" * 31, "digest"),
    (("files", 0, "chunks", 0, "digest"), "G" * 32, "digest"),
    (("tensors", 0, "file"), "../x", "not a file of it"),
    (("tensors", 0, "file"), "shard-00000-001.bin", "not a file of it"),
    (("tensors", 0, "offset"), -64, "offset"),
    (("tensors", 0, "offset"), 2**64, "offset"),
    (("tensors", 0, "offset"), 1, "multiple of 64"),
    (("tensors", 0, "offset"), 8192, "over the end"),
    (("tensors", 0, "offset"), 64, "overlaps"),
    (("tensors", 0, "bytes"), 31, "do not fit"),
    (("tensors", 0, "dtype"), "float31", "not known"),
    (("tensors", 0, "shape"), [4, 2, 1], "other dimensions"),
    (("tensors", 0, "shape"), [4, -2], "shape"),
    (("tensors", 0, "shape"), [4, True], "shape"),
    (("tensors", 0, "offsets"), [1, 0], "reaches out"),
    (("tensors", 0, "key"), "", "key"),
    (("aliases", "head"), 3, "alias"),
    (("objects", "scheduler"), {"$unknown": 1}, "unknown tag"),
    (("rank",), -1, "rank"),
]


@pytest.mark.parametrize(("path", "lie", "match"), LIES, ids=lambda value: str(value)[:30])
def test_an_index_that_cannot_be_true_is_refused(path: Any, lie: Any, match: str) -> None:
    changed = replaced(json.loads(encode_index(index())), path, lie)
    with pytest.raises(FormatError, match=match):
        read_index(json.dumps(changed).encode())


MANIFEST_LIES = [
    (("world_size",), 3, "lists 2 indexes for world_size 3"),
    (("world_size",), 0, "world_size"),
    (("world_size",), 10**12, "lists 2 indexes"),
    (("indexes", 1, "path"), "../index-00001.json", "expected `index-00001.json`"),
    (("indexes", 1, "rank"), 0, "expected"),
    (("parent", "step"), 20, "has parent 20"),
    (("digest_algorithm",), "md5", "not known"),
    (("step",), -1, "step"),
    (("run_id",), "", "run_id"),
    (("created_at",), 1e400, "is not JSON|created_at"),
]


@pytest.mark.parametrize(("path", "lie", "match"), MANIFEST_LIES, ids=lambda value: str(value)[:30])
def test_a_manifest_that_cannot_be_true_is_refused(path: Any, lie: Any, match: str) -> None:
    changed = replaced(json.loads(encode_manifest(MANIFEST)), path, lie)
    with pytest.raises(FormatError, match=match):
        decode_manifest(json.dumps(changed).encode())


def piece(offsets: tuple[int, ...], shape: tuple[int, ...], **changes: Any) -> TensorRecord:
    return record(offsets=offsets, shape=shape, **changes)


# (pieces, what is wrong with them)
COVERAGE = [
    ([piece((0, 0), (4, 2))], ""),
    ([piece((0, 0), (1, 2)), piece((1, 0), (3, 2)), piece((4, 0), (0, 2))], ""),
    ([piece((0, 0), (4, 1)), piece((0, 1), (4, 1))], ""),
    ([piece((0, 0), (2, 2)), piece((2, 0), (2, 1)), piece((2, 1), (2, 1))], ""),
    ([piece((0, 0), (3, 2))], "6 of 8"),
    ([piece((0, 0), (4, 2)), piece((0, 0), (4, 2))], "overlap"),
    ([piece((0, 0), (3, 2)), piece((2, 0), (2, 2))], "overlap"),
    ([piece((0, 0), (3, 2)), piece((2, 1), (1, 1))], "overlap"),
    ([piece((0, 0), (0, 2))], "0 of 8"),
    ([piece((0, 0), (2, 2)), piece((2, 0), (2, 2), dtype="int32")], "disagree on dtype"),
    ([piece((), (), global_shape=()), piece((), (), global_shape=())], "overlap"),
    ([piece((0,), (0,), global_shape=(0,))], ""),
]


@pytest.mark.parametrize(("pieces", "wrong"), COVERAGE)
def test_pieces_have_to_tile_the_tensor(pieces: list[TensorRecord], wrong: str) -> None:
    ranks = [index(one, rank=rank, aliases={}) for rank, one in enumerate(pieces)]
    problems = coverage_problems(ranks)
    assert [wrong in problem for problem in problems] == ([True] if wrong else [])


@CALM
@given(data=st.data())
def test_a_grid_covers_and_a_grid_with_one_piece_changed_does_not(data: Any) -> None:
    cuts = [sorted({0, 12, *data.draw(st.sets(st.integers(1, 11), max_size=4))}) for _ in range(2)]
    pieces = [
        record(global_shape=(12, 12), offsets=(top, left), shape=(bottom - top, right - left))
        for top, bottom in zip(cuts[0], cuts[0][1:])
        for left, right in zip(cuts[1], cuts[1][1:])
    ]
    pieces = data.draw(st.permutations(pieces))
    assert coverage_problems([index(*pieces, aliases={})]) == []
    assert coverage_problems([index(*pieces, pieces[0], aliases={})])
    if len(pieces) > 1:
        assert coverage_problems([index(*pieces[1:], aliases={})])


def test_an_alias_has_to_lead_to_a_stored_tensor() -> None:
    assert coverage_problems([index()]) == []
    for aliases in ({"head": "nowhere"}, {"w": "b"}, {"head": "other", "other": "w"}):
        assert coverage_problems([index(aliases=aliases)])
    assert coverage_problems([index(), index(record("c"), aliases={"head": "c"})])


@CALM
@given(
    sizes=st.lists(st.integers(0, 9000), max_size=40),
    limit=st.sampled_from([4096, 10_000, 50_000, 10**9]),
)
def test_each_tensor_has_a_place_of_its_own_aligned_and_inside_its_file(
    sizes: list[int], limit: int
) -> None:
    plans = plan_files(sizes, max_file_bytes=limit)
    assert sorted(position for plan in plans for position, _ in plan.places) == [*range(len(sizes))]
    for plan in plans:
        end = 0
        for position, offset in plan.places:
            assert offset >= end
            assert offset % (4096 if sizes[position] >= 4096 else 64) == 0
            end = offset + sizes[position]
        assert end <= plan.bytes < end + 4096
        assert plan.bytes % 4096 == 0
        assert plan.bytes <= limit + 4096 or len(plan.places) == 1
