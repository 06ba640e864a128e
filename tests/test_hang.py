"""A hang is found in time, the culprit is named, and slow is not hung."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Optional

import failure_clues as texts
import pytest
from fakes.views import rank_view, silent

from ftslurm.diagnosis.causes import HANG
from ftslurm.diagnosis.classify import classify
from ftslurm.diagnosis.hang import EARLY_S, HangFinding, HangLimits, HangMemory, hung
from ftslurm.diagnosis.stragglers import StragglerLimits, Watcher
from ftslurm.run.heartbeat import RankView
from ftslurm.run.spec import RecoverySpec

LIMITS = HangLimits.of(RecoverySpec())
EVEN = {"in_collective": False, "proc_state": "R"}
"""Nobody waits in a collective, all have entered as many."""
BUSY = {"in_collective": False, "proc_state": "R", "collective_seq": 499}


def judge(views: Sequence[RankView], memory: Optional[HangMemory] = None) -> Optional[HangFinding]:
    return hung(views, memory or HangMemory(), LIMITS, at=1000.0)


def found(views: Sequence[RankView]) -> HangFinding:
    finding = judge(views)
    assert finding is not None
    return finding


@pytest.mark.parametrize("usual_s", [0.05, 1.0, 60.0])
def test_found_within_three_usual_steps_and_ten_seconds_and_not_before(usual_s: float) -> None:
    memory = HangMemory()
    told_at = None
    for tenths in range(int(10 * (3 * usual_s + 12))):
        views = [silent(rank, tenths / 10, usual_step_s=usual_s) for rank in range(4)]
        if hung(views, memory, LIMITS, at=100 + tenths / 10) is not None:
            told_at = tenths / 10
            break
    assert told_at is not None
    assert 3 * usual_s + 8 < told_at <= 3 * usual_s + 10


def test_a_look_tells_when_there_will_be_a_finding_if_nobody_moves() -> None:
    memory = HangMemory()
    limit_s = 3 * 1.0 + 10 - EARLY_S
    for left_s in (5.0, 0.4):
        views = [silent(rank, limit_s - left_s + rank / 10) for rank in range(4)]
        assert hung(views, memory, LIMITS, at=100 - left_s) is None
        # Rank 0 is the last to be over its limit.
        assert memory.due_in_s == pytest.approx(left_s)
    views = [silent(rank, limit_s + 0.001) for rank in range(4)]
    assert hung(views, memory, LIMITS, at=100.001) is not None


def test_a_stopped_rank_is_named_whatever_the_others_look_like() -> None:
    views = [silent(rank, 15) for rank in range(4)]
    views[2] = silent(2, 15, proc_state="T", in_collective=False)
    finding = found(views)
    assert finding.culprits == (2,) and finding.ranks == (0, 1, 2, 3)
    assert "rank 2 on n2 is stopped (state T" in finding.why
    assert "no rank has advanced for 15.0 s (a step usually takes 1 s)" in finding.why


def test_a_rank_that_computes_while_the_others_wait_is_named() -> None:
    """It holds the interpreter lock in native code, or loops for ever."""
    finding = found([silent(0, 14), silent(1, 14, **BUSY), silent(2, 14), silent(3, 14)])
    assert finding.culprits == (1,)
    assert "has not entered collective 500 (all_reduce f32[64]) that ranks 0, 2, 3" in finding.why
    assert "computing" in finding.why


def test_where_devices_wait_and_no_host_the_rank_that_launched_fewer_collectives_is_named() -> None:
    waiting = {"in_collective": False, "proc_state": "R"}
    views = [silent(rank, 14, **waiting) for rank in range(4)]
    assert found(views).culprits == (), "as many by all: the hosts cannot tell"
    views[2] = silent(2, 14, in_collective=False, proc_state="S", collective_seq=498)
    finding = found(views)
    assert finding.culprits == (2,)
    assert "that ranks 0, 1, 3 have entered: it is blocked" in finding.why


def test_a_rank_that_has_left_out_a_collective_is_named() -> None:
    other = {"collective_seq": 499, "collective": "broadcast f32[2]"}
    finding = found([silent(0, 14), silent(1, 14), silent(2, 14), silent(3, 14, **other)])
    assert finding.culprits == (3,)
    assert "waits in collective 499 (broadcast f32[2]) and has left out one before" in finding.why


def test_a_rank_in_another_collective_of_the_same_number_is_named() -> None:
    views = [silent(0, 14), silent(1, 14), silent(2, 14), silent(3, 14, collective="barrier")]
    finding = found(views)
    assert finding.culprits == (3,) and "their orders of collectives differ" in finding.why


def test_of_two_that_disagree_neither_is_in_the_right() -> None:
    assert found([silent(0, 14), silent(1, 14, collective="barrier")]).culprits == (0, 1)


def test_a_rank_in_the_kernel_is_named_before_the_one_that_waits_for_it() -> None:
    views = [silent(0, 14), silent(1, 14, **{**BUSY, "proc_state": "D"})]
    finding = found(views)
    assert finding.culprits == (1,) and "state D" in finding.why


def test_a_dead_rank_is_the_cause_of_the_others_waiting() -> None:
    views = [silent(0, 14), silent(1, 14, alive=False, proc_state="")]
    assert found(views).culprits == (1,) and "has ended" in found(views).why


def test_where_all_wait_in_the_same_collective_nobody_is_blamed() -> None:
    finding = found([silent(rank, 14) for rank in range(4)])
    assert finding.culprits == () and "the network" in finding.why


def test_one_sign_of_life_is_enough() -> None:
    views = [silent(0, 500), silent(1, 500), silent(2, 500), silent(3, 2.0)]
    assert judge(views) is None


@pytest.mark.parametrize(
    ("phase", "limit_s"),
    [
        ("starting", 1800),
        ("restoring", 3600),
        ("compiling", 1800),
        ("evaluating", 3600),
        ("saving", 3600),
    ],
)
def test_a_phase_without_steps_has_its_own_limit(phase: str, limit_s: float) -> None:
    def views(age_s: float) -> list[RankView]:
        return [
            silent(0, 4000, in_collective=True),
            silent(1, 300, phase=phase, phase_age_s=age_s, **BUSY),
        ]

    assert judge(views(limit_s - 60)) is None, "the others wait for it with good reason"
    finding = judge(views(limit_s + 60))
    assert finding is not None and finding.culprits == (1,)


def test_first_steps_are_waited_for_as_the_compiler_is() -> None:
    unknown = {"usual_step_s": 0.0}
    assert judge([silent(0, 1700, **unknown), silent(1, 1700, **unknown)]) is None
    assert judge([silent(0, 1900, **unknown), silent(1, 1900, **unknown)]) is not None
    lent = HangMemory(usual_step_s=2.0)
    assert judge([silent(0, 20, **unknown), silent(1, 20, **unknown)], lent) is not None


def test_a_stopped_rank_is_found_in_a_phase_with_a_long_limit_too() -> None:
    memory = HangMemory()
    findings = []
    for second in range(20):
        views = [
            rank_view(0, phase="saving", phase_age_s=second),
            rank_view(1, phase="saving", phase_age_s=second, proc_state="T"),
        ]
        findings.append(hung(views, memory, LIMITS, at=second))
    told = [number for number, finding in enumerate(findings) if finding is not None]
    assert told and 11 <= told[0] <= 13
    finding = findings[told[0]]
    assert finding is not None and finding.culprits == (1,)


def test_an_evaluation_that_nobody_marked_is_not_taken_for_a_hang() -> None:
    for state in ("R", "S"):  # one of them reads its data, or waits for its loader
        views = [silent(0, 100, **EVEN), silent(1, 100, **{**EVEN, "proc_state": state})]
        assert judge(views, HangMemory(has_seen_waiting=True)) is None
    views = [silent(rank, 3700, **EVEN) for rank in (0, 1)]
    finding = judge(views, HangMemory(has_seen_waiting=True))
    assert finding is not None and "`with session.evaluating():`" in finding.why
    # One has entered a collective that the other has not: somebody is waited for.
    views = [silent(0, 100, **EVEN), silent(1, 100, **BUSY)]
    finding = judge(views, HangMemory(has_seen_waiting=True))
    assert finding is not None and finding.culprits == (1,)


def test_ranks_have_been_seen_waiting_from_the_first_time_on() -> None:
    memory = HangMemory()
    judge([rank_view(0, in_collective=False), rank_view(1, in_collective=False)], memory)
    assert not memory.has_seen_waiting
    judge([rank_view(0), rank_view(1, in_collective=False)], memory)
    judge([rank_view(0, in_collective=False), rank_view(1, in_collective=False)], memory)
    assert memory.has_seen_waiting


def test_where_devices_wait_all_hosts_at_work_are_no_excuse() -> None:
    """The session waits for its word over gloo even where the model's collectives are NCCL's."""
    views = [silent(rank, 20, devices_wait=True, **EVEN) for rank in (0, 1)]
    assert judge(views, HangMemory(has_seen_waiting=True)) is not None


def blocked(seconds: float, state: str = "D") -> list[RankView]:
    return [silent(0, seconds, **{**BUSY, "proc_state": state}), silent(1, seconds)]


def test_storage_that_fails_over_is_told_of_and_ends_nothing_before_a_save_would() -> None:
    memory = HangMemory()
    told = []
    for second in range(0, 3700, 2):
        # Between two writes that are held up it runs.
        state = "R" if second % 20 == 0 else "D"
        finding = hung(blocked(second, state), memory, LIMITS, at=1000.0 + second)
        told += [(second, finding.acts, finding.culprits)] if finding is not None else []
    (first, *more) = told
    assert 10 <= first[0] <= 14 and first[1:] == (False, (0,))
    assert more[0][0] == LIMITS.phase_limit_s["saving"] and all(acts for _, acts, _ in more)


def test_ranks_that_are_in_the_kernel_have_as_long_as_a_save_and_their_nodes_are_counted() -> None:
    limits = replace(LIMITS, phase_limit_s={**LIMITS.phase_limit_s, "saving": 1800.0})
    for node, told in (
        ("n1", "state D: storage or a device"),
        ("n2", "state D on 2 nodes: storage"),
    ):
        memory = HangMemory()
        for second in range(0, 3700, 2):
            views = [*blocked(second), replace(blocked(second)[0], rank=2, node=node)]
            finding = hung(views, memory, limits, at=1000.0 + second)
            if finding is not None and finding.acts:
                break
        assert second == 1800 and finding is not None and finding.culprits == (0, 2)
        assert f"is blocked in the kernel ({told})" in finding.why


def test_the_node_of_a_rank_in_the_kernel_is_blamed_where_no_other_nodes_is() -> None:
    said = "hang: no rank has advanced for 3600 s: rank 3 on n2 is blocked in the kernel (state D"
    one = classify([texts.agent(f"{said}: storage or a device)")], texts.FACTS)
    assert (one.cause, one.blamed_rank, one.blamed_node) == (HANG, 3, "n2")
    many = classify([texts.agent(f"{said} on 2 nodes: storage)")], texts.FACTS)
    assert (many.cause, many.blamed_node) == ("storage", None)


def test_storage_that_is_back_ends_nothing_and_is_told_of_again_the_next_time() -> None:
    memory = HangMemory()
    found = []
    for second in range(100):
        finding = hung(blocked(second % 40), memory, LIMITS, at=1000.0 + second)
        found += [finding.acts] if finding is not None else []
    assert found == [False] * 3


def test_a_rank_that_was_in_the_kernel_and_is_at_work_now_is_hung() -> None:
    memory = HangMemory()
    assert judge(blocked(11), memory) is None
    finding = hung(blocked(15, "R"), memory, LIMITS, at=1004.0)
    assert finding is not None and finding.acts and finding.culprits == (0,)


def test_a_lone_rank_that_computes_for_ever_is_found() -> None:
    assert judge([silent(0, 100, in_collective=False, proc_state="R")]) is not None


def test_after_a_suspension_the_clock_begins_anew() -> None:
    memory = HangMemory()
    assert hung([rank_view(0), rank_view(1)], memory, LIMITS, at=100.0) is None
    # `scontrol suspend` for ten minutes, then everything goes on.
    for second in range(11):
        views = [silent(0, 600 + second), silent(1, 600 + second)]
        assert hung(views, memory, LIMITS, at=700.0 + second) is None
    assert hung([silent(0, 614), silent(1, 614)], memory, LIMITS, at=714.0) is not None


def test_nobody_to_look_at_is_no_hang_and_neither_are_ranks_that_leave() -> None:
    assert judge([]) is None
    leaving = [silent(rank, 100, phase="leaving") for rank in range(2)]
    assert judge(leaving) is None


def test_one_rank_may_wait_for_the_others_to_leave_only_as_long_as_they_do_something() -> None:
    stuck = silent(1, 14, **BUSY)
    finding = found([silent(0, 14, phase="leaving"), stuck])
    assert finding.culprits == (1,)


def test_it_can_be_switched_off() -> None:
    off = HangLimits(factor=0)
    assert hung([silent(0, 900), silent(1, 900)], HangMemory(), off, at=0.0) is None


def test_ten_thousand_ranks_are_judged_in_a_fraction_of_a_second() -> None:
    memory = HangMemory()
    hung([rank_view(0)], memory, LIMITS, at=999.0)
    watcher = Watcher(StragglerLimits())
    for step in range(50, 150, 10):
        views = [
            rank_view(rank, step=step, in_collective=False, proc_state="R")
            for rank in range(10_000)
        ]
        looks_at = time.thread_time()
        assert hung(views, memory, LIMITS, at=1000.0) is None
        assert watcher.observe(views, at=1000.0) == []
        took_s = time.thread_time() - looks_at
    print(f"10,000 ranks: {1000 * took_s:.0f} ms a look")
    assert took_s < 1.0


def test_the_sentence_stays_short_with_ten_thousand_ranks() -> None:
    views = [silent(rank, 14) for rank in range(5000)]
    views += [silent(rank, 14, **BUSY) for rank in range(5000, 10000)]
    finding = found(views)
    assert len(finding.culprits) == 5000 and len(finding.why) < 1200
