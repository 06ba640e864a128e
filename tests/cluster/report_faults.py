"""Faults of known size on real Slurm, for a report to tell of: what was done to whom, and when.

Torch-free ranks whose trace has the time of each step. All runs lie in one folder, as a person's
do; four nodes have room for some of them at a time, so that the others wait in the queue.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Optional

from batch_runs import LabRun
from lab import ENDED, Lab, wait_until
from report_ledger import Ledger, Start, stamp_at
from report_told import ask, new_folder, report

from ftslurm.health.reason import PREFIX
from ftslurm.report.drains import OTHERS, OURS
from ftslurm.run.attempts import read_events

GPUS = 2
"""Of a node."""
STEP_S = 0.1
STEPS, INTERVAL = 60, 20
CRASH = (27, 2)
"""Steps that were done when a rank is killed, and which rank."""
HANG = (30, 1)
"""As well: a rank is stopped."""
BUGS = {1: (27, 1, "CUDA out of memory. Tried to allocate 20.00 GiB"),
        2: (33, 0, "token 50257"), 3: (33, 0, "token 50257")}  # fmt: skip
"""By attempt: steps done, rank, what it raises."""
HOARD = (27, 1)
"""As well: a rank takes more memory than its job may have."""
SLOW = "slow@step:rank=0:attempt=1:since=25:seconds=1"
"""An attempt is not done before its end is brought about, however busy the machine is."""
LOST_AFTER_S = 10
"""Slurm gives a node up that says nothing for so long."""
STALL_S = 2.0
"""That a save of the run to which nothing else happens stops it for."""
STALLED_AT = 40
DRAINED_S = 3.0
WAIT_S = 2.0
"""So long a job waits for a node at least."""
FOREIGN_S = 4
FOREIGN_CODE = 3
FEW = ("killed", "calm", "preempted", "broken", "cancelled")
MORE = ("crash", "hang")
"""Runs; those of each take a cluster's minute."""

TIMED = f"""
import dataclasses
import time

from tests.fakes import rank

BUGS = {BUGS}


class TimedTrace(rank.TraceWriter):
    def append(self, row):
        now = time.monotonic()
        super().append(dataclasses.replace(row, seconds=now - self.since))
        self.since = now
        with open(self.clock, "a") as clock:
            clock.write(f"{{time.time()}}\\n")


def train_one_step(self):
    if self.trace and not hasattr(self.trace, "since"):
        self.trace.since = time.monotonic()
        self.trace.clock = self.env.layout.root / f"clock-{{self.env.attempt}}"
    if self.spec.user.get("hoards") and {HOARD} + (1,) == (
        self.step, self.env.rank, self.env.attempt
    ):
        self.hoard = b"x" * (600 << 20)
    bug = BUGS.get(self.env.attempt) if self.spec.user.get("buggy") else None
    if bug and bug[:2] == (self.step, self.env.rank):
        raise RuntimeError(bug[2])
    return train(self)


train, rank.FakeTraining.train_one_step = rank.FakeTraining.train_one_step, train_one_step
rank.TraceWriter = TimedTrace
main = rank.main
"""


