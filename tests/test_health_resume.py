"""When a drain of ours is lifted: each rule alone, on a drain that would be lifted but for it."""

from dataclasses import replace

import pytest
from health_nodes import GPUS, NOW
from hypothesis import given
from hypothesis import strategies as st
from test_health_node_state import VERSIONS, read, states

from ftslurm.health.decision_table import DECISION_TABLE
from ftslurm.health.restored import BY_BASELINE, Had, lacking
from ftslurm.health.resume import (
    Drains,
    OwnDrain,
    causes_of,
    drains_record,
    ended,
    is_worse,
    may_resume,
    parse_drains,
    still_ours,
    with_causes,
    with_look,
)
from ftslurm.health.settings import HealthSettings
from ftslurm.health.signals import Reading, Signal
from ftslurm.health.verdict import Verdict
from ftslurm.health.xid_table import XID_TABLE

SITE = HealthSettings()
DAY_S = 86400.0
OURS = "ftslurm:DRV-HANG boot=boot1 2026-09-21T14:13:20Z"
OLD, NEW = "boot-1", "boot-2"
HAD = (Had("gpu_count_pci", "", None, "", 8.0), Had("rdma_state", "", None, "mlx5_0/1", "ACTIVE"))


def verdict(code: str = "DRV-HANG", rule: str = "driver-hang", **rest: object) -> Verdict:
    given = {"word": "drain", "gpu": GPUS[1], "needs": "reboot", "auto_resume": True, **rest}
    return Verdict(code=code, rule=rule, sentence="sick", source="test", **given)


def memory(*verdicts: Verdict, boot_id: str = OLD, **rest: object) -> Drains:
    """Of a node drained an hour ago and found healthy three times since, in a new boot."""
    passes = (NOW - 180, NOW - 120, NOW - 60)
    causes = causes_of(verdicts or (verdict(),), boot_id)
    drain = OwnDrain(
        "n1", OURS, NOW - 3600, causes, is_counted=True, passes=passes, passes_boot=NEW, had=HAD
    )  # fmt: skip
    return Drains(**{"drain": drain, **rest})


def resumes(found: Drains, *, boot_id: str = NEW, site=SITE) -> bool:
    may, why = may_resume(found, boot_id=boot_id, settings=site, now=NOW)
    assert bool(why) != may
    return may


def test_a_node_that_has_rebooted_and_is_healthy_since_is_lifted() -> None:
    assert resumes(memory())


def test_the_site_can_switch_it_off() -> None:
    assert not resumes(memory(), site=HealthSettings(resume=False))


def test_there_has_to_be_a_drain_of_ours_with_a_known_cause() -> None:
    assert not resumes(Drains())
    assert not resumes(Drains(drain=replace(memory().drain, causes=())))


def test_a_reboot_is_waited_for() -> None:
    assert not resumes(memory(boot_id=NEW))


def test_a_fault_that_is_back_after_the_reboot_waits_for_the_next_one() -> None:
    again = with_causes(memory().drain, causes_of([verdict()], NEW))
    again = replace(again, passes=memory().drain.passes, passes_boot=NEW)
    assert not resumes(Drains(drain=again))


def test_what_needs_a_reset_waits_for_a_reboot_which_is_one() -> None:
    hung = verdict("XID119", "xid-119", needs="reset")
    assert not resumes(memory(hung, boot_id=NEW))
    assert resumes(memory(hung, boot_id=OLD))


def test_what_shows_only_at_work_is_not_lifted_by_the_silence_of_an_idle_node() -> None:
    for told in (
        verdict("IB-FLAP", "rdma-flaps", word="after", needs="", gpu=None),
        verdict("IB-ERRORS", "rdma-symbol", word="after", needs="", gpu=None),
        verdict("XID31", "xid-31", word="after", needs=""),
        verdict("XID121", "xid-121", word="after", needs=""),
        verdict("TREND", "trend", word="after", needs=""),
    ):
        assert not resumes(memory(told)), told.rule


def test_what_only_an_epilog_looks_for_waits_for_a_reboot() -> None:
    rows = [row for row in DECISION_TABLE if row.kind == "leftover_process" and row.word == "drain"]
    assert rows
    for row in rows:
        left = verdict(row.code, row.rule, needs=row.needs)
        assert not resumes(memory(left, boot_id=NEW))
        assert resumes(memory(left, boot_id=OLD))


