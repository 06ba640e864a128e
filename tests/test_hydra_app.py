"""`hydra/launcher=ftslurm` in somebody else's Hydra program, on this machine without Slurm."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from ftslurm.hydra_app.schema import given, launcher_options
from ftslurm.run.spec import RunSpec, to_dict
from ftslurm.submit.program_keys import is_for_program

APP = """
import os, secrets
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

import beside

OmegaConf.register_new_resolver("dice", lambda: secrets.token_hex(8))
OmegaConf.register_new_resolver("loud", str.upper)

@dataclass
class Settings:
    lr: float = 0.5
    stamp: str = "${now:%H-%M-%S-%f}"
    dice: str = "${dice:}"
    token: str = "${oc.env:WANDB_API_KEY,none}"
    loud: str = "${loud:${token}}"
    fail: bool = False

ConfigStore.instance().store(name="conf", node=Settings)

@hydra.main(version_base="1.3", config_path=None, config_name="conf")
def main(cfg):
    if cfg.fail:
        raise ValueError("no such luck")
    job = HydraConfig.get().job
    which = () if OmegaConf.is_missing(job, "id") else (job.num, job.id)
    print("says", OmegaConf.get_type(cfg).__name__, os.getcwd(), *which, flush=True)
    Path(HydraConfig.get().runtime.output_dir, "seen").write_text(
        "\\n".join([cfg.stamp, cfg.dice, cfg.token, cfg.loud, hydra.utils.get_original_cwd()])
    )
    return beside.double(cfg.lr)

if __name__ == "__main__":
    main()
