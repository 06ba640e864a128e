"""Faults of known size on real Slurm, for a report to tell of: what was done to whom, and when.

Torch-free ranks whose trace has the time of each step. All runs lie in one folder, as a person's
do; four nodes have room for some of them at a time, so that the others wait in the queue.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, Optional

from batch_runs import LabRun
from lab import ENDED, Lab, wait_until

from ftslurm.run.attempts import read_events

GPUS = 2
"""Of a node."""
STEP_S = 0.1
STEPS, INTERVAL = 60, 20
CRASH = (27, 2)
"""Steps that were done when a rank is killed, and which rank."""
LOST_AFTER_S = 10
"""Slurm gives a node up that says nothing for so long."""
STALL_S = 2.0
"""That a save of the run to which nothing else happens stops it for."""
STALLED_AT = 40
FOREIGN_S = 4
FOREIGN_CODE = 3

TIMED = """
import dataclasses
import time

from tests.fakes import rank


class TimedTrace(rank.TraceWriter):
    def append(self, row):
        now = time.monotonic()
        super().append(dataclasses.replace(row, seconds=now - self.since))
        self.since = now


def train_one_step(self):
    if self.trace and not hasattr(self.trace, "since"):
        self.trace.since = time.monotonic()
    return train(self)


train, rank.FakeTraining.train_one_step = rank.FakeTraining.train_one_step, train_one_step
rank.TraceWriter = TimedTrace
main = rank.main
"""


class ToldRun(LabRun):
    """A run, and what slurmctld said of when it began and ended."""

    def __init__(self, lab: Lab, name: str, runs: Path, *more: str, faults: str = "") -> None:
        self.submitted_at = time.time()
        given = [
            "entry=rank:tests.fakes.timed:main", f"cluster.gpus_per_node={GPUS}",
            f"runs_dir={runs}", *more,
        ]  # fmt: skip
        files = {"tests/fakes/timed.py": TIMED}
        super().__init__(lab, name, *given, step_s=STEP_S, faults=faults, files=files)
        self.started_at: list[float] = []
        self.eligible_at: list[float] = []
        self.ended_at = 0.0

    def see_start(self, attempt: int, *, timeout_s: float = 90) -> None:
        """Waits until an attempt trains, and notes what slurmctld says of its start."""
        self.wait_for_training(attempt, timeout_s=timeout_s)
        job = self.lab.show_job(self.job_id)
        self.started_at.append(_at(job["StartTime"]))
        self.eligible_at.append(_at(job["EligibleTime"]))

    def end(self, *, timeout_s: float = 120) -> str:
        """As `end_as`; a job that was queued again and waits for its BeginTime is hastened."""
        hastened: set[str] = set()

        def ended() -> Optional[str]:
            job = self.lab.show_job(self.job_id)
            restarts = job.get("Restarts", "")
            if job.get("Reason") == "BeginTime" and restarts not in hastened:
                hastened.add(restarts)
                self.lab.hasten(self.job_id)
            state = job.get("JobState", "UNKNOWN")
            return state if state in ENDED else None

        state = wait_until(ended, timeout_s=timeout_s, seen=self.says)
        self.ended_at = _at(self.lab.show_job(self.job_id)["EndTime"])
        return state

    @property
    def root(self) -> str:
        return str(self.run.layout.root)

    def trained(self, attempt: int) -> list[int]:
        """Steps by its trace."""
        lines = self.run.layout.trace_file(attempt).read_text().splitlines()
        return [int(json.loads(line)["step"]) for line in lines]

    def restored(self, attempt: int) -> int:
        events = read_events(self.run.layout.attempt(attempt))
        return next((int(e["step"]) for e in events if e["kind"] == "restored"), 0)

    def committed(self, attempt: int) -> list[int]:
        events = read_events(self.run.layout.attempt(attempt))
        return [int(event["step"]) for event in events if event["kind"] == "committed"]

    def trace_s(self, attempt: int) -> list[float]:
        lines = self.run.layout.trace_file(attempt).read_text().splitlines()
        return [float(json.loads(line)["seconds"]) for line in lines]


class Foreign:
    """A job that is none of ours, by plain sbatch."""

    def __init__(self, lab: Lab, name: str, script: str) -> None:
        self.job_id = lab.sbatch_as(
            lab.user, f"--job-name={name}", "--partition=low", "--nodes=1", "--output=/dev/null",
            f"--gres=gpu:{GPUS}", script=script,
        )  # fmt: skip


class Faults:
    """All of it, done; `since`: as `report` takes it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        lab.change_settings(slurmd_timeout_s=LOST_AFTER_S)
        self.since = datetime.now().strftime("%Y-%m-%dT%H:%M:%S")
        self.began_at = time.time()
        new = ["mktemp", "--directory", f"{lab.home(lab.user)}/told-XXXXXX"]
        self.runs = Path(lab.run_as(lab.user, new).stdout.strip()) / "runs"
        scenarios = {
            "killed": self._node_is_killed,
            "calm": self._nothing_happens,
            "preempted": self._is_preempted,
            "cancelled": self._is_cancelled,
            "crash": self._rank_crashes,
        }
        self.foreign: dict[str, Foreign] = {}
        with ThreadPoolExecutor(max_workers=len(scenarios) + 1) as pool:
            runs: dict[str, Future[ToldRun]] = {}
            for name, scenario in scenarios.items():
                runs[name] = pool.submit(scenario)
                time.sleep(1.0)  # they are queued in this order
            others = pool.submit(self._others)
        self.run = {name: future.result() for name, future in runs.items()}
        others.result()
        self.ended_at = time.time()

    def _one_node(self, name: str, *more: str, faults: str = "") -> ToldRun:
        return ToldRun(self.lab, name, self.runs, "cluster.nodes=1", *more, faults=faults)

    def _nothing_happens(self) -> ToldRun:
        slow = f"slow@staged:rank=0:step={STALLED_AT}:seconds={STALL_S}"
        run = self._one_node("calm", faults=slow)
        run.see_start(1)
        assert run.end() == "COMPLETED", run.says()
        return run

    def _is_preempted(self) -> ToldRun:
        run = self._one_node("preempted", "steps=80")
        run.see_start(1)
        run.make_room()
        self.lab.wait_for_state(run.job_id, ["PENDING"], 60)
        self.lab.hasten(run.job_id)
        run.see_start(2)
        assert run.end() == "COMPLETED", run.says()
        return run

    def _rank_crashes(self) -> ToldRun:
        step, rank = CRASH
        kill = f"kill@step:rank={rank}:step={step}:attempt=1"
        run = ToldRun(self.lab, "crash", self.runs, faults=kill)
        run.see_start(1, timeout_s=120)
        assert run.end(timeout_s=150) == "COMPLETED", run.says()
        return run

    def _node_is_killed(self) -> ToldRun:
        run = self._one_node("killed")
        run.see_start(1)
        wait_until(lambda: (run.step(1) or 0) > INTERVAL or None, timeout_s=60, seen=run.says)
        self.killed_node = self.lab.show_job(run.job_id)["NodeList"]
        self.killed_at = time.time()
        self.lab.kill(self.killed_node)
        try:
            self.lab.wait_for_state(run.job_id, ["PENDING", "RUNNING", "CONFIGURING"], 90)
            wait_until(
                lambda: self.lab.show_job(run.job_id).get("Restarts") == "1" or None,
                timeout_s=90,
                seen=run.says,
            )
            self.given_up_at = time.time()
            assert run.end(timeout_s=150) == "COMPLETED", run.says()
        finally:
            self.lab.start(self.killed_node)
        return run

    def _is_cancelled(self) -> ToldRun:
        run = self._one_node("cancelled", "steps=2000")
        run.see_start(1)
        self.lab.run_as(self.lab.user, ["scancel", run.job_id])
        assert run.end() == "CANCELLED", run.says()
        return run

    def _others(self) -> None:
        fails = f"sleep {FOREIGN_S}; exit {FOREIGN_CODE}"
        self.foreign = {
            "fails": Foreign(self.lab, "foreign|fails", fails),
            "done": Foreign(self.lab, "foreign-done", "sleep 1"),
        }
        for one in self.foreign.values():
            self.lab.wait_for_end(one.job_id, 150)

    def report(self, *words: str) -> dict[str, Any]:
        """What `ftslurm report --json` says of it, as its user."""
        argv = [str(self.lab.python), "-m", "ftslurm", "report", "--json", *words]
        env = {"PYTHONPATH": str(self.lab.checkout)}
        done = self.lab.run_as(self.lab.user, argv, env=env, check=False)
        assert done.returncode == 1, f"{done.returncode} {done.stderr}"
        told: dict[str, Any] = json.loads(done.stdout)
        return told


def _at(stamp: str) -> float:
    """Of slurmctld's local time."""
    return datetime.fromisoformat(stamp).timestamp()
