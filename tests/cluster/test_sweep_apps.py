"""Somebody else's Hydra program, swept on real Slurm: one task is preempted twice and goes on with
its own arguments and from what it has saved itself; one raises, and the others do not care.

What is preempted waits in its midst until then: it cannot have ended before, however slow the
machine is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

import pytest
from fakes.project import Run
from lab import Lab, wait_until

from ftslurm.run.jobs import read_jobs
from ftslurm.run.sweep_layout import SweepLayout

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

STEPS, HELD_AT = 60, (20, 40)
APP = """
import json, time
from pathlib import Path
import ftslurm, hydra

@hydra.main(version_base="1.3", config_path=".", config_name="app")
def main(cfg):
    state = ftslurm.resume_dir(default=".") / "state.json"
    step, total = json.loads(state.read_text()) if state.exists() else (0, 0.0)
    print(f"begins at {step} with rate {cfg.rate} at {cfg.stamp}", flush=True)
    while step < cfg.steps:
        time.sleep(cfg.step_s)
        if not Path(f"hold-{step}").exists():
            step, total = step + 1, total + cfg.rate * step
        if ftslurm.should_stop():
            state.write_text(json.dumps([step, total]))
            return None
    if cfg.rate < 0:
        raise ValueError("no such rate")
    return total

if __name__ == "__main__":
    main()
"""
CONFIG = f"rate: 1.0\nsteps: {STEPS}\nstep_s: 0.05\nstamp: ${{now:%H-%M-%S-%f}}\n"
OPTIONS = ["hydra/launcher=ftslurm", "hydra.launcher.groups.cluster=slurm",
           "hydra.launcher.cluster.partition=low", "hydra.launcher.cluster.signal_lead_s=30",
           # A node of two CPUs for each task: who preempts takes whole nodes.
           "hydra.launcher.cluster.cpus_per_task=2"]  # fmt: skip
DETACHED = ["hydra.launcher.detach=true"]


def total(rate: float) -> float:
    value = 0.0
    for step in range(STEPS):
        value += rate * step
    return value


def log(run: Run, attempt: int) -> str:
    path = run.layout.attempt(attempt).logs / "rank-0.log"
    return path.read_text() if path.exists() else ""


def begin(run: Run, attempt: int) -> str:
    """What the program said when it began; empty before."""
    lines = [line for line in log(run, attempt).splitlines() if line.startswith("begins at ")]
    return lines[0] if lines else ""


def value(run: Run) -> Optional[float]:
    path = run.layout.root / "value.json"
    return json.loads(path.read_text())["value"] if path.exists() else None


def swept(
    lab: Lab, *words: str, rc: int = 0, held_at: Sequence[int] = ()
) -> tuple[SweepLayout, str]:
    """The sweep, and what the program has said, whose exit code is `rc`. `held_at`: steps that
    no task passes while there is the file hold() of it."""
    new = ["mktemp", "--directory", f"{lab.home(lab.user)}/app-XXXXXX"]
    folder = Path(lab.run_as(lab.user, new).stdout.strip())
    (folder / "app.py").write_text(APP)
    (folder / "app.yaml").write_text(CONFIG)
    for step in held_at:
        hold(folder, step).touch()
    argv = [str(lab.python), "app.py", "-m", *OPTIONS, *words]
    environ = {"PYTHONPATH": f"{lab.checkout}:{lab.checkout}/ftslurm/hydra_app/plugin"}
    done = lab.run_as(lab.user, argv, env=environ, cwd=folder, timeout_s=300, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == rc, said
    (found,) = folder.glob("runs/*/sweep.json")
    return SweepLayout(found.parent), said


def hold(folder: Path, step: int) -> Path:
    return folder / f"hold-{step}"


def test_a_program_that_knows_nothing_of_us_but_its_folder_survives_two_preemptions(
    lab: Lab,
) -> None:
    layout, _ = swept(lab, "rate=0.3,0.7", *DETACHED, held_at=HELD_AT)
    folder = layout.root.parents[1]
    quiet, disturbed = (Run(layout.task(number).root) for number in (0, 1))
    job = read_jobs(disturbed.layout)[0].job_id
    assert job.endswith("_1")

    def says() -> str:
        return f"{lab.queue()}\n{quiet.says()}\n{disturbed.says()}"

    for attempt, held_at in enumerate(HELD_AT, start=1):
        # It has taken a step, and looked: TERM no longer ends it.
        looked = disturbed.layout.attempt(attempt).aware
        wait_until(lambda looked=looked: looked.exists() or None, timeout_s=150, seen=says)
        lab.preempt(1, nodelist=lab.show_job(job)["NodeList"], seconds=1)
        wait_until(
            lambda attempt=attempt: len(disturbed.decisions()) == attempt or None,
            timeout_s=100,
            seen=says,
        )
        hold(folder, held_at).unlink()
        lab.hasten(job, timeout_s=120)
    for run, attempts in ((quiet, 1), (disturbed, 3)):
        wait_until(
            lambda run=run, attempts=attempts: len(run.decisions()) == attempts or None,
            timeout_s=150,
            seen=says,
        )
    assert disturbed.decisions() == ["requeued", "requeued", "done"], says()
    assert quiet.decisions() == ["done"], says()
    begins = [begin(disturbed, attempt) for attempt in (1, 2, 3)]
    steps = [int(words.split()[2]) for words in begins]
    assert steps[0] == 0 < steps[1] < steps[2] < STEPS
    assert len({words.partition(" with ")[2] for words in begins}) == 1, "rate and stamp stay"
    assert " rate 0.7 " in begins[0] and " rate 0.3 " in begin(quiet, 1)
    assert (value(quiet), value(disturbed)) == (total(0.3), total(0.7))


def test_a_task_that_raises_has_failed_in_slurm_and_in_the_summary_and_the_others_are_done(
    lab: Lab,
) -> None:
    """On the one node that a list with brackets and commas leaves, one after the other."""
    words = ["rate=0.1,0.2,0.4,-1", "step_s=0", "hydra.launcher.recovery.max_failures=1",
             'hydra.launcher.cluster.exclude="n[1-2,4]"']  # fmt: skip
    layout, said = swept(lab, *words, rc=1)
    runs = [Run(layout.task(number).root) for number in range(4)]
    assert [value(run) for run in runs] == [*map(total, (0.1, 0.2, 0.4)), None]
    assert f"task 3 ({layout.task_id(3)}) " in said and "no such rate" in said
    assert "3 of 4 done" in said and "Traceback" not in said
    for number, run in enumerate(runs):
        (job,) = [one.job_id for one in read_jobs(run.layout)]
        lab.wait_for_runs(job, ["FAILED" if number == 3 else "COMPLETED"], timeout_s=150)
        assert lab.show_job(job)["NodeList"] == "n3"
