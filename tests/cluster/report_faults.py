"""Faults of known size on real Slurm, for a report to tell of: what was done to whom, and when.

Torch-free ranks whose trace has the time of each step. All runs lie in one folder, as a person's
do; four nodes have room for some of them at a time, so that the others wait in the queue.
"""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Optional

from batch_runs import LabRun
from lab import ENDED, Lab, wait_until
from report_ledger import Ledger, Start
from report_told import ask, begin, ended_events, new_folder, report

from ftslurm.health.reason import PREFIX
from ftslurm.report.drains import OTHERS, OURS
from ftslurm.run.attempts import read_attempt, read_events

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
SLOW = "sleep@step:rank=0:attempt=1:since=25:seconds=3"
"""An attempt is not done before its end is brought about, however busy the machine is."""
PATIENCE_S = 300
"""For what a busy machine does in a minute at most."""
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

from ftslurm.run.attempts import read_progress
from tests.fakes import rank

BUGS = {BUGS}


def note(env, what):
    with open(env.layout.root / f"{{what}}-{{env.attempt}}", "a") as clock:
        clock.write(f"{{time.time()}}\\n")


class TimedTrace(rank.TraceWriter):
    def append(self, row):
        now = time.monotonic()
        super().append(dataclasses.replace(row, seconds=now - self.since))
        self.since = now
        note(self.env, "clock")


def wait_for_word(self):
    # None fails before rank 0 has put on record what all have trained.
    while self.env.rank:
        progress = read_progress(self.env.attempt_layout)
        if progress is not None and progress.step >= self.step:
            return
        time.sleep(0.01)


def write_rank_error(env, error, **more):
    write_error(env, error, **more)
    note(env, "failed")


def train_one_step(self):
    if self.trace and not hasattr(self.trace, "since"):
        self.trace.since, self.trace.env = time.monotonic(), self.env
    wait_for_word(self)
    if self.spec.user.get("hoards") and {HOARD} + (1,) == (
        self.step, self.env.rank, self.env.attempt
    ):
        self.hoard = b"x" * (600 << 20)
    bug = BUGS.get(self.env.attempt) if self.spec.user.get("buggy") else None
    if bug and bug[:2] == (self.step, self.env.rank):
        raise RuntimeError(bug[2])
    return train(self)