def test_two_ports_of_one_node_are_two_causes() -> None:
    ports = [
        verdict("IB-DOWN", "rdma-state", needs="", gpu=None,
                signals=(Signal("rdma_state", "DOWN", where=where),))
        for where in ("mlx5_0/1", "mlx5_1/1")
    ]  # fmt: skip
    found = with_causes(memory(ports[0]).drain, causes_of(ports[1:], NEW))
    assert [cause.key[-8:] for cause in found.causes] == ["mlx5_0/1", "mlx5_1/1"]


def test_the_end_of_the_signal_is_enough_where_nothing_else_is_needed() -> None:
    port = verdict("IB-DOWN", "rdma-state", needs="", gpu=None)
    assert resumes(memory(port, boot_id=NEW))


def test_what_is_sticky_or_needs_repair_is_never_lifted() -> None:
    assert not resumes(memory(verdict(sticky=True)))
    assert not resumes(memory(verdict(auto_resume=False)))
    assert not resumes(memory(verdict(needs="repair")))
    assert not resumes(memory(verdict(needs="a word of a later version")))


@pytest.mark.parametrize("row", [row for row in DECISION_TABLE if row.is_sticky or row.needs])
def test_no_sticky_row_and_no_memory_or_nvlink_row_is_lifted(row) -> None:
    """As judged by the table itself, for a node that has done everything else."""
    told = verdict(row.code, row.rule, word=row.word, needs=row.needs, sticky=row.is_sticky,
                   auto_resume=not row.is_sticky and row.needs != "repair")  # fmt: skip
    is_bus = row.kind.startswith(("pcie", "aer", "gpu_count", "gpu_lost", "kernel_lost", "mlx5"))
    is_driver = row.rule in ("driver-hang", "leftover")
    if row.word in ("drain", "reset", "after"):
        assert resumes(memory(told)) == (is_bus or is_driver), row.rule


@pytest.mark.parametrize("xid", [48, 54, 63, 64, 74, 94, 95, 140, 144, 149, 155, 171])
def test_an_xid_of_memory_or_nvlink_waits_for_a_test_under_load(xid: int) -> None:
    (row,) = [row for row in XID_TABLE if xid in row.xids]
    told = verdict(f"XID{xid}", f"xid-{xid}", needs=row.needs, sticky=row.is_sticky)
    assert not resumes(memory(told))


def test_all_of_the_reset_class_waits_for_a_test_under_load() -> None:
    assert not resumes(memory(verdict("XID62", "xid-62", word="reset", needs="reset")))


def test_one_cause_of_many_that_stays_keeps_the_node() -> None:
    assert not resumes(memory(verdict(), verdict("REMAP-FAIL", "remap-failure", sticky=True)))


def test_three_passes_of_this_boot_are_needed() -> None:
    drain = memory().drain
    assert not resumes(Drains(drain=replace(drain, passes=drain.passes[:2])))
    assert not resumes(Drains(drain=replace(drain, passes_boot=OLD)))
    assert resumes(Drains(drain=replace(drain, passes=drain.passes[:2])), site=two_passes())


def two_passes() -> HealthSettings:
    return HealthSettings(resume_passes=2)


def look(drain: OwnDrain, at: float, *verdicts: Verdict, boot_id: str = NEW) -> OwnDrain:
    return with_look(replace(drain, had=()), verdicts, None, at=at, boot_id=boot_id, gap_s=60.0)


def test_passes_count_a_minute_apart_in_a_row_and_in_one_boot() -> None:
    drain = replace(memory().drain, passes=())
    for at in (0, 30, 59, 60, 61, 125):
        drain = look(drain, NOW + at)
    assert drain.passes == (NOW, NOW + 60, NOW + 125)
    assert look(drain, NOW + 125).passes == drain.passes, "one look is one pass"
    assert look(drain, NOW + 200, boot_id="boot-3").passes == (NOW + 200,)
    assert look(drain, NOW - 500).passes == (NOW - 500,), "the clock was set back"
    warned = verdict(word="warn", needs="")
    assert look(drain, NOW + 200, warned).passes == (*drain.passes, NOW + 200)


def test_a_look_that_could_not_tell_or_found_it_sick_begins_the_row_anew() -> None:
    drain = memory().drain
    assert look(drain, NOW, verdict(word="unknown", needs="")).passes == ()
    assert with_causes(drain, causes_of([verdict()], NEW)).passes == ()


