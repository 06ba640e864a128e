"""Every row of the decision table: what fires it, what nearly does, and that none is left out."""

import math
import random
from collections.abc import Sequence
from typing import Any, Optional

import pytest
from health_nodes import GPUS, NOW, looks, node, signal
from hypothesis import given, settings
from hypothesis import strategies as st

from ftslurm.errors import FormatError
from ftslurm.health import signals as s
from ftslurm.health.decision_table import DECISION_TABLE, SATURATION
from ftslurm.health.history import History
from ftslurm.health.signals import Failure, Signal, normal_bus, parse_reading, reading_record
from ftslurm.health.verdict import Thresholds, Verdict
from ftslurm.health.verdicts import judge, remember
from ftslurm.health.xid_table import WORDS

PORT = "mlx5_0/1"
BOUND_S = 600.0
"""Between the baseline and the first look."""


def fired(
    rule: str, given: Sequence[Signal], before: Sequence[Signal] = (), *, times: int = 1,
    every_s: float = 60.0, model: str = "h100", context: str = "periodic",
) -> Optional[Verdict]:  # fmt: skip
    """The rule's verdict in the last of `times` looks; None where it does not hold."""
    baseline = node(model, *before, at=NOW - BOUND_S)
    readings = [node(model, *given, at=NOW + look * every_s, context=context)
                for look in range(times)]  # fmt: skip
    verdicts = [one for one in looks(readings, baseline) if one.rule == rule]
    return verdicts[0] if verdicts else None


def port(name: str, value: int) -> Signal:
    return signal(s.RDMA_COUNTER, value, None, where=f"{PORT}/{name}")


def rdma(kind: str, value: Any) -> Signal:
    return signal(kind, value, None, where=PORT)


Case = tuple[str, list[Signal], list[Signal], str, list[Signal]]


def state(rule: str, kind: str, bad: Any, word: str, good: Any, index: Optional[int] = 1) -> Case:
    return (rule, [signal(kind, bad, index)], [], word, [signal(kind, good, index)])


def rise(rule: str, kind: str, by: float, word: str) -> Case:
    """By `by` it fires; by a little less it does not, nor does a great number that stays."""
    less = by - 1 if by > 1 else 0
    return (rule, [signal(kind, 7 + by)], [signal(kind, 7)], word, [signal(kind, 7 + less)])


def counter(rule: str, name: str, by: int, word: str) -> Case:
    return (rule, [port(name, by)], [port(name, 0)], word, [port(name, by - 1)])


