"""Agents outlive TERM beside the ranks, and leave with a job that has nothing more to do."""

import signal
import time

from fakes.agents import Job, is_gone

from ftslurm.agent.member import PART_S
from ftslurm.agent.parting import LOOK_S
from ftslurm.files import write_json
from ftslurm.run.attempts import read_decision

LOOKS_S = 3 * LOOK_S + PART_S
"""In which agents that were to leave would have left: nothing tells of those that stay."""


def decide(job, attempt, action):
    path = job.layout.attempt(attempt).decision_json
    write_json(path, {"schema_version": 1, "action": action})
    assert read_decision(job.layout.attempt(attempt))["action"] == action


def test_agents_leave_once_term_has_come_and_nothing_follows_in_their_job(tmp_path):
    with Job(tmp_path, nodes=3) as job:
        attempt = job.claim()
        job.start_ranks(attempt)
        for process in job.processes.values():
            process.send_signal(signal.SIGTERM)
        decide(job, attempt, "restart")
        time.sleep(LOOKS_S)
        attempt = job.claim()
        time.sleep(LOOKS_S)
        assert job.are_all_live(), "the ranks' last save may take all of the grace"
        decide(job, attempt, "requeued")
        left = lambda: all(map(is_gone, job.processes.values()))  # noqa: E731
        job.wait(left, "all have left with the job")
        assert {one.returncode for one in job.processes.values()} == {0}, job.said()


def test_a_decision_alone_ends_no_agent(tmp_path):
    """Slurm may not have heard of it yet, and a batch node that dies now is seen by them alone."""
    with Job(tmp_path, nodes=2) as job:
        attempt = job.claim()
        decide(job, attempt, "requeued")
        for process in job.processes.values():
            process.send_signal(signal.SIGUSR1)
        time.sleep(LOOKS_S)
        assert job.are_all_live(), job.said()
