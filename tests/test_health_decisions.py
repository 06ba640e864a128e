"""Judgements that a second look has settled: what may drain though it need not, and what never may.

The source of each is named in the table or at the rule that makes it.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes.nvml import nodes
from health_nodes import GPUS, NOW, looks, node, signal, xid

from ftslurm.health import signals as s
from ftslurm.health.history import History, Past
from ftslurm.health.kernel_log import Cursor, read_new
from ftslurm.health.nvml_read import read_nvml
from ftslurm.health.signals import Reading, Signal
from ftslurm.health.verdict import HARD, Verdict
from ftslurm.health.verdicts import judge, remember
from ftslurm.health.verdicts_nvlink import by_registers
from ftslurm.health.xid_table import NVLINK4_BITS

HANDLE = "nvmlDeviceGetHandleByIndex_v2"


def words(verdicts: Sequence[Verdict], code: str) -> list[str]:
    return [one.word for one in verdicts if one.code == code]


@pytest.mark.parametrize(
    ("call", "drains"),
    [
        ("nvmlDeviceGetRemappedRows", False),
        ("nvmlDeviceGetGpuFabricInfoV", False),
        ("nvmlDeviceGetMarginTemperature", False),
        ("nvmlDeviceGetPciInfo_v3", False),
        ("nvmlDeviceGetNvLinkState", False),
        (HANDLE, True),
        ("nvmlInit_v2", True),
        ("nvmlDeviceGetCount_v2", True),
    ],
)
def test_a_driver_that_never_answers_one_call_is_kept_unless_nothing_works_without_it(
    call: str, drains: bool, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(nodes.STATE_VARIABLE, str(tmp_path / "state"))
    fake = nodes.Node(tmp_path / "state", gpus=2)
    fake.set("*", f"code:{call}", 999)
    parts = read_nvml(deadline_s=60, library=library)
    assert 999 in [one.value for one in parts.signals]
    count = Signal(s.GPU_COUNT_PCI, 2)
    readings = [
        Reading("b", "n", "periodic", NOW + 60 * look, tuple(parts.gpus), (count, *parts.signals))
        for look in range(6)
    ]
    assert any(one.word in HARD for one in looks(readings, readings[0])) == drains


@pytest.mark.parametrize(
    ("number", "before", "behind"),
    [(48, "drain", "warn"), (79, "drain", "warn"), (95, "drain", "warn"), (119, "drain", "warn"),
     (62, "warn", "warn"), (109, "warn", "warn"), (168, "warn", "warn"), (54, "drain", "drain")],
)  # fmt: skip
def test_action_none_clears_a_reset_by_nvml_and_a_drain_only_by_a_change(
    number: int, before: str, behind: str
) -> None:
    by_nvml = judge(node("h100", xid(number)), baseline=None, history=History())
    assert words(by_nvml, f"XID{number}") == [before]
    changed = xid(154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")
    by_log = judge(node("a100", xid(number), changed), baseline=None, history=History())
    assert words(by_log, f"XID{number}") == [behind]


def again(number: int, users: Sequence[str], *, everywhere: bool = False, text: str = "") -> str:
    """The word of the last of several jobs that have met the same Xid on GPU 1."""
    buses = ("1b", "43", "52") if everywhere else ("43",)
    xids = [xid(number, text, bus=bus) for bus in buses]
    readings = [
        node("h100", *xids, at=NOW + 600 * look, job=str(look), user=user)
        for look, user in enumerate(users)
    ]
    (word,) = {one.word for one in looks(readings, None) if one.gpu == GPUS[1]} - {"ignore"}
    return word


UNIT = "Graphics SM Warp Exception on (GPC 1, TPC 3, SM 0): Illegal Address"


@pytest.mark.parametrize(("number", "text"), [(13, UNIT), (31, ""), (32, "")])
def test_a_programs_xid_comes_to_be_the_gpus_over_two_users_and_on_no_other_gpu(
    number: int, text: str
) -> None:
    assert again(number, ["alice"] * 9, text=text) == "warn"
    assert again(number, ["alice", "bob", "alice"], text=text) == "after"
    assert again(number, ["alice", "bob", "alice"], text=text, everywhere=True) == "warn"
    assert again(number, ["alice", "", ""], text=text) == "warn", "nobody is no second user"


def test_another_gpu_with_fewer_faults_hides_nothing() -> None:
    past = [Past("XID31", NOW - 60, bus=GPUS[index].bus, user="bob") for index in (1, 1, 5)]
    verdicts = judge(node("h100", xid(31)), baseline=None, history=History(tuple(past)))
    assert words(verdicts, "XID31") == ["after"]


def test_the_drivers_own_xid_repeats_whoever_runs_and_wherever() -> None:
    assert again(121, ["", ""], everywhere=True) == "after"


# Of the seven registers of an Xid 74, counted from 1, the bits that do not drain.
MILD_BITS = {
    **dict.fromkeys(((1, bit) for bit in (0, 23, 30)), "ignore"),
    **dict.fromkeys(((1, bit) for bit in (1, 20)), "warn"),
    **dict.fromkeys(((4, bit) for bit in (16, 17)), "warn"),
    (4, 18): "reset",
    **dict.fromkeys(((5, bit) for bit in (20, 23, 26, 29)), "warn"),
}


@pytest.mark.parametrize("number", range(1, 8))
def test_each_bit_of_an_xid_74_has_its_word(number: int) -> None:
    for bit in range(32):
        registers = ", ".join(hex(1 << bit) if one == number else "0x0" for one in range(1, 8))
        word, names = by_registers(f"NVLink: fatal error detected on link 3({registers})")
        assert word == MILD_BITS.get((number, bit), "drain"), bit
        assert bool(names) == any(number == row[0] and bit in row[1] for row in NVLINK4_BITS), (
            "a bit that a row knows is named"
        )


def hot(minutes: Sequence[float], cool: Sequence[float] = ()) -> str:
    """The word of the last look of a GPU that slows down for its heat but for `cool`."""
    readings = [
        node("h100", signal(s.CLOCKS_EVENT, 0x4 if minute in cool else 0x40), at=NOW + 60 * minute)
        for minute in minutes
    ]
    return words(looks(readings, None), "HOT")[0]


def test_heat_drains_after_ten_minutes_in_a_row() -> None:
    assert hot([0, 5, 10]) == "after"
    assert hot([0, 5, 9]) == "warn"
    assert hot([0, 10]) == "warn", "two looks are too few"
    assert hot([0, 5, 10, 15], cool=[5]) == "warn", "in a row"
    assert hot([0, 5, 10, 15, 20], cool=[5]) == "after"


def test_time_that_nobody_looked_in_is_no_time_in_a_row() -> None:
    assert hot([0, 5, 65]) == "warn"
    assert hot([0, 5, 65, 70, 75]) == "after"


@pytest.mark.parametrize("jump_s", [-86400.0, -300.0, 7200.0, 40 * 365 * 86400.0])
def test_a_jump_of_the_clock_makes_nothing_last(jump_s: float) -> None:
    down = Signal(s.RDMA_STATE, "DOWN", where="mlx5_0/1")
    up = Signal(s.RDMA_STATE, "ACTIVE", where="mlx5_0/1")
    heat = signal(s.CLOCKS_EVENT, 0x40)
    baseline = node("h100", up, at=NOW - 60)

    def last(times: Sequence[float]) -> set[str]:
        readings = [node("h100", down, heat, at=at, context="periodic") for at in times]
        return {one.code for one in looks(readings, baseline) if one.word in HARD}

    assert last([NOW, NOW + 30, NOW + 60 + jump_s]) == set()
    jumped = NOW + 60 + jump_s
    assert last([NOW, NOW + 30, *(jumped + 60 * look for look in range(11))]) == {"IB-DOWN", "HOT"}


def test_a_clock_set_back_gives_no_rate() -> None:
    baseline = node("h100", signal(s.PCIE_REPLAY, 0), at=NOW)
    for at, expected in ((NOW + 3600, []), (NOW - 3600, []), (NOW + 60, ["warn"])):
        reading = node("h100", signal(s.PCIE_REPLAY, 300), at=at)
        verdicts = judge(reading, baseline=baseline, history=History())
        assert words(verdicts, "PCIE-RPLY") == expected


def test_what_the_clock_once_called_the_future_has_not_come_before() -> None:
    past = [Past("XID31", NOW + 86400, bus=GPUS[1].bus, user="bob")] * 3
    verdicts = judge(node("h100", xid(31)), baseline=None, history=History(tuple(past)))
    assert words(verdicts, "XID31") == ["warn"]


def test_a_streak_ends_with_the_boot() -> None:
    heat = signal(s.CLOCKS_EVENT, 0x40)
    readings = [node("h100", heat, at=NOW + 300 * look, boot_id=f"boot-{look // 2}")
                for look in range(4)]  # fmt: skip
    assert words(looks(readings, None), "HOT") == ["warn"]


def test_the_number_of_a_kmsg_record_is_of_its_boot() -> None:
    """/dev/null is a character device as /dev/kmsg is, and has no records."""
    for boot_id, seq in (("boot-1", 700), ("boot-2", -1)):
        new = read_new(Path("/dev/null"), Cursor("boot-1", seq=700), boot_id=boot_id)
        assert new.cursor == Cursor(boot_id, seq=seq) and not new.failures


def test_a_process_that_is_just_ending_is_no_leftover() -> None:
    ending = signal(s.LEFTOVER_PROCESS, 4711, where="4711-9/job")
    other = signal(s.LEFTOVER_PROCESS, 4711, where="4711-12/job")
    cases = ((other, 120, "warn"), (ending, 60, "warn"), (ending, 120, "drain"))
    for first, every_s, word in cases:
        readings = [node("h100", first), node("h100", ending, at=NOW + every_s)]
        assert words(looks(readings, None), "LEFTOVER") == [word]


def test_only_nvml_escalates_from_could_not_tell() -> None:
    for source in ("nvml", "kernel_log", "sysfs", "nvidia_smi", "dcgm"):
        failure = s.Failure(source, "no answer")
        readings = [node("h100", at=NOW + 60 * look, failures=[failure]) for look in range(20)]
        history, seen = History(), []
        for reading in readings:
            verdicts = judge(reading, baseline=None, history=history)
            history = remember(history, reading, verdicts, baseline=None)
            seen.append(verdicts[0].word)
        expected = ["unknown"] * 2 + ["drain"] * 18 if source == "nvml" else ["unknown"] * 20
        assert seen == expected