# Rule, the reading, its baseline, the word in the first look, a reading that is still good.
CASES: list[Case] = [
    rise("dram-uncorrectable", s.ECC_DRAM_VOLATILE_UNCORRECTED, 1, "reset"),
    rise("sram-uncorrectable", s.ECC_SRAM_VOLATILE_UNCORRECTED, 1, "reset"),
    state("sram-threshold", s.SRAM_THRESHOLD, True, "drain", False),
    state("sram-aggregate", s.ECC_SRAM_AGGREGATE_UNCORRECTED, 5, "after", 4),
    rise("dram-corrected", s.ECC_DRAM_VOLATILE_CORRECTED, 20_000_000, "warn"),
    rise("sram-corrected", s.ECC_SRAM_VOLATILE_CORRECTED, 10_000, "warn"),
    state("remap-pending", s.REMAP_PENDING, True, "reset", False),
    state("remap-failure", s.REMAP_FAILURE, True, "drain", False),
    state("remaps-many", s.REMAPS_UNCORRECTABLE, 512, "warn", 511),
    rise("remaps-new", s.REMAPS_UNCORRECTABLE, 2, "warn"),
    state("remap-banks-none", s.REMAP_BANKS_NONE, 1, "warn", 0),
    rise("remap-banks-low", s.REMAP_BANKS_LOW, 1, "warn"),
    state("unrepairable", s.UNREPAIRABLE_MEMORY, True, "drain", False),
    state("repair-pending", s.REPAIR_PENDING, True, "reset", False),
    state("retired-pages", s.RETIRED_PAGES, 63, "drain", 62),
    rise("retired-double-bit", s.RETIRED_PAGES_DOUBLE_BIT, 2, "after"),
    state("retired-pending", s.RETIRED_PAGES_PENDING, True, "reset", False),
    state("ecc-mode", s.ECC_MODE, "unknown error", "unknown", "disabled"),
    ("nvlink-down", [signal(s.NVLINK_LINKS_UP, 17)], [signal(s.NVLINK_LINKS_UP, 18)], "warn",
     [signal(s.NVLINK_LINKS_UP, 18)]),
    state("nvlink-model", s.NVLINK_LINKS_UP, 17, "warn", 18),
    rise("nvlink-replay", s.NVLINK_REPLAY, 10, "warn"),
    rise("nvlink-recovery", s.NVLINK_RECOVERY, 1, "warn"),
    rise("nvlink-recoveries", s.NVLINK_RECOVERY, 2, "after"),
    rise("nvlink-crc", s.NVLINK_CRC, 1, "warn"),
    rise("nvlink-crc-rate", s.NVLINK_CRC, 60_000, "after"),
    rise("nvlink5-malformed", s.NVLINK5_MALFORMED, 1, "after"),
    rise("nvlink5-overrun", s.NVLINK5_OVERRUN, 1, "after"),
    rise("nvlink5-integrity", s.NVLINK5_INTEGRITY, 1, "after"),
    rise("nvlink5-recovery", s.NVLINK5_RECOVERY_FAILED, 1, "drain"),
    state("nvlink5-ber", s.NVLINK5_EFFECTIVE_BER, 2e-6, "warn", 1e-6),
    state("nvlink5-symbol-ber", s.NVLINK5_SYMBOL_BER, 2e-6, "warn", 1e-9),
    state("fabric-state", s.FABRIC_STATE, "not_started", "warn", "completed"),
    state("fabric-status", s.FABRIC_STATUS, 24, "warn", 0),
    state("fabric-manager", s.FABRIC_MANAGER, "failed", "warn", "active", None),
    state("kernel-lost", s.KERNEL_LOST, True, "drain", False),
    state("gpu-lost", s.GPU_LOST, True, "drain", False),
    state("reset-required", s.RESET_REQUIRED, True, "reset", False),
    state("inforom", s.INFOROM_CORRUPTED, True, "warn", False),
    state("driver", s.NVML_UNUSABLE, 18, "unknown", 3, None),
    state("nvml-error", s.NVML_UNUSABLE, 999, "unknown", 3, None),
    state("nvml-refused", s.NVML_UNUSABLE, 4, "unknown", 999, None),
    state("nvml-answer", s.NVML_ERROR, 999, "unknown", 0, None),
    ("driver-hang", [signal(s.DRIVER_HANG, True, None)], [], "unknown",
     [signal(s.DRIVER_HANG, False, None)]),
    state("gpu-count", s.GPU_COUNT_NVML, 7, "warn", 8, None),
    state("gpu-count-pci", s.GPU_COUNT_PCI, 7, "warn", 9, None),
    state("persistence", s.PERSISTENCE_MODE, False, "warn", True),
    *((rule, [signal(s.LEFTOVER_PROCESS, 4711, where=where)], [], "warn",
       [signal(s.LEFTOVER_PROCESS, 4711, where="4711-9/elsewhere")])
      for rule, where in (("leftover", "4711-9/job"), ("leftover-outside", "4711-9/user"))),
    ("pcie-width", [signal(s.PCIE_WIDTH, 8)], [signal(s.PCIE_WIDTH, 16)], "warn",
     [signal(s.PCIE_WIDTH, 16)]),
    state("pcie-width-max", s.PCIE_WIDTH, 8, "warn", 16),
    state("pcie-gen", s.PCIE_GEN, 1, "warn", 5),
    rise("pcie-replay", s.PCIE_REPLAY, 310, "warn"),
    rise("pcie-replays", s.PCIE_REPLAY, 3100, "warn"),
    rise("aer-fatal", s.AER_FATAL, 1, "drain"),
    rise("aer-nonfatal", s.AER_NONFATAL, 1, "warn"),
    rise("aer-correctable", s.AER_CORRECTABLE, 600, "warn"),
    state("hot", s.CLOCKS_EVENT, 0x44, "warn", 0x1F),
    state("slowdown", s.CLOCKS_EVENT, 0x80, "warn", 0x57),
    state("warm", s.CLOCKS_EVENT, 0x20, "warn", 0x1F),
    state("margin", s.TEMPERATURE_MARGIN, 0, "warn", 1),
    ("memory-hot", [signal(s.MEMORY_TEMPERATURE, 96), signal(s.MEMORY_TEMPERATURE_MAX, 95)], [],
     "warn", [signal(s.MEMORY_TEMPERATURE, 95), signal(s.MEMORY_TEMPERATURE_MAX, 95)]),
    ("rdma-state", [rdma(s.RDMA_STATE, "INIT")], [rdma(s.RDMA_STATE, "ACTIVE")], "warn",
     [rdma(s.RDMA_STATE, "ACTIVE")]),
    ("rdma-phys-state", [rdma(s.RDMA_PHYS_STATE, "Polling")], [rdma(s.RDMA_PHYS_STATE, "LinkUp")],
     "warn", [rdma(s.RDMA_PHYS_STATE, "LinkUp")]),
    ("rdma-rate", [rdma(s.RDMA_RATE, 200.0)], [rdma(s.RDMA_RATE, 400.0)], "warn",
     [rdma(s.RDMA_RATE, 400.0)]),
    counter("rdma-flap", "link_downed", 1, "warn"),
    counter("rdma-flaps", "link_downed", 3, "after"),
    counter("rdma-carrier", "carrier_changes", 2, "warn"),
    counter("rdma-carriers", "carrier_changes", 10, "after"),
    counter("rdma-excessive_buffer_overrun_errors", "excessive_buffer_overrun_errors", 1, "warn"),
    counter("rdma-local_link_integrity_errors", "local_link_integrity_errors", 1, "warn"),
    counter("rdma-rnr_nak_retry_err", "rnr_nak_retry_err", 1, "warn"),
    counter("rdma-symbol", "symbol_error", 20, "warn"),
    counter("rdma-recovery", "link_error_recovery", 50, "warn"),
    counter("rdma-port_rcv_errors", "port_rcv_errors", 6000, "warn"),
    counter("rdma-port_xmit_discards", "port_xmit_discards", 60_000, "warn"),
    counter("rdma-roce_slow_restart", "roce_slow_restart", 6000, "warn"),
    counter("rdma-local_ack_timeout_err", "local_ack_timeout_err", 600, "warn"),
    counter("rdma-out_of_sequence", "out_of_sequence", 600, "warn"),
    *(state(f"mlx5-{name}", s.MLX5, name, word, "something", None)
      for name, word in (("command_timeout", "drain"), ("health", "drain"),
                         ("unrecoverable", "drain"), ("power", "warn"), ("temperature", "warn"))),
]  # fmt: skip


