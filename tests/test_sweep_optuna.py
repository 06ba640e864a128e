"""Optuna's sweeper: over somebody's program, eight trials, one of them preempted in the midst; over
our own configs, and what it refuses there."""

import importlib
import json
import logging
import shutil
import subprocess
import sys

import pytest

from ftslurm.cli import main
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import read_tasks

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


ENTRY = """
from ftslurm.errors import RANK_DONE
from ftslurm.files import write_json
from ftslurm.run.rank import RankEnvironment
from ftslurm.run.record import read_record
from ftslurm.run.value import write_value


def main():
    env = RankEnvironment.read()
    spec = read_record(env.layout).spec
    write_value(env.layout, spec.user["says"] or (spec.user["x"] - 1) ** 2)
    write_json(env.layout.done, {"schema_version": 1, "attempt": env.attempt, "finished_at": 1})
    return RANK_DONE
"""
OWN = ["submit", "-m", "entry=rank:mine:main", "cluster=local", "cluster.tasks_per_node=1",
       "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", "user.says=''"]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    # It writes to what was stderr when the first test began, by a handler that it adds as it loads.
    importlib.import_module("optuna")
    monkeypatch.setattr(logging.getLogger("optuna"), "handlers", [])
    monkeypatch.setattr(logging, "lastResort", None)
    (tmp_path / "mine.py").write_text(ENTRY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_trials_of_our_own_configs_are_told_and_so_is_the_best(folder, capsys):
    words = ["hydra/sweeper/sampler=random", "hydra.sweeper.n_trials=2", "user.x=interval(2.0,4.0)"]
    assert main([*OWN, *words]) == 0
    (sweep,) = (folder / "runs").iterdir()
    values = []
    for task in read_tasks(SweepLayout(sweep)):
        (word,) = (text for text in task.overrides if text.startswith("user.x="))
        values.append(json.loads((sweep / task.run_id / "value.json").read_text())["value"])
        assert values[-1] == (float(word.partition("=")[2]) - 1) ** 2
    assert len(values) == 2
    best = f"best_value: {min(values)!r}"
    assert best in capsys.readouterr().out
    assert best in (sweep / "submit" / "optimization_results.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["hydra.sweeper.n_trials=0"], "No trials"),
        (["hydra.sweeper.n_jobs=0"], "a batch without a task"),
        (["hydra.sweeper.direction=up"], "'minimize' or 'maximize'"),
        (["user.y=interval(9,1)"], "smaller than or equal"),
        (["hydra/sweeper/sampler=nope"], "hydra/sweeper/sampler/nope"),
        (["--detach"], "sweeper `optuna` chooses tasks by the values of others"),
    ],
)
def test_what_optuna_refuses_is_a_sentence_and_leaves_nothing_written(folder, capsys, words, named):
    assert main([*OWN, "user.x=1,2", "hydra.sweeper.n_trials=4", *words]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("ftslurm: error: ") and named in said[0]
    assert not (folder / "runs").exists()


def test_what_optuna_makes_no_number_of_is_an_error_that_says_where_the_task_is(folder, capsys):
    given = ["user.x=1,2", "user.says=high", "hydra.sweeper.n_trials=1"]
    assert main([*OWN, *given]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    (sweep,) = (folder / "runs").iterdir()
    assert said.startswith("ftslurm: error: ") and str(sweep) in said


@pytest.mark.full
@pytest.mark.timeout(240)
def test_values_reach_optuna_and_a_preempted_trial_has_the_right_one(tmp_path):
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
        timeout=220,
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
