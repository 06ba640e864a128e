"""`ftslurm run -- python train.py` on real Slurm: 2 nodes x 2 ranks of a torchrun-style script.

Here proctrack is linuxproc: Slurm's signals reach the program itself, beside its rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Callable, Optional

import pytest
from fakes.project import Run
from lab import ENDED, Lab, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

FAKES = Path("tests") / "fakes"
STEPS = 100
TOTAL = sum((1 + 2 + 3 + 4) * step for step in range(STEPS))
"""What the four ranks of torchrun_script.py have added up when each step was taken once."""


class ProgramRun:
    """One script of tests/fakes, submitted by the lab's ordinary user from a folder of its own."""

    def __init__(
        self, lab: Lab, name: str, script: str, *words: str, more: Sequence[str] = ()
    ) -> None:
        self.lab = lab
        new = ["mktemp", "--directory", f"{lab.home(lab.user)}/{name}-XXXXXX"]
        self.folder = Path(lab.run_as(lab.user, new).stdout.strip())
        lab.run_as(lab.user, ["cp", str(lab.checkout / FAKES / script), f"{self.folder}/train.py"])
        placed = [
            "cluster=slurm",
            "cluster.nodes=2",
            "cluster.tasks_per_node=2",
            "cluster.partition=low",
            "cluster.signal_lead_s=30",
            f"name={name}",
            *more,
        ]
        program = [str(lab.python), "train.py", *words]
        record = json.loads(self.ftslurm("run", "--json", *placed, "--", *program))
        self.job_id: str = record["job_id"]
        self.run = Run(record["run_dir"])

    def ftslurm(self, *arguments: str) -> str:
        argv = [str(self.lab.python), "-m", "ftslurm", *arguments]
        environ = {"PYTHONPATH": str(self.lab.checkout)}
        return self.lab.run_as(
            self.lab.user, argv, env=environ, cwd=self.folder, timeout_s=110
        ).stdout

    def log(self, attempt: int) -> str:
        path = self.run.layout.attempt(attempt).logs / "rank-0.log"
        return path.read_text() if path.exists() else ""

    def begins(self) -> list[int]:
        """Step from which each attempt's rank 0 went on."""
        attempts = range(1, len(list(self.run.layout.attempts.iterdir())) + 1)
        found = [re.findall(r"begins at (\d+)", self.log(attempt)) for attempt in attempts]
        return [int(steps[0]) for steps in found if steps]

    def saved(self) -> list[int]:
        """[step, total]"""
        path = self.run.layout.resume / "state.json"
        values: list[int] = json.loads(path.read_text()) if path.exists() else [0, 0]
        return values

    def preempt(self) -> None:
        nodes = self.lab.show_job(self.job_id)["NodeList"]
        self.lab.preempt(2, nodelist=nodes, seconds=2)
        self.lab.hasten(self.job_id, timeout_s=120)

    def wait_for(self, look: Callable[[], bool], *, timeout_s: float = 150) -> None:
        wait_until(lambda: look() or None, timeout_s=timeout_s, seen=self.says)

    def wait_for_attempt(self, attempt: int) -> None:
        """Until its ranks have taken steps together: a program that looks has looked on each, and
        TERM no longer ends it there."""
        self.wait_for(lambda: "\nsaved " in self.log(attempt))

    def end(self) -> None:
        try:
            if self.lab.queues_once_more:
                self.wait_for(self.run.layout.done.exists, timeout_s=200)
                self.lab.hasten(self.job_id, timeout_s=120)
            state = self.lab.wait_for_state(self.job_id, ENDED, 200)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.says()}") from None
        assert state == "COMPLETED", self.says()

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(
            self.ftslurm("status", str(self.run.layout.root), "--json")
        )
        return told

    def says(self) -> str:
        return f"job {self.lab.show_job(self.job_id)}\n{self.run.says()}"


def preempted_twice(lab: Lab, *, name: str, more: tuple[str, ...]) -> ProgramRun:
    run = ProgramRun(lab, name, "torchrun_script.py", str(STEPS), "0.5", *more)
    for attempt in (1, 2):
        run.wait_for_attempt(attempt)
        run.preempt()
    run.end()
    return run


@pytest.fixture(scope="module")
def runs(lab: Lab) -> dict[str, Future[ProgramRun]]:
    """Side by side, each on two of the four nodes, both to their ends: what follows a test ends
    what still runs."""
    kinds: dict[str, tuple[str, ...]] = {"plain": (), "looking": ("look",)}
    with ThreadPoolExecutor(max_workers=len(kinds)) as pool:
        return {
            kind: pool.submit(partial(preempted_twice, lab, name=kind, more=more))
            for kind, more in kinds.items()
        }


def assert_finished_after_two_preemptions(lab: Lab, run: ProgramRun) -> None:
    assert run.run.decisions() == ["requeued", "requeued", "done"], run.says()
    # Each step was taken once in the history of the state that was saved last.
    assert run.saved() == [STEPS, TOTAL], run.says()
    rows = ["REQUEUED", "REQUEUED", *lab.last_rows_once_preempted]
    lab.wait_for_runs(run.job_id, rows, timeout_s=150)
    told = run.status()
    assert told["state"] == "done"
    assert [attempt["ended"] for attempt in told["attempts"]] == ["stopped", "stopped", "finished"]
    assert [attempt["signal"] for attempt in told["attempts"]] == ["SIGTERM", "SIGTERM", None]


def test_a_plain_script_that_is_preempted_goes_on_from_its_own_file(
    lab: Lab, runs: dict[str, Future[ProgramRun]]
) -> None:
    run = runs["plain"].result()
    assert_finished_after_two_preemptions(lab, run)
    first, second, third = run.begins()
    assert first == 0 < second < third < STEPS


def test_three_lines_and_a_script_loses_no_step(
    lab: Lab, runs: dict[str, Future[ProgramRun]]
) -> None:
    run = runs["looking"].result()
    assert_finished_after_two_preemptions(lab, run)
    left = [left_at(run, attempt) for attempt in (1, 2)]
    assert run.begins() == [0, *left], run.says()


def left_at(run: ProgramRun, attempt: int) -> Optional[int]:
    found = re.findall(r"rank 0 leaves at (\d+)", run.log(attempt))
    return int(found[0]) if found else None


@pytest.mark.full
@pytest.mark.torch
def test_a_ddp_script_that_is_preempted_ends_with_the_same_parameters(lab: Lab) -> None:
    """torch's env://, on two ranks, of which DDP's reductions are equal bit for bit."""

    def start(name: str, exclude: str) -> ProgramRun:
        more = ["cluster.tasks_per_node=1", f'cluster.exclude="{exclude}"']
        return ProgramRun(lab, name, "ddp_script.py", "60", "0.5", more=more)

    undisturbed, run = start("ddp-still", "n1,n2"), start("ddp", "n3,n4")
    for attempt in (1, 2):
        run.wait_for_attempt(attempt)
        run.preempt()
    run.end()
    undisturbed.end()
    assert undisturbed.run.decisions() == ["done"], undisturbed.says()
    assert run.run.decisions() == ["requeued", "requeued", "done"], run.says()
    last = re.findall(r"parameters (\w+) at 60", run.log(3))
    assert last and last == re.findall(r"parameters (\w+) at 60", undisturbed.log(1)), run.says()
    first, second, third = run.begins()
    assert first == 0 < second < third < 60