def test_every_row_has_its_case_its_source_and_a_short_code() -> None:
    assert sorted(case[0] for case in CASES) == sorted(row.rule for row in DECISION_TABLE)
    for row in DECISION_TABLE:
        assert row.kind in s.KINDS and row.word in WORDS and row.first in ("", *WORDS)
        assert row.source and row.date and row.meaning
        assert len(f"ftslurm:{row.code}") <= 20
        assert not (row.is_sticky and row.resumes)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_a_row_fires_and_a_little_less_does_not(case: Case) -> None:
    rule, bad, before, word, good = case
    verdict = fired(rule, bad, before)
    assert verdict is not None and verdict.word == word
    assert fired(rule, good, before) is None
    row = next(row for row in DECISION_TABLE if row.rule == rule)
    assert verdict.code == row.code and row.source in verdict.source
    assert verdict.sticky == (row.is_sticky and word == row.word)
    assert not (verdict.sticky and verdict.auto_resume)


# Rows that drain only when they last: the last look that does not yet, the first that does.
LASTING = {
    "ecc-mode": (1, 2, 60.0), "nvlink-model": (1, 2, 30.0), "fabric-state": (3, 4, 60.0),
    "nvlink-down": (1, 2, 30.0), "fabric-status": (3, 4, 60.0), "leftover": (2, 3, 60.0),
    "fabric-manager": (3, 4, 60.0), "driver": (1, 2, 60.0), "nvml-error": (1, 2, 60.0),
    "driver-hang": (1, 2, 60.0), "pcie-width": (1, 2, 60.0), "pcie-gen": (1, 2, 60.0),
    "hot": (10, 11, 60.0), "slowdown": (2, 3, 300.0), "margin": (5, 6, 60.0),
    "memory-hot": (5, 6, 60.0), "rdma-state": (4, 5, 60.0), "rdma-phys-state": (4, 5, 60.0),
    "rdma-rate": (1, 2, 60.0), "gpu-count": (1, 2, 3.0), "gpu-count-pci": (1, 2, 3.0),
}  # fmt: skip


