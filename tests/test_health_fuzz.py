"""Every parser of a node's health on what is no output at all, and on spoilt output.

None raises, and none makes a drain of it: neither of garbage, nor of what a good node has said and
a full disk, a cut pipe or another writer has spoilt.
"""

import contextlib
import copy
import math
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from health_inputs import INPUTS, RECORDS, Input, damaged, garbled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftslurm.errors import FormatError
from ftslurm.health.node_state import may_drain, parse_listing, parse_node

HINTS = (b"NVRM:", b"Xid (", b"SXid", b"fallen off", b"mlx5_core", b"rror", b"severity=", b"Fatal",
         b"<gpu", b"</nvidia_smi_log>", b"GPU is lost", b"Pending : Yes", b"Yes", b"[N/A]", b" : ",
         b"Link 3: <inactive>", b'{"signals": ', b'"gpu_lost"', b"true", b"null", b"1e999", b"\xff",
         b"4: DOWN", b"0x0302", b"Linux version ", b"\n", b"\0", b"    ")  # fmt: skip
GARBAGE = st.one_of(
    st.binary(max_size=300),
    st.text(max_size=200).map(str.encode),
    st.lists(st.one_of(st.sampled_from(HINTS), st.binary(max_size=9)), max_size=30).map(b"".join),
)
FEW = settings(
    max_examples=60, deadline=None, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip

SILENT = ("nvidia-smi says", "history", "cursor", "settings", "report", "drain record")
"""These give no signals of a good node."""

each_parser = pytest.mark.parametrize("name", INPUTS)


@each_parser
def test_what_a_good_node_gives_is_read_and_drains_nothing(name: str) -> None:
    reader = INPUTS[name]
    told = [bool(reader.parse(healthy)) for healthy in reader.healthy]
    assert any(told) or name in SILENT
    assert not any(reader.drains(one, before=one) for one in reader.healthy)


@each_parser
@FEW
@given(data=GARBAGE)
def test_garbage_drains_nothing(name: str, data: bytes) -> None:
    assert not INPUTS[name].drains(data)


@each_parser
@FEW
@given(seed=st.integers(0, 2**32))
def test_spoilt_output_drains_nothing(name: str, seed: int) -> None:
    spoil(INPUTS[name], seed, 3)


def spoil(reader: Input, seed: int, times: int) -> None:
    """`times` inputs: of each three, two are what damage leaves, one says anything at all."""
    chance = random.Random(seed)
    for turn in range(times):
        healthy = chance.choice(reader.healthy)
        if turn % 3 == 2:
            reader.parse(garbled(chance, healthy, chance.choice(reader.healthy)))
        else:
            data = damaged(chance, healthy, reader.spoil)
            assert not reader.drains(data, before=healthy), data


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**400), 10**400), st.floats(), st.text(max_size=9),
    st.sampled_from([[], {}, [[]], {"a": 1}, math.inf, math.nan, 10**400]),
)  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
@FEW
@given(place=st.integers(0, 10_000), thing=ANYTHING)
def test_a_stored_record_with_anything_in_one_place_is_used_or_refused(
    name: str, place: int, thing: Any
) -> None:
    use, whole, _ = RECORDS[name]
    record = copy.deepcopy(whole)
    places = list(leaves(record))
    holder, key = places[place % len(places)]
    holder[key] = thing
    with contextlib.suppress(FormatError):
        use(record)


def leaves(record: Any) -> Iterator[tuple[Any, Any]]:
    """Each place of a record that holds a value, as holder and key."""
    keys = record if isinstance(record, dict) else range(len(record))
    for key in keys:
        yield record, key
        if isinstance(record[key], (dict, list)):
            yield from leaves(record[key])


BATCH = 100


def batches(reader: Input, count: int) -> int:
    """Inputs of that many batches."""
    done = 0

    @settings(FEW, max_examples=count)
    @given(seed=st.integers(0, 2**64))
    def one(seed: int) -> None:
        nonlocal done
        spoil(reader, seed, BATCH)
        done += BATCH

    one()
    return done


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_a_million_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    done, began_s = 0, time.process_time()
    for name, reader in INPUTS.items():
        began_one_s = time.process_time()
        of_one = batches(reader, reader.per_million // BATCH)
        done += of_one
        with capsys.disabled():
            rate = of_one / (time.process_time() - began_one_s)
            print(f"\n{name}: {of_one} inputs, {rate:.0f} a second of CPU", end="")
    took_s = time.process_time() - began_s
    with capsys.disabled():
        print(f"\nfuzz: {done} inputs in {took_s:.0f} s of CPU, {done / took_s:.0f} a second")
    assert done >= 1_000_000


# What Slurm says of a node, and who holds it.

HELD = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=8\n   CPUAlloc=0 CPUTot=16 CPULoad=0.01\n"
    "   State=IDLE+DRAIN ThreadsPerCore=2 TmpDisk=0 Weight=1 Owner=N/A\n   Partitions=batch\n"
    "   Reason=broken fan [alice@2026-09-01T10:00:00]\n\n"
)


def stays_theirs(text: str) -> None:
    try:
        may, why = may_drain(parse_node(text, "n1"), is_worse=True)
    except FormatError:
        return
    assert not may and why, text


def test_what_slurm_says_of_an_administrators_node_cut_anywhere_makes_it_not_ours() -> None:
    for end in range(len(HELD)):
        stays_theirs(HELD[:end])


@FEW
@given(st.text(max_size=200))
def test_no_text_of_slurm_makes_a_node_ours(text: str) -> None:
    stays_theirs(text)


@FEW
@given(
    st.text(max_size=300), st.lists(st.text(alphabet="|n1:gpuftslurm XID79-2026T\n", max_size=80))
)
def test_no_listing_of_slurm_raises(text: str, lines: list[str]) -> None:
    for one in (text, "\n".join(lines)):
        try:
            assert parse_listing(one).gpu_nodes >= 0
        except FormatError:
            continue
