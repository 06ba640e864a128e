"""Runs of real torch ranks on the lab cluster, and what may be asked of them afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from lab import Lab, wait_until
from train import launch

from ftslurm.files import read_json
from ftslurm.replay.trace import count_trained, read_trace
from ftslurm.run.attempts import Outcome, numbers, read_attempt, read_events, read_outcome
from ftslurm.run.layout import RunLayout

STEPS = 40

# Two nodes with two ranks each, five sequences a rank in two micro-steps: a step lasts some tenths
# of a second, so a preemption asked for at one step arrives a few steps later, not after the end.
SETTINGS = (
    "cluster=slurm",
    "cluster.nodes=2",
    "cluster.tasks_per_node=2",
    "cluster.partition=low",
    "cluster.time=00:20:00",
    "cluster.signal_lead_s=30",
    f"steps={STEPS}",
    "optim.global_batch_size=20",
    "optim.micro_batch_size=3",
    "checkpoint.interval_steps=10",
    "checkpoint.interval_s=0",
    # It loads torch once more; test_preflight_cluster.py has it.
    "health.preflight=never",
)


@dataclass
class Run:
    """One submitted run."""

    lab: Lab
    layout: RunLayout
    job_id: str

    def trained(self, attempt: int) -> list[int]:
        """Steps that an attempt has trained so far."""
        path = self.layout.trace_file(attempt)
        if not path.exists():
            return []
        return [json.loads(line)["step"] for line in _whole_lines(path)]

    def wait_for_step(self, attempt: int, step: int, *, timeout_s: float = 180) -> None:
        wait_until(
            lambda: max(self.trained(attempt), default=-1) >= step or None,
            timeout_s=timeout_s,
            seen=lambda: f"attempt {attempt} trained {self.trained(attempt)[-1:]}\n{self.story()}",
        )

    def make_room(self) -> None:
        """Another user's job takes the nodes of this one, which then waits."""
        nodes = self.lab.show_job(self.job_id)["NodeList"]
        self.lab.preempt(2, nodelist=nodes, seconds=2)
        self.lab.wait_for_state(self.job_id, ["PENDING"], timeout_s=150)

    def preempt(self) -> None:
        """The same, and it is hastened."""
        self.make_room()
        self.lab.hasten(self.job_id)

    def finish(self, *, timeout_s: float = 300) -> None:
        """Wait for the job's end; it has to have finished the run."""
        state = self.lab.wait_for_end(self.job_id, timeout_s)
        assert state == "COMPLETED" and self.layout.done.exists(), self.story()

    @property
    def losses(self) -> dict[int, str]:
        """Loss of each step as a hexadecimal float: equal text is equal bits."""
        return {step: row.loss.hex() for step, row in read_trace(self.layout).items()}

    @property
    def parameter_digest(self) -> str:
        return str(read_json(self.layout.done)["parameter_digest"])

    def outcomes(self) -> list[Optional[Outcome]]:
        return [read_outcome(self.layout.attempt(number)) for number in numbers(self.layout)]

    def restored_steps(self) -> list[Optional[int]]:
        """For each attempt the step it restored, None where it began at step 0."""
        found: list[Optional[int]] = []
        for number in numbers(self.layout):
            events = read_events(self.layout.attempt(number))
            steps = [event["step"] for event in events if event["kind"] == "restored"]
            found.append(steps[-1] if steps else None)
        return found

    def trained_twice(self) -> int:
        """Steps trained more than once, over all attempts."""
        return sum(count - 1 for count in count_trained(self.layout).values())

    def status(self) -> dict[str, Any]:
        told = self.ftslurm("status", str(self.layout.root), "--json")
        return dict(json.loads(told))

    def ftslurm(self, *arguments: str, check: bool = True) -> str:
        return ftslurm(self.lab, *arguments, check=check)

    def story(self) -> str:
        """All that helps to understand a failed assertion."""
        parts = [
            json.dumps(self.lab.show_job(self.job_id)),
            *self._tails(self.layout.submit, "*.out"),
        ]
        for number in numbers(self.layout):
            parts.append(str(read_attempt(self.layout, number)))
            parts += [str(event) for event in read_events(self.layout.attempt(number))]
            parts += self._tails(self.layout.attempt(number).logs, "rank-*")
        return "\n".join(parts)

    @staticmethod
    def _tails(folder: Path, pattern: str) -> list[str]:
        return [
            f"--- {path.name}\n" + "\n".join(path.read_text().splitlines()[-12:])
            for path in sorted(folder.glob(pattern))
        ]


def undisturbed(run: Run, folder: Path) -> Run:
    """The same run with nothing in its way: on this machine, where torch is loaded once for all."""
    layout = RunLayout(folder / run.layout.root.name)
    for place in (layout.code, layout.attempts, layout.steps):
        place.mkdir(parents=True)
    shutil.copy(run.layout.run_json, layout.run_json)
    ended = launch.run_attempt(layout, world_size=4, deadline_s=200)
    assert ended.codes == [0] * 4, ended.logs()
    return Run(run.lab, layout, "none")


def submit(
    lab: Lab, *overrides: str, name: str, environ: Optional[Mapping[str, str]] = None
) -> Run:
    """`ftslurm submit` by the lab's user, as on a login node."""
    arguments = ["submit", "--json", f"name={name}", f"runs_dir={lab.home(lab.user)}/runs"]
    told = json.loads(ftslurm(lab, *arguments, *SETTINGS, *overrides, environ=environ))
    return Run(lab, RunLayout(Path(told["run_dir"])), str(told["job_id"]))


def ftslurm(
    lab: Lab, *arguments: str, environ: Optional[Mapping[str, str]] = None, check: bool = True
) -> str:
    """The command as the lab's user types it; its standard output."""
    done = lab.run_as(
        lab.user,
        [str(lab.python), "-m", "ftslurm", *arguments],
        env={"PYTHONPATH": str(lab.checkout), **(environ or {})},
        timeout_s=110,
        check=check,
    )
    return done.stdout


def _whole_lines(path: Path) -> list[str]:
    """Lines that are written to their end: the last one may be on its way."""
    text = path.read_text()
    return text[: text.rfind("\n") + 1].splitlines()