@pytest.mark.parametrize("rule", LASTING)
def test_a_row_that_needs_time_drains_when_it_has_had_it(rule: str) -> None:
    not_yet, enough, every_s = LASTING[rule]
    _, bad, before, word, _ = next(case for case in CASES if case[0] == rule)
    row = next(row for row in DECISION_TABLE if row.rule == rule)
    early = fired(rule, bad, before, times=not_yet, every_s=every_s)
    late = fired(rule, bad, before, times=enough, every_s=every_s)
    assert early is not None and early.word == word and "not for long enough" in early.sentence
    assert late is not None and late.word == row.word


def test_a_rise_counts_again_only_where_it_rises_again() -> None:
    def counted(values: list[int], *, moving: bool) -> list[str]:
        history, words = History(), []
        baseline = node("h100", port("rnr_nak_retry_err", values[0]), at=NOW - 60)
        for look, value in enumerate(values[1:]):
            reading = node("h100", port("rnr_nak_retry_err", value), at=NOW + 60 * look)
            verdicts = judge(reading, baseline=baseline, history=history)
            history = remember(history, reading, verdicts, baseline=baseline)
            words += [one.word for one in verdicts if one.code == "IB-ERRORS"]
            baseline = reading if moving else baseline
        return words

    assert counted([0, 1, 1, 1], moving=False) == ["warn"] * 3
    assert counted([0, 1, 2], moving=True) == ["warn", "after"]
    assert counted([0, 1, 1, 2], moving=True) == ["warn", "warn"]


def test_a_prolog_does_not_wait_four_minutes_for_a_port() -> None:
    down, up = [rdma(s.RDMA_STATE, "DOWN")], [rdma(s.RDMA_STATE, "ACTIVE")]
    for context, word in (("prolog", "drain"), ("epilog", "drain"), ("periodic", "warn")):
        verdict = fired("rdma-state", down, up, times=2, every_s=10.0, context=context)
        assert verdict is not None and verdict.word == word


def test_a_hang_beside_an_xid_of_the_driver_does_not_wait_for_a_second_look() -> None:
    hang = signal(s.DRIVER_HANG, True, None)
    for number, word in ((119, "drain"), (79, "drain"), (62, "drain"), (31, "unknown")):
        verdict = fired("driver-hang", [hang, signal(s.XID, number)])
        assert verdict is not None and verdict.word == word


def test_a_baseline_of_another_boot_is_none() -> None:
    for kind, word in ((s.ECC_DRAM_VOLATILE_UNCORRECTED, "warn"), (s.NVLINK_RECOVERY, None)):
        baseline = node("h100", signal(kind, 0), boot_id="boot-0", at=NOW - 60)
        reading = node("h100", signal(kind, 5))
        verdicts = judge(reading, baseline=baseline, history=History())
        assert [one.word for one in verdicts if one.signals[0].kind == kind] == [word] * bool(word)


def test_a_counter_that_began_anew_has_risen_by_what_it_says() -> None:
    kind = s.ECC_DRAM_VOLATILE_UNCORRECTED
    assert fired("dram-uncorrectable", [signal(kind, 2)], [signal(kind, 9)]) is not None
    assert fired("dram-uncorrectable", [signal(kind, 0)], [signal(kind, 9)]) is None


@pytest.mark.parametrize(("name", "cap"), SATURATION.items())
def test_a_counter_at_its_cap_cannot_tell(name: str, cap: int) -> None:
    rules = [row.rule for row in DECISION_TABLE if row.where == name]
    for rule in rules:
        stuck = fired(rule, [port(name, cap)], [port(name, cap)], times=5)
        assert stuck is not None and stuck.word == "unknown" and f"stays at {cap}" in stuck.sentence
        assert fired(rule, [port(name, cap - 1)], [port(name, cap - 1)]) is None
    assert rules


def test_flaps_over_more_than_half_a_day_are_fewer() -> None:
    reading = node("h100", port("link_downed", 3))
    for hours, word in ((3, "after"), (40, "warn")):
        baseline = node("h100", port("link_downed", 0), at=NOW - hours * 3600)
        verdicts = judge(reading, baseline=baseline, history=History())
        assert [one.word for one in verdicts if one.code == "IB-FLAP"][0] == word


