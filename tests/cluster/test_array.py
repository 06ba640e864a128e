"""Arrays on the real cluster: each task is a run of its own, and is requeued or resubmitted by
itself; together they run no more at once than the sweep allows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from batch_runs import make_project
from fakes.project import Run, overrides, slow_while
from lab import ENDED, Lab, wait_until

from ftslurm.run.attempts import read_progress
from ftslurm.run.jobs import read_jobs
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import ASKED, add_array
from ftslurm.scheduler.lost_arrays import find_lost
from ftslurm.scheduler.slurm import Completed, SlurmScheduler

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PLACED = ["cluster=slurm", "cluster.tasks_per_node=1", "cluster.partition=low",
          "cluster.signal_lead_s=30", "health.preflight=never"]  # fmt: skip


class Swept:
    """A sweep that nobody follows. Each task takes a minute, unless it is let go before."""

    def __init__(self, lab: Lab, count: int, *words: str) -> None:
        self.lab, self.folder = lab, make_project(lab, "swept", files={})
        self._kept = self.folder / "kept"
        self._kept.touch()
        given = [*PLACED, *words, *slow_while(self._kept, since=2)]
        given += overrides(steps=60, interval=15, step_s=0.03)
        told = self.ftslurm("submit", "-m", "--json", "--detach", *given)
        self.layout = SweepLayout(Path(told["sweep_dir"]))
        self.runs = [Run(self.layout.task(number).root) for number in range(count)]

    def let_go(self) -> None:
        self._kept.unlink()

    def ftslurm(self, *words: str) -> dict[str, Any]:
        argv = [str(self.lab.python), "-m", "ftslurm", *words]
        environ = {"PYTHONPATH": str(self.lab.checkout)}
        told = self.lab.run_as(
            self.lab.user, argv, env=environ, cwd=self.folder, timeout_s=110
        ).stdout
        answer: dict[str, Any] = json.loads(told)
        return answer

    def status(self) -> list[dict[str, Any]]:
        tasks: list[dict[str, Any]] = self.ftslurm("status", str(self.layout.root), "--json")[
            "tasks"
        ]
        return tasks

    def jobs(self, task: int) -> list[str]:
        return [job.job_id for job in read_jobs(self.runs[task].layout)]

    def is_training(self, task: int, attempt: int = 1) -> bool:
        paths = self.runs[task].layout.attempt(attempt)
        progress = read_progress(paths) if paths.root.exists() else None
        return progress is not None and progress.step > 3

    def says(self) -> str:
        return "\n".join([self.lab.queue(), *(run.says() for run in self.runs)])


def test_a_task_that_is_asked_to_leave_is_requeued_alone(lab: Lab) -> None:
    folder = make_project(lab, "array", files={})
    placed = ["cluster=slurm", "cluster.nodes=1", "cluster.tasks_per_node=2",
              "cluster.partition=low", "cluster.signal_lead_s=30"]  # fmt: skip
    kept = folder / "kept"
    kept.touch()
    argv = [str(lab.python), str(lab.checkout / "tests/cluster/submit_array.py"), "3"]
    told = lab.run_as(
        lab.user,
        [
            *argv,
            *placed,
            *slow_while(kept, since=2),
            *overrides(steps=60, interval=20, step_s=0.03),
        ],
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

    wait_until(lambda: all(map(is_training, runs)) or None, timeout_s=120, seen=says)
    # The last task's own job id is that of the whole array: the one to get wrong.
    lab.run_as(lab.user, ["scancel", "--signal=USR1", jobs[2]])
    wait_until(lambda: runs[2].decisions() == ["requeued"] or None, timeout_s=120, seen=says)
    kept.unlink()
    lab.hasten(jobs[2])
    for job in jobs:
        lab.wait_for_state(job, ENDED, 120)
    assert [run.decisions() for run in runs] == [["done"], ["done"], ["requeued", "done"]], says()
    assert [run.steps_trained_twice for run in runs] == [0, 0, 0]
    lab.wait_for_runs(jobs[2], ["REQUEUED", "COMPLETED"])
    lab.wait_for_runs(jobs[0], ["COMPLETED"])


def test_arrays_run_no_more_tasks_at_once_than_the_sweep_allows(lab: Lab) -> None:
    """Two arrays, as the tasks ask for different nodes; one task is requeued in the midst."""
    words = ["--parallelism", "3", "cluster.nodes=1,2", "+user.tag=0,1"]
    swept = Swept(lab, 4, *words)
    running: list[int] = []

    def sample() -> int:
        argv = ["squeue", "--noheader", "--array", "--states=RUNNING", "--format=%i"]
        jobs = set(lab.run_as_root(*argv).split())
        # One that is DONE has only its job to leave.
        over = [run.layout for run in swept.runs if run.layout.done.exists()]
        running.append(len(jobs - {job.job_id for run in over for job in read_jobs(run)}))
        return running[-1]

    wait_until(
        lambda: (sample() >= 3 and swept.is_training(0)) or None, timeout_s=120, seen=swept.says
    )
    job = swept.jobs(0)[0]
    # While other tasks of the array wait, scancel goes on asking for a minute after the signal has
    # gone out (22.05, seen).
    lab.run_as(lab.user, ["timeout", "5", "scancel", "--signal=USR1", job], check=False)
    wait_until(
        lambda: (sample() >= 0 and swept.runs[0].decisions() == ["requeued"]) or None,
        timeout_s=120,
        seen=swept.says,
    )
    swept.let_go()
    lab.hasten(job)
    ended = [["requeued", "done"], *[["done"]] * 3]
    wait_until(
        lambda: (sample() >= 0 and [run.decisions() for run in swept.runs] == ended) or None,
        timeout_s=180,
        seen=swept.says,
    )
    assert max(running) == 3, running
    arrays = {swept.jobs(task)[0].partition("_")[0] for task in range(4)}
    assert len(arrays) == 2


def test_a_task_that_gets_a_new_job_each_time_ends_with_the_same_value(lab: Lab) -> None:
    words = ["recovery.continue_by=resubmit", "cluster.cpus_per_task=2", "+user.tag=0,1"]
    swept = Swept(lab, 2, *words)
    wait_until(lambda: all(map(swept.is_training, (0, 1))) or None, timeout_s=120, seen=swept.says)
    (first, waits) = swept.jobs(1)
    assert first.endswith("_1") and waits.isdigit(), "its successor is in no array"
    lab.preempt(1, nodelist=lab.show_job(first)["NodeList"], seconds=1)
    wait_until(lambda: swept.is_training(1, attempt=2) or None, timeout_s=120, seen=swept.says)
    told = swept.status()
    swept.let_go()
    assert [(task["state"], task["attempts"]) for task in told][1] == ("running", 2)
    assert told[1]["job_id"] == waits
    ended = [["done"], ["requeued", "done"]]
    wait_until(
        lambda: [run.decisions() for run in swept.runs] == ended or None,
        timeout_s=180,
        seen=swept.says,
    )
    assert swept.runs[0].digest == swept.runs[1].digest
    assert swept.runs[1].steps_trained_twice == 0
    assert [(task["state"], task["attempts"]) for task in swept.status()] == [
        ("done", 1),
        ("done", 2),
    ]
    wait_until(lambda: lab.queue() == "" or None, timeout_s=120, seen=swept.says)


def test_what_was_queued_and_its_answer_lost_is_found_by_its_script(lab: Lab) -> None:
    """An array, and a task that was queued alone."""
    layout = SweepLayout(make_project(lab, "lost", files={}) / "sweep-1")
    numbers = range(1000, 1004)
    for folder in (layout.submit, *(layout.task(number).submit for number in (*numbers, 1004))):
        folder.mkdir(parents=True)
    own, single = layout.group_script(0, 1000), layout.task(1004).script
    for script in (layout.group_script(0), own, single):
        script.write_text("#!/bin/bash\nexec sleep 600\n")
    placed = ["--hold", "--partition=low", "--output=/dev/null"]
    together = [*placed, "--array=0-3%2"]
    other = lab.sbatch_as(lab.user, *together, str(layout.group_script(0)), "0")
    array = lab.sbatch_as(lab.user, *together, str(own), "1000")
    alone = lab.sbatch_as(lab.user, *placed, str(single))
    lab.run_as(lab.user, ["scancel", f"{array}_3"])

    shutil.chown(layout.root, lab.user)

    def run(argv: Sequence[str], timeout_s: float) -> Completed:
        done = lab.run_as("root", argv, timeout_s=timeout_s, check=False)  # an operator asks
        return Completed(done.returncode, done.stdout, done.stderr)

    add_array(layout, ASKED, 0, numbers, offset=1000, at_once=2)
    add_array(layout, ASKED, 0, [1004], alone=True)
    found, by_itself = find_lost(layout, run=run)
    assert (found.array_id, found.at_once) == (array, 2) and array != other
    assert [read_jobs(layout.task(number))[0].job_id for number in numbers] == [
        f"{array}_{index}" for index in range(4)
    ]
    assert by_itself.job_id(1004) == read_jobs(layout.task(1004))[0].job_id == alone
    assert find_lost(layout, run=run) == []


def test_a_task_is_told_the_same_by_the_number_that_is_its_own(lab: Lab) -> None:
    """Running, in its grace, requeued, running again, torn down, cancelled; the last task, whose
    number is the array's, is asked for as before."""
    lab.change_settings(grace_s=30, kill_wait_s=60)
    folder = make_project(lab, "told", files={})
    # Each time that one is to go it stays for KillWait, or until it is let go.
    script = f"""
trap '' TERM
while [ ! -e {folder}/let-go-$SLURM_ARRAY_TASK_ID-${{SLURM_RESTART_COUNT:-0}} ]; do sleep 0.2; done
"""

    def let_go(task: str, times: int) -> None:
        _, number = task.split("_")
        (folder / f"let-go-{number}-{times}").touch()

    placed = ["--array=0-2", "--partition=low", "--exclusive", "--requeue", "--output=/dev/null"]
    array = lab.sbatch_as(lab.user, *placed, script=script)
    job, last = f"{array}_1", f"{array}_2"
    for task in (job, last):
        lab.wait_for_state(task, ["RUNNING"], 100)
    own = {task: lab.show_job(task)["JobId"] for task in (job, last)}
    assert own[job] != array and own[last] == array
    asked: list[str] = []

    def run(argv: list[str], timeout_s: float) -> Completed:
        asked.append(" ".join(argv))
        done = lab.run_as(lab.user, argv, timeout_s=timeout_s, check=False)
        return Completed(done.returncode, done.stdout, done.stderr)

    def inside(task: str) -> SlurmScheduler:
        _, number = task.split("_")
        names = {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": number}
        return SlurmScheduler(run, environ={"SLURM_JOB_ID": own[task], **names})

    def facts(scheduler: SlurmScheduler, task: str) -> tuple[Any, ...]:
        state = scheduler.job_state(task)
        return (
            state.word,
            state.reason,
            scheduler.is_preempted(task),
            scheduler.may_requeue(task),
            scheduler.end_time(task),
        )

    def wait_for(word: str, *preempted: Any, task: str = job) -> None:
        outside = SlurmScheduler(run, environ={})

        def told() -> Any:
            found = facts(inside(task), task)
            is_same = found == facts(outside, task)
            return (is_same and found[0] == word and found[2] in (preempted or (False,))) or None

        wait_until(told, timeout_s=100, seen=lambda: str([facts(inside(task), task), lab.queue()]))

    wait_for("RUNNING")
    wait_for("RUNNING", task=last)
    lab.preempt(1, nodelist=lab.show_job(job)["NodeList"], seconds=1)
    wait_for("RUNNING", True)
    lab.wait_for_state(job, ["COMPLETING"], 100)  # its grace is over
    let_go(job, 0)
    wait_for("PENDING", True, False)  # forgotten by then on 22.05
    lab.hasten(job)
    wait_for("RUNNING")
    assert inside(job).requeue(job, restart_count=1)
    wait_for("COMPLETING")
    let_go(job, 1)
    wait_for("PENDING")
    assert lab.show_job(job)["Restarts"] == "2"
    assert lab.show_job(last)["Restarts"] == "0" and lab.job_state(last) == "RUNNING"
    let_go(last, 0)
    inside(job).cancel(job)
    wait_until(
        lambda: facts(inside(job), job)[0] == "CANCELLED" or None, timeout_s=100, seen=lab.queue
    )
    assert inside(job).requeue(job, restart_count=2) is False
    let_go(f"{array}_0", 0)
    named = {line.partition("--jobs=")[2].partition(" ")[0] for line in asked if "--jobs=" in line}
    assert named == {own[job], job, last}
