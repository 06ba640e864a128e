"""A sweep whose submitting shell is killed while it queues: told, cancelled and resumed from new
shells, on real Slurm. One group of its tasks runs by then, of the other Slurm has never heard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from batch_runs import make_project
from fakes.project import Run, overrides, slow_while
from lab import Lab, wait_until

from ftslurm.files import append_records, read_records
from ftslurm.run.attempts import read_progress
from ftslurm.run.jobs import read_jobs
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.scheduler.lost_arrays import OPEN_S

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

INTERVAL, HELD_AT = 15, 20
LONG_S = 600.0
"""Longer than what is done while Slurm's answer may still come, however slow the machine is."""

# The second group's sbatch never comes to its word.
SBATCH = """#!/bin/sh
case "$*" in *group-001*) touch "$HANGS"; exec sleep 400;; esac
PATH=$PLAIN exec sbatch "$@"
"""


class Shell:
    """New ones: nothing is known in them but the sweep's folder."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder

    @property
    def layout(self) -> SweepLayout:
        (found,) = self.folder.glob("runs/*/sweep.json")
        return SweepLayout(found.parent)

    def ftslurm(self, verb: str) -> dict[str, Any]:
        argv = [str(self.lab.python), "-m", "ftslurm", verb, self.layout.sweep_id, "--json"]
        environ = {"PYTHONPATH": str(self.lab.checkout)}
        done = self.lab.run_as(
            self.lab.user, argv, env=environ, cwd=self.folder, timeout_s=200, check=False
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (0 if answer.get("ok", True) else 1), done.stderr
        return answer

    def age(self, seconds: float) -> None:
        """As if what is written down of its arrays had been so long ago."""
        path = self.layout.arrays_jsonl
        records = [*read_records(path)]
        path.write_text("")  # in place: it stays its owner's
        append_records(path, [{**record, "at": record["at"] - seconds} for record in records])

    def states(self) -> list[str]:
        return [task["state"] for task in self.ftslurm("status")["tasks"]]

    def runs(self) -> list[Run]:
        return [Run(self.layout.task(number).root) for number in range(4)]

    def says(self) -> str:
        words = [run.says() for run in self.runs()]
        return "\n".join([(self.folder / "submit.log").read_text(), *words])


def submit_and_kill(lab: Lab, folder: Path) -> None:
    """Kill the shell of the submit, and all it has started, in the midst of its second sbatch."""
    environ = {
        "PYTHONPATH": str(lab.checkout),
        "HANGS": str(folder / "hangs"),
        "PLAIN": lab.environment["PATH"],
        "PATH": f"{folder}/bin:{lab.environment['PATH']}",
    }
    placed = ["cluster=slurm", "cluster.tasks_per_node=1", "cluster.partition=low",
              "cluster.signal_lead_s=30", "health.preflight=never", "cluster.nodes=1,2",
              "+user.tag=0,1"]  # fmt: skip
    held = slow_while(folder / "slow", since=HELD_AT)
    given = [*placed, *held, *overrides(steps=60, interval=INTERVAL, step_s=0.03)]
    argv = [str(lab.python), "-m", "ftslurm", "submit", "-m", *given]
    behind = 'setsid "$@" >submit.log 2>&1 & echo $!'
    told = lab.run_as(lab.user, ["sh", "-c", behind, "sh", *argv], env=environ, cwd=folder).stdout
    try:
        wait_until(
            lambda: (folder / "hangs").exists() or None,
            timeout_s=150,
            seen=lambda: (folder / "submit.log").read_text(),
        )
    finally:
        lab.run_as_root("kill", "-KILL", "--", f"-{told.strip()}")


def has_committed(run: Run) -> bool:
    attempt = run.layout.attempt(1)
    progress = read_progress(attempt) if attempt.root.exists() else None
    return progress is not None and progress.committed_step is not None


def test_a_sweep_outlives_the_shell_that_submits_it(lab: Lab) -> None:
    folder = make_project(lab, "sweep", files={})
    lab.run_as(lab.user, ["mkdir", str(folder / "bin")])
    (folder / "bin" / "sbatch").write_text(SBATCH)
    (folder / "bin" / "sbatch").chmod(0o755)
    (folder / "slow").touch()
    submit_and_kill(lab, folder)
    shell = Shell(lab, folder)
    wait_until(
        lambda: all(map(has_committed, shell.runs()[:2])) or None, timeout_s=150, seen=shell.says
    )
    shell.age(-LONG_S)
    assert shell.states() == ["running", "running", "unknown", "unknown"], shell.says()

    told = shell.ftslurm("cancel")
    assert told["result"] == "cancelled" and "nobody knows whether it has a job" in told["text"]
    wait_until(
        lambda: shell.states() == ["cancelled"] * 2 + ["unknown"] * 2 or None,
        timeout_s=120,
        seen=shell.says,
    )
    (folder / "slow").unlink()
    queue = ["squeue", "--noheader", f"--user={lab.user}", "--format=%i %T"]
    assert lab.run_as_root(*queue) == "", "nothing is queued after a cancel"

    told = shell.ftslurm("resume")
    assert told["result"] == "queued" and told["text"].startswith("2 tasks are queued"), told
    assert "2 may have a job" in told["text"], "an sbatch may outlive its shell"
    shell.age(LONG_S + OPEN_S)
    told = shell.ftslurm("resume")
    assert told["ok"] and told["text"].startswith("2 tasks are queued"), told
    assert shell.ftslurm("resume")["result"] == "nothing", "all are alive"
    wait_until(lambda: shell.states() == ["done"] * 4 or None, timeout_s=200, seen=shell.says)
    runs = shell.runs()
    jobs = [len(read_jobs(run.layout)) for run in runs]
    assert jobs == [2, 2, 1, 1]
    for run in runs[:2]:
        progress = read_progress(run.layout.attempt(2))
        assert progress is not None and progress.restored_step, "from its own checkpoint"
        assert len(run.losses) == 60
    assert runs[0].digest == runs[1].digest and runs[2].digest == runs[3].digest
