"""What readings mean: every Xid of the table, and everything that is more than a number."""

import dataclasses
from typing import Optional

import pytest
from health_nodes import BOOT, GPUS, NOW, logged, looks, node, signal, xid

from ftslurm.health import signals as s
from ftslurm.health.history import History, Past, history_record, parse_history, with_past
from ftslurm.health.signals import Failure, Signal, parse_reading, reading_record
from ftslurm.health.verdict import Thresholds, Verdict
from ftslurm.health.verdicts import judge, remember
from ftslurm.health.xid_table import ACTION_TABLE, BY_SXID, BY_XID, WORDS, XID_TABLE

USER_XIDS = {8, 11, 25, 13, 31, 32, 37, 39, 40, 41, 70, 71, 72, 75, 76, 77, 85, 43, 45, 68, 69,
             82, 83, 84, 86, 88, 89, 137, 139, *range(96, 106), *range(126, 136)}  # fmt: skip
# On a part from A100 on, with a driver that has no recovery action and nothing else said.
WORD_OF = {
    **dict.fromkeys(range(1, 200), "warn"),
    **dict.fromkeys((14, 45, 106, 107, 152, 153, 162), "ignore"),
    **dict.fromkeys((46, 62, 109, 110, 136, 155, 156, 158, 159, 169), "reset"),
    **dict.fromkeys((48, 54, 74, 79, 95, 119, 120, 140, 143, 151, 167, 171, 172), "drain"),
    63: "warn", 64: "reset", 94: "warn", 154: "unknown", 168: "after",
}  # fmt: skip


def one(verdicts: list[Verdict], code: str) -> Verdict:
    (found,) = [verdict for verdict in verdicts if verdict.code == code]
    return found


def judged(model: str, *signals: Signal, history: Optional[History] = None, **more: object) -> list:
    thresholds = more.pop("thresholds", None)
    reading = node(model, *signals, **more)
    return judge(reading, baseline=None, history=history or History(), thresholds=thresholds)


@pytest.mark.parametrize("number", range(1, 200))
def test_each_xid_has_the_verdict_of_its_row(number: int) -> None:
    verdicts = judged("a100", xid(number, "something"))
    if number == 154:
        assert one(verdicts, "ACTION").word == "unknown"
        return
    verdict = one(verdicts, f"XID{number}")
    assert verdict.word == WORD_OF[number]
    assert verdict.hands_to_run == (number in USER_XIDS)
    assert verdict.gpu == GPUS[1]
    assert (verdict.needs != "") == (verdict.word in ("drain", "reset", "after"))
    assert verdict.sticky == (number == 54)


def test_the_table_has_every_xid_once_with_its_source_and_date() -> None:
    numbers = [number for row in XID_TABLE for number in row.xids]
    assert sorted(numbers) == list(range(1, 173))
    assert all(row.source and row.date and row.action and row.meaning for row in XID_TABLE)
    assert all(row.word in WORDS for row in XID_TABLE)
    assert not [row for row in XID_TABLE if row.of_user and row.word not in ("warn", "ignore")]


@pytest.mark.parametrize(
    ("number", "words"),
    [(56, "reset"), (57, "reset"), (58, "reset"), (61, "reset"), (64, "drain"), (31, "warn")],
)
def test_a_v100_has_its_own_words(number: int, words: str) -> None:
    assert one(judged("v100", xid(number)), f"XID{number}").word == words


@pytest.mark.parametrize("row", ACTION_TABLE, ids=lambda row: row.names[0])
def test_the_recovery_action_by_nvml_and_by_xid_154(row: object) -> None:
    words = {0: "ignore", 1: "reset", 2: "drain", 3: "after", 4: "reset", 5: "warn", 6: "reset",
             7: "drain"}  # fmt: skip
    told = xid(154, f"GPU recovery action changed from 0x0 (None) to {row.value:#x} (Whatever)")
    named = xid(154, f"GPU recovery action changed to ({row.names[0].title()})")
    for verdicts in (judged("h100", signal(s.RECOVERY_ACTION, row.value)), judged("a100", told),
                     judged("a100", named)):  # fmt: skip
        verdict = next(one for one in verdicts if one.code == f"ACTION{row.value}"
                       and (row.value or one.gpu == GPUS[1]))  # fmt: skip
        assert verdict.word == words[row.value]
        assert (verdict.needs == "reboot") == (row.value in (2, 7))


