"""What the leader does for what it finds: whose ranks it has leave, and whose word it keeps."""

import time
from functools import partial
from types import SimpleNamespace

import pytest
from fakes.views import silent

from ftslurm.agent.leader import Leader
from ftslurm.agent.member import Member
from ftslurm.agent.report import AgentFinding
from ftslurm.agent.trial import Trial
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import RecoverySpec


@pytest.fixture
def trial(tmp_path):
    paths = RunLayout(tmp_path).attempt(1)
    return Trial(1, ["n1", "n2"], 4, paths, RecoverySpec(evict="now"))


@pytest.mark.parametrize(("needed", "acts"), [((), True), (("n2",), False), (("n1",), True)])
def test_a_node_that_the_run_cannot_do_without_is_not_given_up_for_being_slow(trial, needed, acts):
    slow = SimpleNamespace(kind="straggler", ranks=(3,), nodes=("n2",), why="slow")
    trial._stragglers = SimpleNamespace(observe=lambda views, at: [slow])
    trial.needed = frozenset(needed)
    (finding,) = trial._slow([], 0.0)
    assert (finding.acted, trial.is_leaving) == (acts, acts)


def test_of_a_hung_attempt_only_its_own_nodes_are_heard(trial):
    asked = {}
    keeping = SimpleNamespace(
        stacks=lambda trial, nodes, then: asked.update(stacks=list(nodes)),
        nodes=lambda trial, nodes, for_s, then: asked.update(nodes=list(nodes)),
    )
    # n3 is a spare, n4 was given up, and the agent on n2 has ended.
    leader = SimpleNamespace(roll=SimpleNamespace(live=["n1", "n3", "n4"]), keeping=keeping)
    Leader._end_hung(leader, trial, AgentFinding("hang", 1.0, 1.0, "no rank goes on"))
    assert asked == {"stacks": ["n1"], "nodes": ["n1"]} and trial.is_ending


def test_a_hang_that_is_due_before_the_next_tick_is_looked_for_when_it_is(trial, monkeypatch):
    """And slow ranks are not judged by that look: two of them stand for two seconds."""
    looks, timers = [], []
    trial._stragglers = SimpleNamespace(observe=lambda views, at: looks.append("slow") or [])
    leader = SimpleNamespace(
        trial=trial,
        _is_cut_off=False,
        roll=SimpleNamespace(is_any_suspect=lambda nodes: False, unseen=lambda nodes: 0),
        loop=SimpleNamespace(later=lambda delay_s, act: timers.append((delay_s, act))),
        _views=lambda: [silent(rank, age_s) for rank in range(4)],
        _note=lambda finding: looks.append(finding.kind),
        _end_hung=lambda trial, finding: looks.append("ended"),
    )
    leader._judge_ranks = partial(Leader._judge_ranks, leader)
    clock = SimpleNamespace(monotonic=lambda: 1000.0 + age_s)
    monkeypatch.setattr("ftslurm.agent.leader.time", clock)
    age_s = 12.0
    leader._judge_ranks()
    ((due_in_s, look_again),) = timers
    assert due_in_s == pytest.approx(0.3, abs=0.02)
    assert looks == ["slow"]
    age_s = 12.4
    look_again()
    assert looks == ["slow", "hang", "ended"] and len(timers) == 1


def test_a_rank_that_storage_holds_up_is_told_of_and_ends_nothing(trial):
    held_up = silent(0, 15, in_collective=False, proc_state="D", collective_seq=499)
    (finding,) = trial.judge([held_up, *(silent(rank, 15) for rank in (1, 2, 3))], at=100.0)
    assert (finding.kind, finding.acted, finding.ranks) == ("blocked", False, [0])


def test_a_member_looks_at_its_ranks_when_it_reports_on_them():
    done = []
    now = time.monotonic()
    member = SimpleNamespace(
        heard_at=now, _parent_at=now, _ticked_at=now, _up=object(),
        _branch=SimpleNamespace(beat=lambda silent_s: None),
        _look=lambda: done.append("look"), _report=lambda: done.append("report"),
    )  # fmt: skip
    Member._tick(member)
    assert done == ["look", "report"]
