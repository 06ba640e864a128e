"""A sweep of 2 x 3 on real Slurm, two of whose tasks are preempted and two lose a node in the midst
of a step: all six end with the values of undisturbed runs, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

import pytest
from batch_runs import make_project
from fakes.project import Run, overrides, slow_while
from lab import Lab, wait_until

from ftslurm.run.attempts import numbers, read_progress
from ftslurm.run.jobs import read_jobs
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.scheduler.hostlist import expand

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SWEPT = ["seed=1,2", "steps=100,110,120"]
TASKS = 6
INTERVAL, HELD_AT = 20, 26


class Sweep:
    """Submitted by the lab's ordinary user; two ranks a task."""

    def __init__(self, lab: Lab, folder: Path, *words: str) -> None:
        self.lab, self.folder = lab, folder
        self.told = self.ftslurm("submit", "-m", "--json", *words)
        self.layout = SweepLayout(Path(self.told["sweep_dir"]))
        self.runs = [Run(self.layout.task(number).root) for number in range(TASKS)]

    def ftslurm(self, *words: str, check: bool = True) -> dict[str, Any]:
        argv = [str(self.lab.python), "-m", "ftslurm", *words]
        environ = {"PYTHONPATH": str(self.lab.checkout)}
        done = self.lab.run_as(
            self.lab.user, argv, env=environ, cwd=self.folder, timeout_s=300, check=check
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def states(self) -> list[str]:
        told = self.ftslurm("status", str(self.layout.root), "--json")
        return [task["state"] for task in told["tasks"]]

    def step(self, task: int, attempt: int = 1) -> int:
        paths = self.runs[task].layout.attempt(attempt)
        progress = read_progress(paths) if paths.root.exists() else None
        return 0 if progress is None else progress.step

    def job(self, task: int) -> str:
        return read_jobs(self.runs[task].layout)[0].job_id

    def nodes(self, task: int) -> str:
        return self.lab.show_job(self.job(task))["NodeList"]

    def says(self) -> str:
        told = [f"=== task {task}\n{run.says()}" for task, run in enumerate(self.runs)]
        return "\n".join([self.lab.queue(), *told])

    def digests(self) -> list[str]:
        return [run.digest for run in self.runs]


@pytest.fixture
def patient_lab(lab: Lab) -> Iterator[Lab]:
    """SlurmdTimeout as sites have it: what is told sooner is told by the agents."""
    lab.change_settings(slurmd_timeout_s=300)
    yield lab
    lab.reset()


def given(step_s: float, *placed: str) -> Sequence[str]:
    words = overrides(steps=100, interval=INTERVAL, step_s=step_s, more=placed)
    return [*SWEPT, *(word for word in words if not word.startswith("steps="))]


ON_SLURM = ["cluster=slurm", "cluster.nodes=2", "cluster.tasks_per_node=1", "name=disturbed",
            "cluster.partition=low", "cluster.signal_lead_s=30",
            "health.preflight=never"]  # fmt: skip
HERE = ["cluster=local", "cluster.tasks_per_node=2", "name=undisturbed"]


def rows_are_whole(lab: Lab, job_id: str) -> None:
    """Wait until accounting knows that the job has ended: rows come late."""

    def ended() -> Optional[bool]:
        states = [row["State"] for row in lab.sacct_rows(job_id)]
        return (bool(states) and "RUNNING" not in states) or None

    wait_until(ended, timeout_s=120, seen=lambda: f"{lab.sacct_rows(job_id)}")


def test_six_tasks_end_with_the_values_of_undisturbed_runs(patient_lab: Lab) -> None:
    lab, folder = patient_lab, make_project(patient_lab, "sweep", files={})
    slow = folder / "slow"
    slow.touch()
    held = slow_while(slow, since=HELD_AT)
    sweep = Sweep(lab, folder, "--detach", *given(0.03, *held, *ON_SLURM))
    array = {sweep.job(task).partition("_")[0] for task in range(TASKS)}
    assert len(array) == 1, "one sbatch for all"

    # Four tasks fill the four nodes of two CPUs, two of them a pair of nodes.
    first = range(4)
    wait_until(
        lambda: all(sweep.step(task) >= HELD_AT for task in first) or None,
        timeout_s=150,
        seen=sweep.says,
    )
    pairs = [sweep.nodes(task) for task in first]
    preempted = [task for task in first if pairs[task] == pairs[0]]
    others = [task for task in first if task not in preempted]
    assert len(preempted) == len(others) == 2, pairs
    lab.preempt(2, nodelist=pairs[0], seconds=2)
    for task in preempted:
        wait_until(
            lambda task=task: sweep.runs[task].decisions() == ["requeued"] or None,
            timeout_s=120,
            seen=sweep.says,
        )
    batch_node = lab.show_job(sweep.job(others[0]))["BatchHost"]
    lab.cut(next(node for node in expand(pairs[others[0]]) if node != batch_node))
    slow.unlink()
    for task in preempted:
        lab.hasten(sweep.job(task))
    undisturbed = Sweep(lab, folder, *given(0.0, *HERE))
    wait_until(
        lambda: sweep.states() == ["done"] * TASKS or None,
        timeout_s=300,
        seen=sweep.says,
        interval_s=2,
    )
    assert sweep.digests() == undisturbed.digests()
    assert len(set(sweep.digests())) == TASKS
    attempts = [len(numbers(run.layout)) for run in sweep.runs]
    assert all(attempts[task] == 2 for task in (*preempted, *others)), attempts
    assert [attempts[task] for task in (4, 5)] == [1, 1], "theirs is not the others' trouble"
    assert [sweep.runs[task].steps_trained_twice for task in preempted] == [0, 0]
    for task in others:
        again = read_progress(sweep.runs[task].layout.attempt(2))
        from_step = (again and again.restored_step) or 0
        assert from_step >= INTERVAL, "from its own checkpoint"
    for run in sweep.runs:
        rows_are_whole(lab, read_jobs(run.layout)[-1].job_id)
    told = sweep.ftslurm("report", str(sweep.layout.root), "--json", check=False)
    causes = [[a["cause"] for a in job["attempts"] if a["cause"]] for job in told["jobs"]]
    expected = {**dict.fromkeys(preempted, ["preempted"]), **dict.fromkeys(others, ["node"])}
    assert causes == [expected.get(task, []) for task in range(TASKS)]
