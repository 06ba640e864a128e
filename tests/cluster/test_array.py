"""An array on the real cluster: each task is a run of its own, and is requeued by itself."""

from __future__ import annotations

import json

import pytest
from batch_runs import make_project
from fakes.project import Run, overrides
from lab import ENDED, Lab, wait_until

from ftslurm.run.attempts import read_progress

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]


def test_a_task_that_is_asked_to_leave_is_requeued_alone(lab: Lab) -> None:
    folder = make_project(lab, "array", files={})
    placed = ["cluster=slurm", "cluster.nodes=1", "cluster.tasks_per_node=2",
              "cluster.partition=low", "cluster.signal_lead_s=30"]  # fmt: skip
    argv = [str(lab.python), str(lab.checkout / "tests/cluster/submit_array.py"), "3"]
    told = lab.run_as(
        lab.user,
        [*argv, *placed, *overrides(steps=60, interval=20, step_s=0.2)],
        env={"PYTHONPATH": str(lab.checkout)},
        cwd=folder,
        timeout_s=110,
    ).stdout
    submitted = json.loads(told)
    runs, jobs = [Run(root) for root in submitted["runs"]], submitted["jobs"]
    array = jobs[0].partition("_")[0]
    assert jobs == [f"{array}_{task}" for task in range(3)]

    def says() -> str:
        return "\n".join(run.says() for run in runs)

    def is_training(run: Run) -> bool:
        attempt = run.layout.attempt(1)
        progress = read_progress(attempt) if attempt.root.exists() else None
        return progress is not None and progress.step > 3

    wait_until(lambda: all(map(is_training, runs)) or None, timeout_s=60, seen=says)
    # The last task's own job id is that of the whole array: the one to get wrong.
    lab.run_as(lab.user, ["scancel", "--signal=USR1", jobs[2]])
    wait_until(lambda: runs[2].decisions() == ["requeued"] or None, timeout_s=30, seen=says)
    lab.hasten(jobs[2])
    for job in jobs:
        lab.wait_for_state(job, ENDED, 90)
    assert [run.decisions() for run in runs] == [["done"], ["done"], ["requeued", "done"]], says()
    assert [run.steps_trained_twice for run in runs] == [0, 0, 0]
    lab.wait_for_runs(jobs[2], ["REQUEUED", "COMPLETED"])
    lab.wait_for_runs(jobs[0], ["COMPLETED"])
