"""Slurm's word counts most where it is of this attempt, and is never waited for long."""

import time

import pytest
from fakes.left_behind import (
    NOW,
    Scheduler,
    agents,
    at,
    found,
    job_row,
    leave,
    make_run,
    rank_error,
    slurm,
)

from ftslurm.run.attempts import Attempt, claim


@pytest.fixture
def layout(tmp_path):
    return make_run(tmp_path)


@pytest.fixture
def paths(layout):
    return layout.attempt(1)


@pytest.mark.parametrize(("row", "cause"), [
    (job_row("NODE_FAIL", "1:0", "n2"), "node"),
    (job_row("PREEMPTED"), "preempted"),
    (job_row("TIMEOUT"), "time_limit"),
    (job_row("CANCELLED by 424242"), "cancelled_admin"),
    (job_row("CANCELLED by OWNER"), "cancelled_user"),
    (job_row("RUNNING"), "code"),
    (job_row("NODE_FAIL", "1:0", "n2", restarts=1), "code"),  # another run of the job
])  # fmt: skip
def test_slurms_word_on_this_run_of_the_job_counts_most(layout, paths, row, cause):
    rank_error(paths, 3, NOW, "KeyError", "'x'")
    row = row.replace("OWNER", str(layout.root.stat().st_uid))
    finding, _ = found(layout, scheduler=Scheduler(), run=slurm(row))
    assert finding.cause == cause
    if cause == "node":
        assert finding.blamed_node == "n2"


def test_steps_count_within_the_attempt_only(layout):
    step = f"118.2|OUT_OF_MEMORY|0:125|{at(NOW)}|{at(NOW + 30)}|||0"
    old = f"118.1|OUT_OF_MEMORY|0:125|{at(NOW - 90)}|{at(NOW - 60)}|||0"
    running = job_row("RUNNING")
    assert found(layout, scheduler=Scheduler(), run=slurm(running, step))[0].cause == "oom_host"
    assert found(layout, scheduler=Scheduler(), run=slurm(running, old))[0].cause == "unknown"


def test_where_the_launcher_names_the_step_no_other_one_counts(layout, paths):
    leave(paths.root / "launcher.log", "srun: Terminating StepId=118.2\n")
    for step, cause in (("118.2", "oom_host"), ("118.0", "unknown")):
        # By a clock that is far off.
        row = f"{step}|OUT_OF_MEMORY|0:125|{at(NOW)}|{at(NOW - 90)}|||0"
        told = slurm(job_row("RUNNING"), row)
        assert found(layout, scheduler=Scheduler(), run=told)[0].cause == cause


def test_the_end_of_the_job_is_not_that_of_an_attempt_which_another_one_followed(layout):
    claim(layout, Attempt(0, "118", 0, ["n1", "n2"], claimed_at=NOW + 30))
    finding, _ = found(layout, scheduler=Scheduler(), run=slurm(job_row("TIMEOUT")))
    assert finding.cause == "unknown"


@pytest.mark.parametrize(("node", "cause"), [
    (f"NodeName=n2 State=DOWN* X=1 Reason=Not responding [slurm@{at(NOW + 9)}]", "node"),
    (f"NodeName=n2 State=IDLE+DRAIN X=1 Reason=Kill task failed [root@{at(NOW + 9)}]", "node"),
    (f"NodeName=n2 State=IDLE+DRAIN X=1 Reason=Kill task failed [root@{at(NOW - 99)}]", "unknown"),
    (f"NodeName=n2 State=IDLE+DRAIN X=1 Reason=new disks [root@{at(NOW + 9)}]", "unknown"),
    ("NodeName=n2 State=MIXED+CLOUD+POWERED_UP X=1", "unknown"),
])  # fmt: skip
def test_the_state_of_a_node_counts_where_its_reason_is_of_the_attempts_time(layout, node, cause):
    finding, _ = found(layout, scheduler=Scheduler(), run=slurm(nodes=f"{node}\n"))
    assert finding.cause == cause


def test_a_preemption_under_way_is_asked_for(layout, paths):
    rank_error(paths, 3, NOW, "KeyError", "'x'")
    finding, facts = found(layout, scheduler=Scheduler(preempted=True), run=slurm())
    assert finding.cause == "preempted" and facts.preempted is True


def test_slurm_that_does_not_answer_is_told_and_waited_for_to_the_deadline_only(layout, paths):
    rank_error(paths, 3, NOW, "KeyError", "'x'")
    began = time.monotonic()
    finding, facts = found(
        layout, scheduler=Scheduler(delay_s=60.0), run=slurm(rc=1), deadline_s=6.0
    )
    assert time.monotonic() - began < 40
    assert finding.cause == "code" and facts.preempted is None
    assert {"sacct gave no answer", "squeue gave no answer"} <= set(facts.unasked)


def test_slurm_is_not_waited_for_where_the_agents_have_lost_a_node(layout, paths):
    agents(paths, {"kind": "node_lost", "nodes": ["n2"], "why": "n2 is silent"})
    began = time.monotonic()
    finding, _ = found(layout, scheduler=Scheduler(delay_s=60.0), run=slurm())
    assert time.monotonic() - began < 40
    assert (finding.cause, finding.blamed_node) == ("node", "n2")


def test_without_a_scheduler_nothing_of_slurm_is_asked(layout):
    def run(argv, timeout_s):
        raise AssertionError(argv)

    assert found(layout, run=run)[1].unasked == ()