class ToldRun(LabRun):
    """A run, and what slurmctld said of when it began and ended."""

    def __init__(
        self,
        lab: Lab,
        name: str,
        runs: Path,
        *more: str,
        faults: str = "",
        entry: str = "timed",
        files: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        given = [
            f"entry=rank:tests.fakes.{entry}:main", f"cluster.gpus_per_node={GPUS}",
            f"runs_dir={runs}", *more,
        ]  # fmt: skip
        beside = {"tests/fakes/timed.py": TIMED, **files}
        super().__init__(lab, name, *given, step_s=STEP_S, faults=faults, files=beside)
        self.started_at: list[float] = []
        self.eligible_at: list[float] = []
        self.ended_at = 0.0

    def see_start(self, attempt: int, *, timeout_s: float = 90) -> None:
        """Waits until an attempt trains, and notes what slurmctld says of its start."""
        self.wait_for_training(attempt, timeout_s=timeout_s)
        job = self.lab.show_job(self.job_id)
        self.started_at.append(stamp_at(job["StartTime"]))
        self.eligible_at.append(stamp_at(job["EligibleTime"]))

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
        self.ended_at = stamp_at(self.lab.show_job(self.job_id)["EndTime"])
        return state

    @property
    def root(self) -> str:
        return str(self.run.layout.root)

    @property
    def attempts(self) -> int:
        return len(list(self.run.layout.trace_file(1).parent.glob("attempt-*.jsonl")))

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

    def steps_at(self, attempt: int) -> list[float]:
        """When each of its steps ended, by the clock of the node."""
        lines = (self.run.layout.root / f"clock-{attempt}").read_text().splitlines()
        return [float(line) for line in lines]


class Foreign:
    """A job that is none of ours, by plain sbatch."""

    def __init__(self, lab: Lab, name: str, script: str, *more: str) -> None:
        self.job_id = lab.sbatch_as(
            lab.user, f"--job-name={name}", "--partition=low", "--nodes=1", "--output=/dev/null",
            *(more or (f"--gres=gpu:{GPUS}",)), script=script,
        )  # fmt: skip


class Faults:
    """All of it, done; `since`: as `report` takes it."""

    def __init__(self, lab: Lab, names: tuple[str, ...]) -> None:
        self.lab, self.names = lab, names
        lab.change_settings(slurmd_timeout_s=LOST_AFTER_S)
        self.since = datetime.now().strftime("%Y-%m-%dT%H:%M:%S")
        self.folder = new_folder(lab)
        self.runs = self.folder / "runs"
        scenarios: dict[str, Callable[[], ToldRun]] = {
            "killed": self._node_is_killed,
            "calm": self._nothing_happens,
            "preempted": self._is_preempted,
            "broken": self._has_bugs,
            "cancelled": self._is_cancelled,
            "crash": self._rank_crashes,
            "hang": self._rank_hangs,
        }
        self.foreign: dict[str, Foreign] = {}
        self.hung_node = self.killed_node = ""
        self.ledger = Ledger(lab)
        with self.ledger, ThreadPoolExecutor(max_workers=len(names) + 1) as pool:
            runs: dict[str, Future[ToldRun]] = {}
            for name in names:
                runs[name] = pool.submit(scenarios[name])
                time.sleep(1.0)  # they are queued in this order
            foreign = pool.submit(self._fails)
        self.run = {name: future.result() for name, future in runs.items()}
        foreign.result()
        self._drain()

    def _drain(self) -> None:
        """Ours and an administrator's, when nobody needs a node any more."""
        self.drained = {OURS: "n1", OTHERS: "n2"}
        reasons = {OURS: f"{PREFIX}XID79 gpu0 boot=ab12cd34 2026-11-30T12:00:00Z", OTHERS: "a | b"}
        for kind, node in self.drained.items():
            self._update(node, "DRAIN", f"Reason={reasons[kind]}")
        time.sleep(DRAINED_S)
        for node in self.drained.values():
            self._update(node, "RESUME")

    def _update(self, node: str, state: str, *more: str) -> None:
        self.lab.run_as_root("scontrol", "update", f"NodeName={node}", f"State={state}", *more)

    def _one_node(self, name: str, *more: str, faults: str = "") -> ToldRun:
        return ToldRun(self.lab, name, self.runs, "cluster.nodes=1", *more, faults=faults)

    def _nothing_happens(self) -> ToldRun:
        slow = f"slow@staged:rank=0:step={STALLED_AT}:seconds={STALL_S}"
        run = self._one_node("calm", faults=slow)
        run.see_start(1)
        assert run.end() == "COMPLETED", run.says()
        return run

    def _is_preempted(self) -> ToldRun:
        run = self._one_node("preempted", faults=SLOW)
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

    def _rank_hangs(self) -> ToldRun:
        step, rank = HANG
        run = self._one_node("hang", faults=f"stop@step:rank={rank}:step={step}:attempt=1")
        run.see_start(1, timeout_s=120)
        self.hung_node = self.lab.show_job(run.job_id)["NodeList"]
        assert run.end(timeout_s=150) == "COMPLETED", run.says()
        return run

    def _has_bugs(self) -> ToldRun:
        run = self._one_node("broken", "+user.buggy=true")
        run.see_start(1, timeout_s=120)
        assert run.end(timeout_s=150) == "FAILED", run.says()
        return run

    def _node_is_killed(self) -> ToldRun:
        """Half of the node is the run's, the other half a job's that comes back to the same node
        when it is on again."""
        run = self._one_node(
            "killed", "cluster.tasks_per_node=1", "cluster.gpus_per_node=1", faults=SLOW
        )
        run.see_start(1)
        self.killed_node = self.lab.show_job(run.job_id)["NodeList"]
        placed = (f"--nodelist={self.killed_node}", "--gres=gpu:1", "--requeue")
        again = Foreign(self.lab, "foreign-again", 'sleep "$((90 - 89 * SLURM_RESTART_COUNT))"',
                        *placed)  # fmt: skip
        self.lab.wait_for_state(again.job_id, ["RUNNING"], 30)
        wait_until(lambda: (run.step(1) or 0) > INTERVAL or None, timeout_s=60, seen=run.says)
        self.killed_at = time.time()
        self.lab.kill(self.killed_node)
        self.dead_at = time.time()
        try:
            wait_until(
                lambda: self.lab.show_job(run.job_id).get("Restarts") == "1" or None,
                timeout_s=90,
                seen=run.says,
            )
            self.given_up_at = time.time()
            self.lab.hasten(run.job_id)
            run.see_start(2)
        finally:
            self.started_at = time.time()
            self.lab.start(self.killed_node)
        self.lab.hasten(again.job_id)
        self.foreign["again"] = again
        assert run.end(timeout_s=150) == "COMPLETED", run.says()
        assert self.lab.wait_for_end(again.job_id, 60) == "COMPLETED"
        return run

    def _is_cancelled(self) -> ToldRun:
        run = self._one_node("cancelled", "steps=2000")
        run.see_start(1)
        node = self.lab.show_job(run.job_id)["NodeList"]
        waits = Foreign(
            self.lab, "foreign-waits", "sleep 1", f"--nodelist={node}", f"--gres=gpu:{GPUS}"
        )
        time.sleep(WAIT_S)
        self.lab.run_as(self.lab.user, ["scancel", run.job_id])
        assert run.end() == "CANCELLED", run.says()
        assert self.lab.wait_for_end(waits.job_id, 60) == "COMPLETED"
        self.foreign["waits"] = waits
        return run

    def _fails(self) -> None:
        fails = Foreign(self.lab, "foreign|fails", f"sleep {FOREIGN_S}; exit {FOREIGN_CODE}")
        self.foreign["fails"] = fails
        self.lab.wait_for_end(fails.job_id, 150)

    def starts(self, name: str) -> list[Start]:
        """Of a job, by slurmctld."""
        return self.ledger.of((self.run.get(name) or self.foreign[name]).job_id)

    def rows(self) -> str:
        """All of accounting, as it is."""
        fields = "JobID,State,ExitCode,Submit,Start,End,NodeList,JobName"
        argv = ["sacct", "-D", "-X", "-a", "-S", self.since, f"--format={fields}"]
        return self.lab.run_as_root(*argv)

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        return ask(self.lab, self.folder, *words)

    def report(self, *words: str) -> dict[str, Any]:
        return report(self.lab, self.folder, *words)
