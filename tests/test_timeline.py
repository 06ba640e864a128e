"""The time line of an attempt, from records alone: its parts, its order, and what is unknown."""

import pytest

from ftslurm.diagnosis import causes
from ftslurm.recovery import policy
from ftslurm.run.attempt_records import ASKED_TO_LEAVE
from ftslurm.run.srun_lines import lost_node, parse_line, parse_lines
from ftslurm.run.timeline import (
    LAST_WORD,
    Clocks,
    Facts,
    draw,
    earliest_error,
    in_order,
    late_words,
)

T = 1_000_000.0
"""When rank 3 fails; the leader's clock."""


def event(kind, at, **facts):
    return {"kind": kind, "at": T + at, **facts}


def error(rank, at, *, node="n1", kind="ValueError"):
    return {"rank": rank, "node": node, "at": T + at, "type": kind, "message": "boom", "step": 37}


def facts(**more):
    known = {
        "events": [event("claimed", -50), event("ranks_ended", 1.5), event("decided", 1.7)],
        "errors": [error(3, 0.0)],
        "last_sign_at": T - 0.4,
        "next_events": [
            event("claimed", 2.0), event("restored", 6.0, step=30), event("first_step", 6.5),
        ],
    }  # fmt: skip
    return Facts(**{**known, **more})


def test_the_parts_add_up_to_the_time_to_recover():
    line = draw(facts(agent_events=[event("rank_exit", 0.1, rank=3, node="n2", code=1)]))
    assert line.parts == {
        "detected": 0.1, "gone": 1.4, "decided": 0.2, "launched": 0.3, "restored": 4.0,
        "first_step": 0.5,
    }  # fmt: skip
    assert sum(line.parts.values()) == pytest.approx(line.rto_s) == 6.5
    assert line.mttd_s == 0.1
    assert line.failed_by == "error record of rank 3"
    assert line.detected_by == "the agent of n2"


def test_without_agents_a_failure_is_detected_when_srun_returns():
    line = draw(facts())
    assert (line.detected, line.detected_by) == (T + 1.5, "the end of the ranks' srun")
    assert line.rto_s == 6.5


def test_a_killed_rank_without_agents_failed_some_time_after_the_last_step_on_record():
    line = draw(facts(errors=[]))
    assert (line.failed, line.failed_by) == (T - 0.4, LAST_WORD)
    assert (line.mttd_s, line.rto_s) == (1.9, 6.9)


def test_a_failure_of_which_nothing_tells_is_unknown_and_so_is_what_follows_from_it():
    line = draw(facts(errors=[], last_sign_at=None))
    assert (line.failed, line.failed_by, line.mttd_s, line.rto_s) == (None, "unknown", None, None)
    assert line.parts["detected"] is None
    assert line.parts["first_step"] == 0.5
    assert line.parts["launched"] == 0.3


def test_a_batch_node_that_dies_with_its_journal_is_known_by_the_decision_of_the_others():
    line = draw(facts(events=[event("claimed", -50)], errors=[], decided_at=T + 1.7))
    assert (line.detected, line.detected_by) == (T + 1.7, "whoever decided")
    assert (line.gone, line.parts["gone"], line.rto_s) == (None, None, 6.9)


def test_a_hang_begins_where_the_agents_say_that_no_rank_advanced_any_more():
    finding = {"kind": "hang", "since": T - 0.3, "at": T + 9.0, "why": "rank 2 is stopped"}
    line = draw(facts(errors=[], findings=[finding], events=[event("ranks_ended", 10.0)]))
    assert (line.failed, line.detected, line.mttd_s) == (T - 0.3, T + 9.0, 9.3)
    assert line.failed_by == "the agents' finding `hang`"


def test_a_straggler_is_no_failure():
    finding = {"kind": "straggler", "since": T - 0.3, "at": T + 1, "why": "rank 2 is slow"}
    assert draw(facts(errors=[], findings=[finding])).failed_by == LAST_WORD


def test_an_attempt_that_was_asked_to_leave_has_not_failed():
    events = [event("signal", -3.0, signal="SIGUSR1"), *facts().events]
    line = draw(facts(errors=[], events=events, asked_to_leave=True))
    assert (line.failed, line.failed_by) == (T - 3, "the ranks were asked to leave")
    assert (line.mttd_s, line.rto_s) == (0.0, 9.5)


def test_a_run_that_begins_at_step_0_again_restores_nothing():
    begun = [event("claimed", 2.0), event("restored", 2.5, step=None), event("first_step", 3.5)]
    line = draw(facts(next_events=begun))
    assert line.parts["restored"] is None
    assert line.parts["first_step"] == 1.5
    assert line.rto_s == 3.5


def test_what_has_not_come_yet_is_none():
    line = draw(facts(next_events=[]))
    assert (line.launched, line.first_step, line.rto_s) == (None, None, None)
    assert line.parts["decided"] == 0.2


