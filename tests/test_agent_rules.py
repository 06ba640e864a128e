"""What agents conclude from silence, who reports to whom, and what a report says. Values only."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftslurm.agent import quorum, silence
from ftslurm.agent.quorum import CUT_OFF, REQUEUE, WAIT, YIELD
from ftslurm.agent.report import ClockOffset, NodeReport, from_row, to_row
from ftslurm.agent.silence import ANSWERS, NOTHING, REFUSES, Silence, judge
from ftslurm.agent.tree import FLAT_UP_TO, parents
from ftslurm.run.heartbeat import RankView

FOUR = ["n1", "n2", "n3", "n4"]


def decide(me, nodes, votes, **more):
    return quorum.decide(me, nodes, votes, **{"controller": True, **more}).action


@pytest.mark.parametrize(
    ("me", "votes", "more", "action"),
    [
        ("n2", {"n3": False, "n4": False}, {}, REQUEUE),
        ("n3", {"n2": False, "n4": False}, {}, YIELD),
        ("n2", {"n3": False}, {}, REQUEUE),
        ("n2", {}, {}, CUT_OFF),
        ("n2", {}, {"node_is_down": True}, REQUEUE),
        ("n2", {"n3": False, "n4": True}, {}, WAIT),
        ("n2", {"n3": False, "n4": False}, {"controller": False}, CUT_OFF),
        ("n2", {"n3": False, "n4": False}, {"controller": None}, CUT_OFF),
        ("n3", {"n2": False, "n4": False}, {"controller": None}, YIELD),
    ],
)
def test_who_gives_the_run_its_next_job(me, votes, more, action):
    assert decide(me, FOUR, votes, **more) == action


def test_of_two_nodes_the_one_that_reaches_slurm():
    assert decide("n2", ["n1", "n2"], {}) == REQUEUE
    assert decide("n2", ["n1", "n2"], {}, controller=False) == CUT_OFF


@pytest.mark.parametrize(
    ("is_down", "action"), [(None, CUT_OFF), (False, CUT_OFF), (True, REQUEUE)]
)
def test_a_leader_that_was_never_heard_is_lost_only_by_slurms_own_word(is_down, action):
    """A firewall between two nodes that can train would have the run moved on for ever."""
    more = {"has_heard": False, "node_is_down": is_down}
    assert decide("n2", ["n1", "n2"], {}, **more) == action
    assert decide("n2", FOUR, {"n3": False, "n4": False}, **more) == action


@given(st.integers(3, 12), st.data())
def test_however_the_network_parts_exactly_one_side_acts(size, data):
    """Of any two parts, one with the leader: it goes on without the others, or they without it.
    Whatever nodes the job has lost before, as long as both sides see the same cut."""
    nodes = [f"n{i:02d}" for i in range(size)]
    leader, members = nodes[0], nodes[1:]
    members = members[data.draw(st.integers(0, len(members) - 1)) :]
    cut = data.draw(st.sets(st.sampled_from(members), min_size=1))
    heard = [node for node in members if node not in cut]
    seen = {leader: NOTHING, **{node: NOTHING for node in heard[:2]}}
    silent = [Silence(node, seen) for node in cut]
    judgement = judge(leader, size - 1, heard, silent, controller=True)
    actions = {me: decide(me, nodes, dict.fromkeys(cut - {me}, False)) for me in cut}
    leader_acts = bool(judgement.lost)
    survivors_act = [me for me, action in actions.items() if action == REQUEUE]
    assert leader_acts != bool(survivors_act)
    assert survivors_act in ([], [min(cut)])


@given(st.lists(st.sampled_from([ANSWERS, REFUSES, NOTHING]), max_size=3), st.booleans())
def test_nobody_is_lost_by_one_witness(looks, others_heard):
    heard = ["n3", "n4"] if others_heard else []
    seen = dict(zip(["n1", "n3", "n4"], looks))
    judgement = judge("n1", 1 + len(heard), heard, [Silence("n2", seen)], controller=None)
    if "n2" in judgement.lost:
        assert looks.count(NOTHING) == len(looks) >= 2


@pytest.mark.parametrize(("answers", "lost"), [(True, ["n2"]), (False, []), (None, [])])
def test_the_last_member_is_lost_only_when_slurm_answers_the_leader(answers, lost):
    judgement = judge("n1", 1, [], [Silence("n2", {"n1": NOTHING})], controller=answers)
    assert list(judgement.lost) == lost
    assert judgement.cut_off == (answers is False)


def test_a_node_that_refuses_is_there_and_one_that_answers_is_not_silent_for_all():
    judgement = judge(
        "n1",
        5,
        ["n4", "n5", "n6"],
        [Silence("n2", {"n4": REFUSES}), Silence("n3", {"n4": ANSWERS, "n1": NOTHING})],
        controller=None,
    )
    assert (judgement.gone, judgement.lost) == (["n2"], [])


def test_a_leader_that_loses_most_at_once_blames_itself():
    silent = [Silence(node, {"n1": NOTHING, "n5": NOTHING}) for node in ("n2", "n3", "n4")]
    assert judge("n1", 4, ["n5"], silent, controller=True).cut_off
    assert silence.SILENCE_S <= 5.0


def test_unless_slurm_does_not_reach_them_either():
    silent = [Silence(node, {}) for node in ("n3", "n4")]
    judgement = judge("n1", 3, ["n2"], silent, controller=None, down={"n3", "n4"})
    assert (judgement.cut_off, judgement.lost) == (False, ["n3", "n4"])
    judgement = judge("n1", 3, ["n2"], silent, controller=None, down={"n4"})
    assert judgement.lost == ["n4"]


@pytest.mark.parametrize(("for_s", "gone"), [(10.0, []), (40.0, ["n2"])])
def test_a_member_that_answers_others_and_does_not_report_is_not_watched(for_s, gone):
    silent = [Silence("n2", {"n3": ANSWERS, "n1": NOTHING}, for_s)]
    assert list(judge("n1", 3, ["n3", "n4"], silent, controller=None).gone) == gone


@settings(deadline=None)
@given(st.integers(1, 1500))
def test_the_tree_is_two_levels_deep_and_nobody_has_many_to_hear(size):
    nodes = [f"n{i}" for i in range(size)]
    parent = parents(nodes)
    inner = set(nodes[1:]) - set(parent)
    if size <= FLAT_UP_TO:
        assert not parent
        return
    assert set(parent.values()) <= inner, "inner members report to the leader"
    most = max(len(inner), *Counter(parent.values()).values())
    assert most <= size**0.5 + 1


def view(**more):
    values = {name: 0 for name in RankView.__dataclass_fields__}
    strings = {"node": "n2", "phase": "training", "collective": "all_reduce", "proc_state": "S"}
    return RankView(**{**values, **strings, **more})


def test_a_view_is_as_old_at_the_leader_as_its_way_took():
    read = NodeReport(read_at=100.0, offset_s=0.0, attempt=3, rows=[to_row(view(age_s=0.25))])
    at_parent = NodeReport.from_wire(read.to_wire(now=101.0), now=55.0, hop_s=0.5)
    at_leader = NodeReport.from_wire(at_parent.to_wire(now=55.75), now=9.0, hop_s=2.0)
    (seen,) = at_leader.views(now=9.5)
    assert seen.age_s == pytest.approx(0.25 + 1.0 + 0.75 + 0.5)
    assert (at_leader.offset_s, at_leader.attempt) == (2.5, 3)
    assert from_row(to_row(view(step=7)), 0.0).step == 7


def test_an_offset_is_that_of_the_quickest_ping():
    clock = ClockOffset()
    assert clock.offset_s is None
    clock.add(sent_at=10.0, answered_at=105.0, received_at=20.0)
    clock.add(sent_at=30.0, answered_at=120.05, received_at=30.1)
    clock.add(sent_at=40.0, answered_at=131.9, received_at=41.0)
    clock.add(sent_at=50.0, answered_at=10.0, received_at=49.0)
    assert clock.offset_s == pytest.approx(90.0)
