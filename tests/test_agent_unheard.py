"""The batch node is lost, or its agent does not begin, before the others have heard where it is."""

import dataclasses
import socket

import pytest
from fakes.agents import Job, is_gone

from ftslurm.agent import unheard
from ftslurm.agent.ask import address_file, key_file
from ftslurm.agent.main import Agent, _address
from ftslurm.files import write_json
from ftslurm.run.layout import RunLayout
from ftslurm.run.node_memory import read_node_events

UNLED = """
import os, sys
from ftslurm.agent import main, unheard
main.LEADER_WITHIN_S, unheard.TURN_S = 1.0, float(os.environ["TURN_S"])
unheard._is_there = lambda host: os.path.exists(os.environ["FOLDER"] + "/there")
sys.exit(main.main())
"""


TURN_S = 30
"""Longer than it takes to queue a job, on a machine that stands still meanwhile."""


class Unled(Job):
    """A job without a leader. The others wait for it a second in place of two minutes. A node of
    this machine always answers: whether it does is a file."""

    def start(self, node):
        if node != self.nodes[0]:
            turn_s = TURN_S if len(self.nodes) > 2 else 0.1
            super().start(node, ("-c", UNLED), TURN_S=str(turn_s))

    def are_all_live(self):
        return True  # none has a leader to be taken in by


def test_the_members_of_a_batch_node_that_is_lost_at_once_give_the_run_its_next_job(tmp_path):
    with Unled(tmp_path, nodes=3) as job:
        first = job.nodes[0]
        job.wait(lambda: f"{first} was never heard" in job.said(), "Slurm has not noticed it yet")
        assert not job.calls("sbatch")
        (tmp_path / "nodes").write_text(f"NodeName={first} State=MIXED+NOT_RESPONDING\n")
        done = lambda: all(map(is_gone, job.processes.values()))  # noqa: E731
        # They look every 60 s in the end.
        job.wait(done, "each has done its part, or found it done", timeout_s=240)
        assert [one.returncode for one in job.processes.values()] == [0, 0], job.said()
        assert job.calls("scancel")
        (sbatch,) = job.calls("sbatch")
        assert f"--exclude={first}" in sbatch and "afterany" not in sbatch
        assert {event.node for event in read_node_events(job.layout)} == {first}


def test_where_the_node_is_there_all_leave_so_that_they_are_started_again(tmp_path):
    (tmp_path / "there").touch()
    (tmp_path / "nodes").write_text("NodeName=127.0.0.1 State=MIXED+NOT_RESPONDING\n")
    with Unled(tmp_path, nodes=2) as job:
        (member,) = job.processes.values()
        assert member.wait(180) == 1
        assert "has not begun within 1 s, and its node answers" in job.said()
        assert not job.calls("sbatch") and not job.calls("scancel")


@pytest.mark.parametrize("word", ["CANCELLED", "COMPLETING", "PENDING"])
def test_for_a_job_that_somebody_has_ended_or_queued_again_nothing_is_queued(tmp_path, word):
    (tmp_path / "nodes").write_text("NodeName=127.0.0.1 State=MIXED+NOT_RESPONDING\n")
    (tmp_path / "job").write_text(f"{word}|None|Unknown\n")
    with Unled(tmp_path, nodes=2) as job:
        (member,) = job.processes.values()
        assert member.wait(180) == 1
        assert f"and job 77 is {word}; this node goes without" in job.said()
        assert not job.calls("sbatch") and not job.calls("scancel")


def test_no_two_members_act_at_the_same_time_whenever_they_have_looked():
    looked_at = [1e9 - unheard.TURN_S * n for n in range(100)]
    turns = [at + unheard.until_turn_s(n, 100, at) for n, at in enumerate(looked_at)]
    assert all(0 <= turn - at < 100 * unheard.TURN_S for turn, at in zip(turns, looked_at))
    turns.sort()
    apart = [after - before for before, after in zip(turns, turns[1:])]
    assert min(apart) >= unheard.TURN_S - 1e-3


@pytest.mark.parametrize(
    ("found", "is_there"),
    [(ConnectionRefusedError, True), (TimeoutError, False), (socket.gaierror, False)],
)
def test_a_node_that_refuses_is_there_and_one_that_says_nothing_is_not(
    found, is_there, monkeypatch
):
    def connect(address, timeout):
        raise found

    monkeypatch.setattr(socket, "create_connection", connect)
    assert unheard._is_there("n1") is is_there


def test_agents_that_are_started_again_do_not_follow_the_leader_before_them(tmp_path):
    layout = RunLayout(tmp_path)
    layout.submit.mkdir()
    key_file(layout, "7").write_text("00" * 32)
    record = {"leader": "n0", "host": "h", "port": 1, "restart_count": 0, "step_id": "0"}
    write_json(address_file(layout, "7"), {"schema_version": 1, **record})
    agent = Agent(layout, None, None, "7", "n1", ["n0", "n1"], {"SLURM_STEP_ID": "0"})
    assert _address(agent).port == 1
    assert _address(dataclasses.replace(agent, environ={"SLURM_STEP_ID": "9"})) is None