"""
BESIDE = "def double(value):\n    return 2 * value + 0.1\n"
SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "beside.py").write_text(BESIDE)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sed", "env"):
        (tools / name).symlink_to(shutil.which(name))
    return tmp_path


def start(folder, *words, many=True, launcher=True, env=None):
    environ = {"PATH": str(folder / "bin"), "HOME": str(folder), **(env or {})}
    chosen = ["hydra/launcher=ftslurm"] if launcher else []
    return subprocess.run(
        [sys.executable, "app.py", *(["-m"] if many else []), *chosen, *words],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def sweep_of(folder):
    (sweep,) = (folder / "runs").glob("app-*")
    return sweep


def task_of(folder, number):
    sweep = sweep_of(folder)
    return sweep / f"{sweep.name}-{number:04d}"


def multirun(folder):
    (place,) = (folder / "multirun").glob("*/*")
    return place


def test_each_task_runs_their_function_on_what_was_composed_and_its_value_comes_back(folder):
    chosen = "hydra.launcher.groups.cluster=local"  # whose option has two ranks
    done = start(folder, chosen, "lr=0.25,0.1", env={"WANDB_API_KEY": SECRET})
    assert done.returncode == 0, done.stdout + done.stderr
    values = [json.loads((task_of(folder, n) / "value.json").read_text())["value"] for n in (0, 1)]
    assert values == [2 * 0.25 + 0.1, 2 * 0.1 + 0.1]
    seen = [(multirun(folder) / str(n) / "seen").read_text().splitlines() for n in (0, 1)]
    for number, (stamp, dice, token, loud, cwd) in enumerate(seen):
        assert cwd == str(folder)
        assert token == SECRET, "a secret is looked up where the task runs"
        assert loud == SECRET.upper(), "and so is what a resolver makes of it"
        kept = (multirun(folder) / str(number) / ".hydra/config.yaml").read_text()
        assert stamp in kept and dice in kept, "resolved once, at submit"
        log = (task_of(folder, number) / "attempts/0001/logs/rank-0.log").read_text()
        run_id = task_of(folder, number).name
        assert f"says Settings {folder} {number} {run_id}" in log
    assert seen[0][1] != seen[1][1]
    assert len(list((task_of(folder, 0) / "attempts/0001/logs").glob("rank-*.log"))) == 1
    for path in sweep_of(folder).rglob("*"):
        if path.is_file():
            kept = path.read_bytes()
            assert SECRET.encode() not in kept and SECRET.upper().encode() not in kept, path


def test_a_task_that_fails_is_named_and_the_others_end_well(folder):
    given = ["hydra.launcher.recovery.max_failures=1", "hydra.launcher.recovery.backoff_s=0"]
    done = start(folder, "fail=true,false", *given)
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "task 0" in said and "no such luck" in said and "Traceback" not in said
    assert not (task_of(folder, 0) / "DONE").exists() and (task_of(folder, 1) / "DONE").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("lr=0.1,0.2,much",), "much"),
        (("lr=0.1", "hydra.launcher.cluster.nodse=2"), "nodse"),
        (("lr=0.1", "hydra.launcher.cluster.nodes=2"), "cluster.nodes is 2"),
        (("lr=0.1", "hydra.launcher.groups.cluster=h100"), "h100"),
        (("lr=0.1", "hydra.launcher.detach=true"), "detach means nothing to cluster=local"),
        (
            ("lr=0.1,0.2", "hydra.launcher.detach=true", "hydra/sweeper=optuna"),
            "sweeper `optuna` chooses tasks by the values of others",
        ),
        (("lr=0.1", "hydra.launcher.parallelism=0"), "parallelism is 0"),
        (("lr=0.1", f"stamp={SECRET}"), "WANDB_API_KEY"),
    ],
)
def test_what_is_wrong_with_one_task_stops_the_sweep_before_anything_is_written(
    folder, words, named
):
    done = start(folder, *words, env={"WANDB_API_KEY": SECRET})
    said = done.stdout + done.stderr
    assert done.returncode == 1 and named in said, said
    assert "Traceback" not in said
    assert not (folder / "runs").exists()


def test_a_start_without_m_does_not_run_here(folder):
    done = start(folder, "lr=0.1", many=False)
    assert done.returncode == 2 and "add -m" in done.stderr
    assert "hydra/launcher=basic to run it here" in done.stderr
    assert not (folder / "outputs").exists() or not list((folder / "outputs").rglob("seen"))
    assert start(folder, "lr=0.1", many=False, launcher=False).returncode == 0
    again = start(folder, "lr=0.1", "hydra/launcher=basic", many=False)
    assert again.returncode == 0 and "says Settings" in again.stdout


def test_the_plugin_costs_a_start_of_hydra_little_and_imports_neither_submitit_nor_jinja(folder):
    code = (
        "import hydra_plugins.ftslurm_launcher, sys\n"
        "print(*(name for name in ('submitit', 'jinja2', 'torch', 'numpy') if name in sys.modules))"
    )
    environ = {"PATH": os.environ["PATH"]}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_launcher_has_every_option_that_a_program_of_ones_own_has():
    def keys(values, prefix=""):
        for name, value in values.items():
            key = f"{prefix}{name}"
            is_table = key in ("cluster.env", "recovery.budgets", "recovery.phase_limit_s",
                               "health.limits")  # fmt: skip
            if isinstance(value, dict) and not is_table:
                yield from keys(value, f"{key}.")
            elif is_for_program(key):
                yield key

    def has(options, key):
        for part in key.split("."):
            if not hasattr(options, part):
                return False
            options = getattr(options, part)
        return True

    options = launcher_options("somewhere.Launcher")
    wanted = list(keys(to_dict(RunSpec())))
    assert len(wanted) > 80
    assert [key for key in wanted if not has(options, key)] == []


def test_only_what_was_given_counts_as_given():
    from omegaconf import OmegaConf

    options = OmegaConf.structured(launcher_options("somewhere.Launcher"))
    options.cluster.exclude = "n[1-3,5]"
    options.recovery.max_failures = RunSpec().recovery.max_failures
    plain = OmegaConf.to_container(options)
    assert given(plain) == {"cluster.exclude": "n[1-3,5]", "recovery.max_failures": 3}


def test_a_list_of_nodes_in_two_pairs_of_quotes_survives_hydras_grammar(folder):
    done = start(folder, "lr=0.1", 'hydra.launcher.cluster.exclude="n[1-3,5]"')
    said = done.stdout + done.stderr
    assert "cluster.exclude is `n[1-3,5]`, which means nothing to cluster=local" in said