def test_the_recovery_action_outranks_the_table() -> None:
    assert one(judged("h100", xid(79), signal(s.RECOVERY_ACTION, 1)), "XID79").word == "reset"
    assert one(judged("h100", xid(62), signal(s.RECOVERY_ACTION, 2)), "XID62").word == "drain"
    assert one(judged("h100", xid(62)), "XID62").word == "warn", "action none"
    assert one(judged("h100", xid(109)), "XID109").word == "warn"
    assert one(judged("h100", xid(54), signal(s.RECOVERY_ACTION, 1)), "XID54").word == "drain"
    assert one(judged("h100", xid(31), signal(s.RECOVERY_ACTION, 1)), "XID31").word == "warn"


def test_none_clears_a_drain_only_where_the_log_says_it_after_the_xid() -> None:
    none = xid(154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")
    assert one(judged("h100", xid(48)), "XID48").word == "drain"
    assert one(judged("a100", xid(48), none), "XID48").word == "warn"
    assert one(judged("a100", none, xid(48)), "XID48").word == "drain"
    other = dataclasses.replace(none, gpu=GPUS[2])
    assert one(judged("a100", xid(48), other), "XID48").word == "drain"


def test_the_last_xid_154_counts_and_nvml_before_it() -> None:
    begin = xid(154, "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)")
    end = xid(154, "GPU recovery action changed from 0x2 (Node Reboot Required) to 0x0 (None)")
    assert judged("a100", begin, end)[0].word == "ignore"
    assert judged("a100", end, begin)[0].word == "drain"
    assert judged("h100", begin)[0].word == "ignore", "NVML says none now"


@pytest.mark.parametrize(("registers", "word"), [
    ("0x1, 0, 0", "drain"),  # torn: no hexadecimal registers at all
    ("0x800000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "ignore"),
    ("0x40000001, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "ignore"),
    ("0x2, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "warn"),
    ("0x100000, 0x0, 0x0, 0x30000, 0x0, 0x0, 0x0", "warn"),
    ("0x100002, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "warn"),
    ("0x0, 0x0, 0x0, 0x40000, 0x0, 0x0, 0x0", "reset"),
    ("0x0, 0x0, 0x0, 0x0, 0x24900000, 0x0, 0x0", "warn"),
    ("0x10, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "drain"),
    ("0x100, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "drain"),
    ("0x200000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "drain"),
    ("0x8000000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "drain"),
    ("0x0, 0x0, 0x1, 0x0, 0x0, 0x0, 0x0", "drain"),
    ("0x0, 0x0, 0x2000, 0x0, 0x0, 0x0, 0x0", "drain"),
    ("0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0", "drain"),
    ("0x0, 0x0, 0x20000, 0x0, 0x0, 0x0, 0x0", "drain"),
    ("0x0, 0x0, 0x0, 0x0, 0x40000, 0x0, 0x0", "drain"),
    ("0x4, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "drain"),  # a bit that no row knows
    ("0x800010, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "drain"),  # ignorable, and ECC
    ("0x0, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "drain"),
])  # fmt: skip
def test_xid_74_by_its_registers(registers: str, word: str) -> None:
    text = f"pid=1, name=p, NVLink: fatal error detected on link 14({registers})"
    assert one(judged("a100", xid(74, text)), "XID74").word == word


@pytest.mark.parametrize("number", range(144, 151))
@pytest.mark.parametrize(("text", "word"), [
    ("SAW_MVB Nonfatal XC0 i0 Link 0 (0x1)", "warn"),
    ("SAW_MVB Fatal XC0 i0 Link 0 (0x1)", "reset"),
    ("NETIR_LINK_EVT  Fatal   XC1 i0 Link -1 (0x1)", "reset"),
    ("NETIR_LINK_EVT  Fatal   XC1 i1 Link 09 (0x1)", "ignore"),
    ("NETIR_BER_EVENT Fatal XC0 i0 Link 02 (0x0)", "warn"),
    ("RLW_", "warn"),
])  # fmt: skip
def test_nvlink5_by_its_text(number: int, text: str, word: str) -> None:
    assert one(judged("a100", xid(number, text)), f"XID{number}").word == word


@pytest.mark.parametrize("cause", [79, 48, 95])
@pytest.mark.parametrize(("number", "text"), [(74, ""), (149, "NETIR_LINK_EVT Fatal XC0 i0")])
def test_an_nvlink_error_beside_a_lost_peer_is_its_echo(cause: int, number: int, text: str) -> None:
    peer = xid(cause, bus="1b", at=NOW)
    near, far = xid(number, text, at=NOW + 4), xid(number, text, at=NOW + 400)
    assert one(judged("a100", peer, near), f"XID{number}").word == "warn"
    assert one(judged("a100", near, peer), f"XID{number}").word == "warn"
    assert one(judged("a100", peer, far), f"XID{number}").word in ("drain", "reset")
    undated = dataclasses.replace(near, at=None)
    assert one(judged("a100", peer, undated), f"XID{number}").word in ("drain", "reset")
    assert judged("a100", peer, near)[0].code == f"XID{cause}"


def test_nvmls_state_decides_over_xids_63_64_and_94() -> None:
    for number, told, unknown in ((63, "warn", "after"), (94, "warn", "reset")):
        assert one(judged("a100", xid(number)), f"XID{number}").word == told
        assert one(judged("bare", xid(number)), f"XID{number}").word == unknown
        pending = judged("a100", xid(number), signal(s.REMAP_PENDING, True))
        assert pending[0].code == "REMAP-WAIT" and pending[0].word == "reset"
    assert one(judged("bare", xid(64)), "XID64").sticky
    failed = judged("a100", xid(64), signal(s.REMAP_FAILURE, True))
    assert [one.word for one in failed if one.code in ("XID64", "REMAP-FAIL")] == ["drain", "drain"]


def test_a_programs_fault_behind_a_hardware_error_is_not_the_programs() -> None:
    verdicts = judged("a100", xid(48), xid(45, "pid=1, name=p, Ch 1"), xid(31), xid(31, bus="1b"))
    handed = [(one.code, one.gpu) for one in verdicts if one.hands_to_run]
    assert handed == [("XID31", GPUS[0])]
    lost = judged("h100", xid(43), signal(s.GPU_LOST, True))
    assert lost[0].word == "drain" and not one(lost, "XID43").hands_to_run
    behind = signal(s.LEFTOVER_PROCESS, 4711, where="4711-9/job")
    leftover = looks([node("h100", behind), node("h100", xid(31), behind, at=NOW + 200)], None)
    assert leftover[0].word == "drain" and one(leftover, "XID31").hands_to_run
    echo = xid(45, "pid=1, name=p, Ch 1 caused by previous Xid 149")
    assert not one(judged("a100", echo), "XID45").hands_to_run


def past(what: str, *, ago_s: float = 60.0, user: str = "bob", **more: str) -> Past:
    return Past(what, NOW - ago_s, bus=GPUS[1].bus, boot_id=more.pop("boot_id", BOOT), user=user,
                **more)  # fmt: skip


WARP = "Graphics SM Warp Exception on (GPC 1, TPC 3, SM 0): Illegal Address"


@pytest.mark.parametrize(("number", "text", "earlier", "word"), [
    (13, WARP, [past("XID13", detail="1/3")], "after"),
    (13, WARP, [past("XID13", detail="1/3", user="alice")], "warn"),
    (13, WARP, [past("XID13", detail="1/4")], "warn"),
    (13, WARP, [past("XID13", detail="1/3", ago_s=90_000.0)], "warn"),
    (13, "no unit named", [past("XID13")], "warn"),
    (31, "", [past("XID31"), past("XID31")], "after"),
    (31, "", [past("XID31")], "warn"),
    (31, "", [past("XID31", user="alice")] * 30, "warn"),
    (32, "", [past("XID32"), past("XID32", user="alice")], "after"),
    (109, "", [past("XID109", user="alice")], "after"),
    (121, "", [past("XID121", user="")], "after"),
    (43, "", [past("XID43")] * 30, "warn"),
])  # fmt: skip
def test_what_comes_again_on_one_gpu(number: int, text: str, earlier: list, word: str) -> None:
    verdicts = judged("h100", xid(number, text), history=History(tuple(earlier)))
    assert one(verdicts, f"XID{number}").word == word


def test_a_second_loss_in_two_weeks_is_for_a_person() -> None:
    before = History((past("XID79", boot_id="boot-0", ago_s=86400.0),))
    again = one(judged("a100", xid(79), history=before), "XID79")
    assert again.sticky and not again.auto_resume
    first = one(judged("a100", xid(79)), "XID79")
    assert not first.sticky and first.auto_resume and first.needs == "reboot"
    old = History((past("XID79", boot_id="boot-0", ago_s=20 * 86400.0),))
    assert not one(judged("a100", xid(79), history=old), "XID79").sticky


def sxid(number: int, text: str) -> list[Signal]:
    return logged(f"nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): {number}, {text}")


@pytest.mark.parametrize("number", sorted(BY_SXID))
def test_each_sxid_has_the_verdict_of_its_row(number: int) -> None:
    always = {10003, 12020, 22003, 22011, *range(23001, 23018)}
    ignored = {20001, 20009, 20012}
    verdict = one(judged("h100", *sxid(number, "Non-fatal, Link 1")), f"SXID{number}")
    expected = "drain" if number in always else "ignore" if number in ignored else "warn"
    assert verdict.word == expected
    assert judged("h100", *sxid(number, "Fatal, Link 1"))[0].word == "drain"


def test_a_fatal_sxid_that_a_lost_gpu_explains_is_an_echo() -> None:
    (fatal,) = sxid(24007, "Fatal, Link 28 sourcetrack timeout error (First)")
    fatal = dataclasses.replace(fatal, at=NOW)
    assert one(judged("h100", fatal), "SXID24007").word == "drain"
    verdicts = judged("h100", fatal, xid(79, at=NOW - 2))
    assert one(verdicts, "SXID24007").word == "warn"
    assert verdicts[0].code == "XID79"


def test_fatal_pcie_errors_of_gpus_and_nics_drain_and_no_others() -> None:
    for name, bus, word in (
        ("nvidia", "43:00.0", "drain"),
        ("mlx5_core", "0c:00.0", "drain"),
        ("nvme", "05:00.0", "warn"),
        ("pcieport", "43:00.0", "drain"),
    ):
        line = f"{name} 0000:{bus}: PCIe Bus Error: severity=Uncorrected (Fatal), type=x, (y)"
        assert judged("h100", *logged(line))[0].word == word, name


def test_what_could_not_be_read_is_unknown_and_escalates_only_for_nvml_on_gpu_nodes() -> None:
    def last(model: str, source: str, times: int, **more: object) -> Verdict:
        readings = [node(model, at=NOW + 60 * look, failures=[Failure(source, "no answer")])
                    for look in range(times)]  # fmt: skip
        return looks(readings, None, **more)[0]

    assert [last("h100", "nvml", times).word for times in (1, 2, 3)] == ["unknown"] * 2 + ["drain"]
    assert last("h100", "nvml", 3).auto_resume
    assert last("h100", "kernel_log", 9).word == "unknown"
    assert "look 9 in a row" in last("h100", "rdma", 9).sentence
    assert last("none", "nvml", 9).word == "unknown"
    assert last("h100", "nvml", 3, thresholds=Thresholds(unknown_probes=5)).word == "unknown"


def test_a_good_look_between_two_bad_ones_begins_anew() -> None:
    bad = [Failure("nvml", "no answer")]
    readings = [node(at=NOW + 60 * look, failures=bad if look != 2 else []) for look in range(4)]
    assert looks(readings, None)[0].word == "unknown"


def test_a_rule_that_could_not_be_read_in_between_goes_on() -> None:
    pending = signal(s.ECC_MODE, "unknown error")
    silent = node("bare", at=NOW + 60, failures=[Failure("nvml", "x")])
    readings = [node("h100", pending), silent, node("h100", pending, at=NOW + 120)]
    assert looks(readings, None)[0].word == "drain"


@pytest.mark.parametrize(
    ("util", "power_w", "rise", "is_cooling"),
    [(98, 650.0, 18, True), (98, 655.0, 5, False), (20, 650.0, 18, False), (98, 300.0, 18, False)],
)
def test_hotter_at_the_same_load_is_the_cooling(
    util: int, power_w: float, rise: int, is_cooling: bool
) -> None:
    def loaded(celsius: int, percent: int, watts: float, at: float) -> object:
        return node("h100", signal(s.TEMPERATURE, celsius), signal(s.GPU_UTILISATION, percent),
                    signal(s.POWER_W, watts), at=at)  # fmt: skip

    before, now = loaded(60, 98, 650.0, NOW - 600), loaded(60 + rise, util, power_w, NOW)
    verdicts = judge(now, baseline=before, history=History())
    assert [one.word for one in verdicts if one.code == "COOLING"] == ["warn"] * is_cooling


def test_two_trends_on_one_gpu_drain_only_where_the_site_wants_it() -> None:
    history = History((past("XID92", ago_s=86400.0),))
    baseline = node("h100", signal(s.REMAPS_UNCORRECTABLE, 0), at=NOW - 600)

    def words(*signals: Signal, trends_drain: bool, remembered: History = history) -> list[str]:
        thresholds = Thresholds(trends_drain=trends_drain)
        verdicts = judge(node("h100", *signals), baseline=baseline, history=remembered,
                         thresholds=thresholds)  # fmt: skip
        return [one.word for one in verdicts if one.code == "TREND"]

    new_rows = signal(s.REMAPS_UNCORRECTABLE, 2)
    assert words(new_rows, trends_drain=False) == ["warn"]
    assert words(new_rows, trends_drain=True) == ["after"]
    assert words(trends_drain=True) == []
    assert words(new_rows, trends_drain=True, remembered=History()) == []
    assert words(xid(92), trends_drain=True) == [], "one kind, twice"


def test_the_worst_comes_first_and_a_switched_off_rule_says_nothing() -> None:
    signals = (xid(31), xid(79), signal(s.REMAP_PENDING, True))
    assert [one.word for one in judged("a100", *signals)] == ["drain", "reset", "warn"]
    off = Thresholds(off=frozenset({"xid-79", "remap-pending"}))
    assert [one.code for one in judged("a100", *signals, thresholds=off)] == ["XID31"]


def test_the_same_values_give_the_same_verdict() -> None:
    reading = node("a100", xid(79), xid(31), failures=[Failure("rdma", "x")])
    first = judge(reading, baseline=None, history=History())
    assert judge(reading, baseline=None, history=History()) == first
    copy = parse_reading(reading_record(reading))
    assert judge(copy, baseline=None, history=History()) == first


def test_every_verdict_says_what_where_by_which_rule_and_source() -> None:
    for verdict in judged(
        "a100", xid(79), xid(31), signal(s.REMAP_FAILURE, True), *sxid(22003, "")
    ):
        assert verdict.word in WORDS and 0 < len(verdict.code) <= 12
        assert verdict.sentence and verdict.rule and verdict.source and verdict.signals


def test_the_memory_is_bounded_and_forgets_after_two_weeks() -> None:
    history = History((past("XID31", ago_s=15 * 86400.0),))
    xids = [xid(number, bus=bus) for number in range(1, 60) for bus in ("1b", "43", "52")]
    for look in range(20):
        reading = node("h100", *xids, signal(s.REMAP_BANKS_NONE, 1), at=NOW + look)
        history = remember(history, reading, judged("h100", *reading.signals), baseline=None)
    assert len(history.past) == 512
    assert min(one.at for one in history.past) > NOW
    assert len(str(history_record(history))) < 200_000


def test_a_users_flood_of_xids_makes_no_loss_forgotten() -> None:
    loss = past("XID79", ago_s=86400.0)
    history = History((loss,))
    for look in range(700):
        reading = node("h100", xid(31), at=NOW + look)
        history = remember(history, reading, judged("h100", *reading.signals), baseline=None)
    assert loss in history.past and len(history.past) == 17


def test_a_state_that_lasts_is_remembered_once_an_hour() -> None:
    history = History()
    for minute in range(150):
        new = Past("remap-banks-none", NOW + 60 * minute, key="k", bus="b")
        history = with_past(history, [new], now=new.at)
    assert len(history.past) == 3


def test_a_history_survives_its_file_and_a_torn_one_is_none() -> None:
    reading = node("a100", xid(79), signal(s.ECC_MODE, "unknown error"))
    verdicts = judge(reading, baseline=None, history=History())
    history = remember(History(), reading, verdicts, baseline=None)
    assert history.past and history.streaks
    assert parse_history(history_record(history)) == history
    for torn in (
        None,
        3,
        [],
        {},
        {"past": 1, "streaks": {}},
        {"past": [{}], "streaks": {}},
        {"past": [{"what": 1, "at": 2}], "streaks": {}},
        {"past": [], "streaks": {"a": {"reads": "x", "since": 1, "last": 1}}},
    ):
        assert parse_history(torn) == History()


@pytest.mark.parametrize("known", BY_XID)
def test_no_xid_of_a_user_drains_alone(known: int) -> None:
    if known in USER_XIDS:
        for model in ("h100", "a100", "v100", "mig", "bare"):
            words = {one.word for one in judged(model, xid(known, WARP), xid(known, WARP))}
            assert words <= {"warn", "ignore"}
