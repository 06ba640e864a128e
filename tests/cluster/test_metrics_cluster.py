"""The last word of recovery.metrics_dir: what a job's end leaves in the file is how the run stands,
however soon Slurm kills whoever writes it."""

from __future__ import annotations

import pytest
from batch_runs import Group, LabRun, time_to_leave
from fakes.project import slow
from lab import Lab
from metrics_runs import only, read_samples

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STATES = ("run_active", "run_training", "run_waiting", "run_finished", "run_needs_person")


class Measured(LabRun):
    """A run on one node that keeps its figures in its owner's home."""

    def __init__(self, lab: Lab, name: str, *more: str, **named: str) -> None:
        metrics = lab.home(lab.user) / f"textfiles-{name}"
        lab.run_as(lab.user, ["mkdir", "-p", str(metrics)])
        self.metrics = metrics
        self.answers: list[str] = []
        self.told: dict[str, float] = {}
        super().__init__(
            lab, name, "cluster.nodes=1", f"recovery.metrics_dir={metrics}", *more, **named
        )

    def read(self) -> None:
        path = self.metrics / f"{self.run.layout.root.name}.prom"
        samples = read_samples(path.read_text())
        self.told = {name: only(samples, name) for name in STATES}


def finished(lab: Lab) -> Measured:
    run = Measured(lab, "metrics-done")
    run.end_as("COMPLETED")
    run.read()
    return run


def preempted(lab: Lab) -> Measured:
    run = Measured(lab, "metrics-preempted", *slow())
    run.wait_for_training(1)
    run.make_room()
    lab.wait_for_state(run.job_id, ["PENDING"], 120)
    run.read()
    return run


def failed(lab: Lab) -> Measured:
    run = Measured(
        lab, "metrics-failed", "recovery.max_failures=1", faults="exit@step:rank=1:step=17"
    )
    run.end_as("FAILED")
    run.read()
    return run


def killed(lab: Lab) -> Measured:
    """With its batch shell: it leaves no word, and its file says for ever that it is active."""
    run = Measured(lab, "metrics-killed", *slow(seconds=2))
    run.wait_for_training(1)
    run.answers.append(asked(run))
    lab.run_as_root("scancel", "--signal=KILL", "--batch", run.job_id)
    assert lab.wait_for_end(run.job_id, 60) in ("FAILED", "CANCELLED")
    run.answers.append(asked(run))
    return run


def asked(run: Measured) -> str:
    """As `ftslurm metrics` asks of a run that is quiet."""
    code = "import sys; from pathlib import Path; from ftslurm.metrics.job_look import ask;"
    code += "print(ask(Path(sys.argv[1])))"
    argv = [str(run.lab.python), "-c", code, str(run.run.layout.root)]
    environ = {"PYTHONPATH": str(run.lab.checkout)}
    return run.lab.run_as(run.lab.user, argv, env=environ).stdout.strip()


@pytest.fixture(scope="module")
def runs(lab: Lab) -> Group[Measured]:
    with time_to_leave(lab):
        return Group(lab, {"preempted": preempted, "killed": killed})


@pytest.fixture(scope="module")
def more(lab: Lab) -> Group[Measured]:
    return Group(lab, {"finished": finished, "failed": failed})


def stands_at(run: Measured, state: str) -> None:
    assert run.told == {name: float(name == state) for name in STATES}, run.says()


def test_the_file_of_a_run_that_slurm_has_preempted_says_that_it_waits(
    runs: Group[Measured],
) -> None:
    stands_at(runs["preempted"], "run_waiting")


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "state"), [("finished", "run_finished"), ("failed", "run_needs_person")]
)
def test_the_file_says_how_the_run_stands_when_its_job_has_ended(
    more: Group[Measured], name: str, state: str
) -> None:
    stands_at(more[name], state)


def test_slurm_says_of_a_run_whose_batch_shell_was_killed_that_it_is_over(
    runs: Group[Measured],
) -> None:
    run = runs["killed"]
    assert run.run.decisions() == []
    assert run.answers == ["False", "True"], run.says()