train, rank.FakeTraining.train_one_step = rank.FakeTraining.train_one_step, train_one_step
write_error, rank.write_rank_error = rank.write_rank_error, write_rank_error
rank.TraceWriter = TimedTrace
main = rank.main
"""


class ToldRun(LabRun):
    """A run, and what its ranks have noted of it."""

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

    def end(self) -> str:
        """Its state then; a job that was queued again and waits for its BeginTime is hastened."""
        hastened: set[str] = set()

        def ended() -> Optional[str]:
            job = self.lab.show_job(self.job_id)
            restarts = job.get("Restarts", "")
            if job.get("Reason") == "BeginTime" and restarts not in hastened:
                hastened.add(restarts)
                self.lab.hasten(self.job_id)
            state = job.get("JobState", "UNKNOWN")
            return state if state in ENDED else None

        return wait_until(ended, timeout_s=PATIENCE_S, seen=self.says)

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
        return self._noted("clock", attempt)

    def injected_at(self, attempt: int) -> float:
        """When a rank was to fail."""
        (at,) = self._noted("injected", attempt)
        return at

    def failed_at(self, attempt: int) -> float:
        """When the first of its ranks had written why it fails; inf: none could."""
        return min(self._noted("failed", attempt), default=math.inf)

    def claimed_at(self, attempt: int) -> float:
        return read_attempt(self.run.layout, attempt).claimed_at

    def _noted(self, what: str, attempt: int) -> list[float]:
        file = self.run.layout.root / f"{what}-{attempt}"
        return [float(line) for line in file.read_text().split()] if file.exists() else []


class Foreign:
    """A job that is none of ours, by plain sbatch."""

    def __init__(self, lab: Lab, name: str, script: str, *more: str) -> None:
        self.job_id = lab.sbatch_as(
            lab.user, f"--job-name={name}", "--partition=low", "--nodes=1", "--output=/dev/null",
            *(more or (f"--gres=gpu:{GPUS}",)), script=script,
        )  # fmt: skip


@dataclass
class Drained:
    """A node out of service, and for how long, by the clock of whoever has ordered it."""

    node: str
    reason: str
    least_s: float = 0.0
    most_s: float = 0.0


class Faults:
    """All of it, done; `since`: as `report` takes it."""

    def __init__(self, lab: Lab, names: tuple[str, ...]) -> None:
        self.lab, self.names = lab, names
        self.since = begin(lab)
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
        self.hung_node = ""
        self.ledger = Ledger(lab)
        with self.ledger, ThreadPoolExecutor(max_workers=len(names) + 1) as pool:
            self._place_on_one_node()  # while there is room
            runs = {name: pool.submit(scenarios[name]) for name in names}
            foreign = pool.submit(self._fails)
        self.run = {name: future.result() for name, future in runs.items()}
        foreign.result()
        self._drain()

    def _drain(self) -> None:
        """Ours and an administrator's, when nobody needs a node any more."""
        rule = f"{PREFIX}XID79 gpu0 boot=ab12cd34 2026-11-30T12:00:00Z"
        self.drained = {OURS: Drained("n1", rule), OTHERS: Drained("n2", "a | b")}
        out: dict[str, tuple[float, float]] = {}
        for kind, one in self.drained.items():
            out[kind] = self._update(one.node, "DRAIN", f"Reason={one.reason}")
        time.sleep(DRAINED_S)
        for kind, one in self.drained.items():
            resumed_from, resumed_by = self._update(one.node, "RESUME")
            drained_from, drained_by = out[kind]
            one.least_s, one.most_s = resumed_from - drained_by, resumed_by - drained_from

    def _update(self, node: str, state: str, *more: str) -> tuple[float, float]:
        """When it was asked for, and when it was done at the latest."""
        asked_at = time.time()
        self.lab.run_as_root("scontrol", "update", f"NodeName={node}", f"State={state}", *more)
        return asked_at, time.time()

    def knows_all_events(self) -> bool:
        """Accounting has all that befell nodes: that comes after the jobs' rows."""
        known = ended_events(self.lab, self.since)
        out = {(one.node, one.reason) for one in self.drained.values()}
        return out <= known and self.killed_node in {node for node, _ in known}

    def _one_node(self, name: str, *more: str, faults: str = "") -> ToldRun:
        return ToldRun(self.lab, name, self.runs, "cluster.nodes=1", *more, faults=faults)

    def _nothing_happens(self) -> ToldRun:
        slow = f"sleep@staged:rank=0:step={STALLED_AT}:seconds={STALL_S}"
        run = self._one_node("calm", faults=slow)
        assert run.end() == "COMPLETED", run.says()
        return run

    def _is_preempted(self) -> ToldRun:
        run = self._one_node("preempted", faults=SLOW)
        run.wait_for_training(1, timeout_s=PATIENCE_S)
        run.preempt()
        assert run.end() == "COMPLETED", run.says()
        return run

    def _rank_crashes(self) -> ToldRun:
        step, rank = CRASH
        kill = f"kill@step:rank={rank}:step={step}:attempt=1"
        run = ToldRun(self.lab, "crash", self.runs, faults=kill)
        assert run.end() == "COMPLETED", run.says()
        return run

    def _rank_hangs(self) -> ToldRun:
        step, rank = HANG
        run = self._one_node("hang", faults=f"stop@step:rank={rank}:step={step}:attempt=1")
        assert run.end() == "COMPLETED", run.says()
        (self.hung_node,) = read_attempt(run.run.layout, 1).nodes
        return run

    def _has_bugs(self) -> ToldRun:
        run = self._one_node("broken", "+user.buggy=true")
        assert run.end() == "FAILED", run.says()
        return run

    def _place_on_one_node(self) -> None:
        """Half of the node is a run's, the other half a job's that comes back to the same node when
        it is on again."""
        half = ("cluster.tasks_per_node=1", "cluster.gpus_per_node=1")
        self._killed = run = self._one_node("killed", *half, faults=SLOW)
        self.lab.wait_for_state(run.job_id, ["RUNNING"], PATIENCE_S)
        self.killed_node = self.lab.show_job(run.job_id)["NodeList"]
        placed = (f"--nodelist={self.killed_node}", "--gres=gpu:1", "--requeue")
        again = Foreign(self.lab, "foreign-again", 'sleep "$((600 - 599 * SLURM_RESTART_COUNT))"',
                        *placed)  # fmt: skip
        self.foreign["again"] = again
        self.lab.wait_for_state(again.job_id, ["RUNNING"], PATIENCE_S)

    def _node_is_killed(self) -> ToldRun:
        run, again = self._killed, self.foreign["again"]
        for job_id in (again.job_id, run.job_id):
            # Accounting is to know of it: 22.05 may lose the start of one a lost node has ended.
            self.lab.wait_for_runs(job_id, ["RUNNING"], PATIENCE_S)
        wait_until(lambda: (run.step(1) or 0) > INTERVAL or None, timeout_s=PATIENCE_S,
                   seen=run.says)  # fmt: skip
        self.killed_at = time.time()
        self.lab.kill(self.killed_node)
        self.dead_at = time.time()
        try:
            wait_until(
                lambda: self.lab.show_job(run.job_id).get("Restarts") == "1" or None,
                timeout_s=PATIENCE_S,
                seen=run.says,
            )
            self.given_up_at = time.time()
            self.lab.hasten(run.job_id)
            run.wait_for_training(2, timeout_s=PATIENCE_S)
        finally:
            self.started_at = time.time()
            self.lab.start(self.killed_node)
        self.lab.hasten(again.job_id)
        assert run.end() == "COMPLETED", run.says()
        assert self.lab.wait_for_end(again.job_id, PATIENCE_S) == "COMPLETED"
        return run

    def _is_cancelled(self) -> ToldRun:
        run = self._one_node("cancelled", "steps=20000")
        run.wait_for_training(1, timeout_s=PATIENCE_S)
        node = self.lab.show_job(run.job_id)["NodeList"]
        waits = Foreign(
            self.lab, "foreign-waits", "sleep 1", f"--nodelist={node}", f"--gres=gpu:{GPUS}"
        )
        self.foreign["waits"] = waits
        time.sleep(WAIT_S)
        self.lab.run_as(self.lab.user, ["scancel", run.job_id])
        assert run.end() == "CANCELLED", run.says()
        assert self.lab.wait_for_end(waits.job_id, PATIENCE_S) == "COMPLETED"
        return run

    def _fails(self) -> None:
        fails = Foreign(self.lab, "foreign|fails", f"sleep {FOREIGN_S}; exit {FOREIGN_CODE}")
        self.foreign["fails"] = fails
        assert self.lab.wait_for_end(fails.job_id, PATIENCE_S) == "FAILED"

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