@pytest.mark.parametrize("ahead_s", [90.0, -90.0])
def test_a_node_whose_clock_is_wrong_and_measured_changes_nothing(ahead_s):
    """Rank 3 fails first, on n2; its clock says otherwise."""
    errors = [error(3, ahead_s, node="n2"), error(0, 0.2, kind="PeerLost")]
    clocks = Clocks({"n1": 0.0, "n2": ahead_s})
    assert earliest_error(errors, clocks)["rank"] == 3
    line = draw(facts(errors=errors, clocks=clocks))
    assert (line.failed, line.rto_s) == (T, 6.5)
    told = in_order(facts(errors=errors, clocks=clocks))
    kinds = [(entry["kind"], entry.get("rank")) for entry in told]
    assert kinds == [
        ("claimed", None), ("error", 3), ("error", 0), ("ranks_ended", None), ("decided", None),
    ]  # fmt: skip
    assert told[1]["clock_s"] == ahead_s


@pytest.mark.parametrize("ahead_s", [90.0, -90.0])
def test_a_clock_that_nobody_measured_is_not_believed_where_it_cannot_be_right(ahead_s):
    line = draw(facts(errors=[error(3, ahead_s, node="n2")]))
    assert (line.failed, line.failed_by) == (T - 0.4, LAST_WORD)
    line = draw(facts(errors=[error(3, ahead_s, node="n2"), error(0, 0.2)]))
    assert line.failed == T + 0.2


def test_the_next_batch_nodes_clock_is_put_right_where_it_was_measured():
    begun = [event("claimed", 92.0), event("first_step", 95.0)]
    line = draw(facts(next_events=begun, next_ahead_s=90.0))
    assert (line.launched, line.parts["launched"], line.rto_s) == (T + 2, 0.3, 5.0)


def test_clocks_that_contradict_each_other_leave_a_part_unknown():
    begun = [event("claimed", -60.0), event("restored", -56.0, step=3), event("first_step", -55)]
    line = draw(facts(next_events=begun))
    assert line.parts["launched"] is None
    assert line.rto_s is None
    assert line.parts["restored"] == 4.0


def test_a_leftover_is_known_by_what_it_writes_after_the_next_claim():
    verbs = [event("ranks_ended", 5), event("decided", 6)]
    assert late_words(facts(events=verbs, next_claimed_at=T + 2), last_sign_at=T - 1) is None
    more = facts(
        events=[*verbs, event("committed", 9), event("rejected", 8)], next_claimed_at=T + 2
    )
    late = late_words(more, [error(0, 97.5, node="n2")], last_sign_at=T + 4.5)
    assert (late.after_s, late.kinds) == (95.5, ["committed", "error", "progress", "rejected"])
    put_right = facts(events=[], next_claimed_at=T + 2, clocks=Clocks({"n2": 97.0}))
    assert late_words(put_right, [error(0, 97.5, node="n2")]) is None
    assert late_words(facts(events=[event("committed", 9)])) is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("srun: error: n2: task 3: Killed", [(3, "n2", None, "SIGKILL")]),
        ("srun: error: n1: task 0: Segmentation fault (core dumped)", [(0, "n1", None, "SIGSEGV")]),
        ("srun: error: n5: task 0: Out Of Memory", [(0, "n5", None, "SIGKILL")]),
        ("srun: error: n1: task 0: Aborted", [(0, "n1", None, "SIGABRT")]),
        ("srun: error: n2: tasks 2-3: Exited with exit code 1",
         [(2, "n2", 1, None), (3, "n2", 1, None)]),
        ("srun: error: n[1-2]: tasks 0,2-3: Terminated",
         [(0, None, None, "SIGTERM"), (2, None, None, "SIGTERM"), (3, None, None, "SIGTERM")]),
        ("local_ranks: error: rank 1 left with 137; ending the rest", [(1, None, None, "SIGKILL")]),
        ("local_ranks: error: rank 0 left with 3; ending the rest", [(0, None, 3, None)]),
        ("srun: error: n1: task 0: Something else", [(0, "n1", None, None)]),
        ("srun: Job step aborted: Waiting up to 7 seconds for job step to finish.", []),
        ("slurmstepd-n1: error: *** STEP 15.0 ON n1 CANCELLED AT 2026-11-29T13:47:08 ***", []),
        ("srun: error: n1: tasks -,: Killed", []),
    ],
)  # fmt: skip
def test_srun_says_how_each_task_ended(line, told):
    assert [(one.rank, one.node, one.code, one.signal) for one in parse_line(line)] == told


def test_a_line_that_names_a_task_of_any_number_fills_no_memory():
    assert len(parse_line("srun: error: n1: tasks 0-99999999999: Killed")) < 70_000


def test_the_first_word_on_a_rank_counts_and_says_where_it_stands():
    lines = ["srun: first words", "srun: error: n2: task 3: Killed",
             "srun: error: n1: tasks 0-3: Terminated"]  # fmt: skip
    told = {one.rank: (one.signal, one.line) for one in parse_lines(lines)}
    assert told[3] == ("SIGKILL", 2)
    assert told[0] == ("SIGTERM", 3)


def test_a_node_that_slurm_gave_up_is_named():
    assert lost_node("srun: error: Node failure on n2") == "n2"
    assert lost_node("srun: error: n2: task 3: Killed") is None


def test_the_causes_under_which_ranks_have_not_failed_are_words_of_the_policy():
    words = {policy.CAUSE_ASKED, policy.CAUSE_ORDERED, causes.PREEMPTED, causes.TIME_LIMIT}
    assert set(ASKED_TO_LEAVE) == words
