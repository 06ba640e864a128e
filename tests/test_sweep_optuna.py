"""Optuna's sweeper over somebody's program: eight trials, one of them preempted in the midst."""

import json
import shutil
import subprocess
import sys

import pytest

from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import read_tasks

pytestmark = pytest.mark.full

APP = """
import os, signal, time
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

import ftslurm

@hydra.main(version_base="1.3", config_path=None, config_name=None)
def main(cfg: DictConfig):
    state = ftslurm.resume_dir() / "state"
    if HydraConfig.get().job.num == 3 and not state.exists():
        state.write_text("half way")
        ftslurm.should_stop()
        os.kill(os.getppid(), signal.SIGUSR1)
        while not ftslurm.should_stop():
            time.sleep(0.05)
        return 1e9  # of a task that was left early: counts for nothing
    return (cfg.x - 1) ** 2

main()
"""


def test_values_reach_optuna_and_a_preempted_trial_has_the_right_one(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    (tmp_path / "app.py").write_text(APP)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sed", "env"):
        (tools / name).symlink_to(shutil.which(name))
    words = ["-m", "hydra/launcher=ftslurm", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=8",
             "hydra.sweeper.n_jobs=4", "+x=interval(-4.0,4.0)", "hydra.sweep.dir=out",
             "hydra.launcher.recovery.backoff_s=0"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "app.py", *words],
        cwd=tmp_path,
        env={"PATH": str(tools), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (sweep,) = (tmp_path / "runs").iterdir()
    tasks = read_tasks(SweepLayout(sweep))
    assert [task.number for task in tasks] == list(range(8))
    values = []
    for task in tasks:
        (word,) = (text for text in task.overrides if text.startswith("+x="))
        run = sweep / task.run_id
        values.append(json.loads((run / "value.json").read_text())["value"])
        assert values[-1] == (float(word.partition("=")[2]) - 1) ** 2
        attempts = len(list((run / "attempts").glob("*/attempt.json")))
        assert attempts == (2 if task.number == 3 else 1)
    best = (tmp_path / "out" / "optimization_results.yaml").read_text()
    assert f"best_value: {min(values)!r}" in best, best