def test_a_nic_that_is_gone_drains_after_three_looks() -> None:
    baseline = node("h100", rdma(s.RDMA_STATE, "ACTIVE"), at=NOW - 60)

    def word(times: int, **more: Any) -> list[str]:
        readings = [node("h100", at=NOW + 60 * look, **more) for look in range(times)]
        return [one.word for one in looks(readings, baseline) if one.code == "NIC-GONE"]

    assert [word(times) for times in (1, 2, 3)] == [["warn"], ["warn"], ["drain"]]
    assert word(9, failures=[Failure("sysfs", "it does not answer")]) == []


def test_nvlink_is_not_looked_at_under_mig() -> None:
    links = [signal(s.NVLINK_LINKS_UP, 0), signal(s.NVLINK_LINKS_MODEL, 18)]
    before = [signal(s.NVLINK_LINKS_UP, 18)]
    assert fired("nvlink-down", links, before, model="h100") is not None
    for rule in ("nvlink-down", "nvlink-model"):
        assert fired(rule, links, before, model="mig", times=3) is None


def test_a_site_may_move_a_bound_and_switch_a_row_off() -> None:
    reading = node("h100", signal(s.REMAPS_UNCORRECTABLE, 100))

    def codes(**site: Any) -> list[str]:
        thresholds = Thresholds(**site)
        verdicts = judge(reading, baseline=None, history=History(), thresholds=thresholds)
        return [one.code for one in verdicts if one.rule == "remaps-many"]

    assert codes() == []
    assert codes(limits={"remaps-many": 100}) == ["REMAPS"]
    assert codes(limits={"remaps-many": 100}, off=frozenset({"remaps-many"})) == []


VALUES = st.one_of(st.text(max_size=12), st.booleans(), st.none().map(lambda _: math.nan),
                   st.integers(-(2**70), 2**70), st.floats())  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(s.KINDS)), VALUES, VALUES, st.text(max_size=40)),
                max_size=8))  # fmt: skip
def test_judging_never_raises(things: list[tuple[str, Any, Any, str]]) -> None:
    given = [Signal(kind, value, GPUS[0], text=text, baseline=before, where=text)
             for kind, value, before, text in things]  # fmt: skip
    reading = node("h100", *given)
    verdicts = judge(reading, baseline=node("h100", *given, at=NOW - 60), history=History())
    remember(History(), reading, verdicts, baseline=None)


def test_a_text_in_place_of_a_number_drains_nothing() -> None:
    chance = random.Random(3)
    words = ("[N/A]", "N/A", "[Not Supported]", "", "ERR!", "unknown", "nan", "7 %")
    states = {s.ECC_MODE, s.FABRIC_MANAGER, s.RDMA_STATE, s.RDMA_PHYS_STATE}
    for kind in sorted(s.KINDS - states):
        reading = node("h100", signal(kind, chance.choice(words)))
        found = judge(reading, baseline=node("h100", at=NOW - 60), history=History())
        assert not [one for one in found if one.word in ("drain", "after", "reset")], kind


@pytest.mark.parametrize(
    ("text", "bus"),
    [
        ("00000000:1B:00.0", "0000:1b:00"),
        ("0000:9b:00", "0000:9b:00"),
        ("9B:00.0", "0000:9b:00"),
        ("0019:01:00", "0019:01:00"),
        ("", ""),
        ("GPU 1", ""),
        ("0000:9b:00.0 trailing", ""),
    ],
)
def test_a_bus_has_one_form(text: str, bus: str) -> None:
    assert normal_bus(text) == bus


def test_a_reading_survives_its_file_and_a_torn_one_is_told() -> None:
    reading = node("h100", signal(s.XID, 79, text="x"), failures=[Failure("nvml", "y")])
    record = reading_record(reading)
    assert parse_reading(record) == reading
    bad_kind = {**record, "signals": [{**record["signals"][0], "kind": "magic"}]}
    bad_value = {**record, "signals": [{**record["signals"][0], "value": [1]}]}
    for torn in (
        {},
        {**record, "gpus": 3},
        {**record, "more": 1},
        bad_kind,
        bad_value,
        {**record, "at": "now"},
        {**record, "boot_id": None},
    ):
        with pytest.raises(FormatError, match="cannot be read"):
            parse_reading(torn)
