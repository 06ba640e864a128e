"""What the leader does for what it finds: whose ranks it has leave, and whose word it keeps."""

from types import SimpleNamespace

import pytest
from fakes.views import silent

from ftslurm.agent.leader import Leader
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


def test_a_rank_that_storage_holds_up_is_told_of_and_ends_nothing(trial):
    held_up = silent(0, 15, in_collective=False, proc_state="D", collective_seq=499)
    (finding,) = trial.judge([held_up, *(silent(rank, 15) for rank in (1, 2, 3))], at=100.0)
    assert (finding.kind, finding.acted, finding.ranks) == ("blocked", False, [0])
