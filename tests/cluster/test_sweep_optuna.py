"""Optuna's sweeper over somebody's program on real Slurm: eight trials, four at a time, one of them
preempted in the midst. What Optuna is told of each is what its parameters come to.

The first four wait in their midst until the one has given way: it cannot have ended before that,
however slow the machine is. Whoever follows the sweep shortens its wait, not the test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Optional

import pytest
import yaml
from fakes.project import Run
from lab import Lab, wait_until

from ftslurm.run.attempts import numbers
from ftslurm.run.jobs import read_jobs
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import TaskRecord, read_tasks

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

TRIALS, AT_ONCE, PREEMPTED, STEPS, HELD_AT = 8, 4, 2, 60, 20
APP = """
import json, time
from pathlib import Path
import ftslurm, hydra

@hydra.main(version_base="1.3", config_path=".", config_name="app")
def main(cfg):
    state = ftslurm.resume_dir() / "state.json"
    step, w = json.loads(state.read_text()) if state.exists() else (0, float(cfg.start))
    print(f"begins at {step} with {w!r}", flush=True)
    while step < cfg.steps:
        time.sleep(0.1)
        if step < cfg.held_at or not Path("hold").exists():
            step, w = step + 1, w - cfg.lr * 2 * (w - 3)
        if ftslurm.should_stop():
            state.write_text(json.dumps([step, w]))
            return 1e9  # of a trial that was left early: counts for nothing
    return (w - 3) ** 2 + cfg.lr

if __name__ == "__main__":
    main()
"""
CONFIG = f"lr: 0.0\nstart: 0\nsteps: {STEPS}\nheld_at: {HELD_AT}\n"
WORDS = ["hydra/launcher=ftslurm", "hydra.launcher.groups.cluster=slurm",
         "hydra.launcher.cluster.partition=low", "hydra.launcher.cluster.signal_lead_s=30",
         # A node of two CPUs for each trial: who preempts takes whole nodes.
         "hydra.launcher.cluster.cpus_per_task=2", "hydra.sweep.dir=out",
         "hydra/sweeper=optuna", f"hydra.sweeper.n_trials={TRIALS}",
         f"hydra.sweeper.n_jobs={AT_ONCE}", "hydra.sweeper.sampler.seed=7",
         "lr=interval(0.001,0.02)", "start=choice(-2,5)"]  # fmt: skip


def parameters(task: TaskRecord) -> dict[str, float]:
    words = [word.partition("=") for word in task.overrides]
    return {name: float(value) for name, _, value in words}


def wanted(lr: float, start: float) -> float:
    w = start
    for _ in range(STEPS):
        w = w - lr * 2 * (w - 3)
    return (w - 3) ** 2 + lr


def begins_at(run: Run, attempt: int) -> Optional[int]:
    """The step that the program began with; None before."""
    path = run.layout.attempt(attempt).logs / "rank-0.log"
    found = re.search(r"^begins at (\d+) ", path.read_text() if path.exists() else "", re.MULTILINE)
    return int(found[1]) if found else None


def preempt(lab: Lab, folder: Path, told: Future[CompletedProcess[str]]) -> SweepLayout:
    """Take the node from one trial of the first four; the sweep."""

    def sweep() -> Optional[SweepLayout]:
        if told.done():
            told.result()  # raises what the sweeping command has said
        # A folder that is being built has a dot before its name; the sweep appears by a rename.
        found = list(folder.glob("runs/[!.]*/tasks.jsonl"))
        return SweepLayout(found[0].parent) if found else None

    layout = wait_until(sweep, timeout_s=150, seen=lab.queue)
    run = Run(layout.task(PREEMPTED).root)

    def says() -> str:
        return f"{lab.queue()}\n{run.says()}"

    looks = run.layout.attempt(1).aware  # from then on TERM no longer ends it
    wait_until(lambda: looks.exists() or None, timeout_s=150, seen=says)
    job = read_jobs(run.layout)[0].job_id
    lab.preempt(1, nodelist=lab.show_job(job)["NodeList"], seconds=1)
    wait_until(lambda: run.decisions() == ["requeued"] or None, timeout_s=120, seen=says)
    return layout


def sweep_and_preempt(lab: Lab, folder: Path, argv: Sequence[str]) -> tuple[SweepLayout, str]:
    """(the sweep, what the sweeping command has said), once it has ended well."""
    environ = {"PYTHONPATH": f"{lab.checkout}:{lab.checkout}/ftslurm/hydra_app/plugin"}
    with ThreadPoolExecutor(1) as beside:
        told = beside.submit(lab.run_as, lab.user, argv, env=environ, cwd=folder, timeout_s=540)
        try:
            try:
                layout = preempt(lab, folder, told)
            finally:
                (folder / "hold").unlink()
            return layout, told.result().stdout
        except BaseException:
            lab.cancel_all()  # or it would go on following
            raise


def test_optuna_is_told_the_right_value_of_each_trial_though_one_was_preempted(lab: Lab) -> None:
    new = ["mktemp", "--directory", f"{lab.home(lab.user)}/optuna-XXXXXX"]
    folder = Path(lab.run_as(lab.user, new).stdout.strip())
    (folder / "app.py").write_text(APP)
    (folder / "app.yaml").write_text(CONFIG)
    (folder / "hold").touch()
    layout, said = sweep_and_preempt(lab, folder, [str(lab.python), "app.py", "-m", *WORDS])

    tasks = read_tasks(layout)
    assert [task.number for task in tasks] == list(range(TRIALS))
    runs = [Run(layout.task(task.number).root) for task in tasks]
    values = [json.loads((run.layout.root / "value.json").read_text())["value"] for run in runs]
    assert values == [wanted(**parameters(task)) for task in tasks]
    assert len({task.overrides for task in tasks}) == TRIALS

    attempts = [len(numbers(run.layout)) for run in runs]
    assert attempts == [2 if number == PREEMPTED else 1 for number in range(TRIALS)], said
    # Who follows goes by what the task itself has written; its batch script decides after that.
    wait_until(
        lambda: len(runs[PREEMPTED].decisions()) == 2 or None,
        timeout_s=60,
        seen=runs[PREEMPTED].says,
    )
    assert runs[PREEMPTED].decisions() == ["requeued", "done"]
    first, second = (begins_at(runs[PREEMPTED], attempt) for attempt in (1, 2))
    assert first == 0 and second is not None and 0 < second <= HELD_AT, "from its own checkpoint"

    best = yaml.safe_load((folder / "out" / "optimization_results.yaml").read_text())
    assert best["best_value"] == min(values)
    assert best["best_params"] == parameters(tasks[values.index(min(values))])