def test_a_look_that_has_not_read_what_was_there_as_good_as_it_was_is_no_pass() -> None:
    def read(*values: tuple[str, object, str]) -> Reading:
        signals = tuple(Signal(kind, value, where=where) for kind, value, where in values)
        return Reading(NEW, "n1", "periodic", NOW, signals=signals)

    gpus, port = ("gpu_count_pci", 8, ""), ("rdma_state", "ACTIVE", "mlx5_0/1")
    drain = replace(memory().drain, passes=())

    def passes(reading) -> int:
        return len(with_look(drain, (), reading, at=NOW, boot_id=NEW, gap_s=60.0).passes)

    assert passes(read(gpus, port)) == 1
    assert passes(read(("gpu_count_pci", 9, ""), port)) == 1
    for less in (
        read(("gpu_count_pci", 7, ""), port), read(gpus, ("rdma_state", "DOWN", "mlx5_0/1")),
        read(gpus), read(port), read(gpus, ("rdma_state", "ACTIVE", "mlx5_1/1")), None,
    ):  # fmt: skip
        assert passes(less) == 0, lacking(HAD, less)


def test_every_rule_that_compares_with_before_is_known() -> None:
    """Of the table by its test, and the one that is no row of it."""
    assert {"rdma-state", "rdma-rate", "pcie-width", "nvlink-down", "nic-missing"} <= BY_BASELINE


def test_two_a_week_are_lifted_and_no_more() -> None:
    assert resumes(memory(resumes=(NOW - DAY_S,)))
    assert not resumes(memory(resumes=(NOW - DAY_S, NOW - 2 * DAY_S)))
    assert resumes(memory(resumes=(NOW - DAY_S, NOW - 8 * DAY_S)))


def test_the_same_gpu_for_the_second_time_in_a_fortnight_stays() -> None:
    place = GPUS[1].place
    assert not resumes(memory(earlier=((NOW - 13 * DAY_S, place),)))
    assert resumes(memory(earlier=((NOW - 15 * DAY_S, place),)))
    assert resumes(memory(earlier=((NOW - 13 * DAY_S, GPUS[2].place),)))
    port = verdict("IB-DOWN", "rdma-state", needs="", gpu=None)
    assert resumes(memory(port, earlier=((NOW - DAY_S, ""),))), "its end is enough"


def test_what_is_over_is_remembered_for_the_next_drain() -> None:
    over = ended(memory(resumes=(NOW - 8 * DAY_S,)), now=NOW, is_by_us=True)
    assert over == Drains(None, (NOW,), ((NOW - 3600, GPUS[1].place),))
    by_person = ended(memory(), now=NOW, is_by_us=False)
    assert by_person == Drains(None, (), ((NOW - 3600, GPUS[1].place),))


def test_a_worse_verdict_is_worse_than_all_that_is_known() -> None:
    mild = memory(verdict("PCIE-WIDTH", "pcie-width", word="after")).drain
    reset, drain = verdict(word="reset"), verdict()
    assert is_worse(causes_of([reset], NEW), mild)
    assert is_worse(causes_of([drain], NEW), mild)
    assert not is_worse(causes_of([drain], NEW), memory(drain).drain)
    assert is_worse(causes_of([verdict(sticky=True)], NEW), memory(drain).drain)
    assert not is_worse(causes_of([reset], NEW), memory(drain).drain)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_stands_has_to_be_this_very_drain_in_every_state(version: str) -> None:
    drain = memory().drain
    lifted = {state for state in states(version) if still_ours(drain, read(state, OURS))[0]}
    assert lifted
    for state in lifted:
        base, *flags = state.split("+")
        assert base in ("IDLE", "ALLOCATED", "MIXED")
        assert "DRAIN" in flags
        assert not set(flags) & {"NOT_RESPONDING", "FAIL", "MAINTENANCE", "REBOOT_ISSUED"}
    for state in states(version):
        for reason, by in (
            ("fan", "root"),
            (OURS, "alice"),
            (OURS + " ", "bob"),
            ("", ""),
            ("ftslurm:DRV-HANG boot=boot1 2026-09-22T00:00:00Z", "root"),
        ):
            assert not still_ours(drain, read(state, reason, by))[0], (state, reason)


def test_memory_goes_to_its_record_and_back() -> None:
    whole = memory(resumes=(NOW,), earlier=((NOW, "x"),), overruled=("rdma-state  mlx5_0/1",))
    assert parse_drains(drains_record(whole)) == whole
    assert parse_drains(drains_record(Drains())) == Drains()


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["drain", "resumes", "earlier", "causes", "passes"]),
                        inner, max_size=5), max_leaves=12))  # fmt: skip
def test_what_is_no_record_lifts_nothing(record: object) -> None:
    found = parse_drains(record)
    assert found.drain is None
    assert parse_drains({**drains_record(memory()), "earlier": record}).drain in (
        None, memory().drain,
    )  # fmt: skip
