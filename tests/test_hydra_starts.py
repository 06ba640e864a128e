"""Somebody's Hydra program in the shapes that programs have, against Hydra's own launcher: a module
of a package, a command of an environment, ranks, folders, sweepers and callbacks that look at what
the tasks have returned."""

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

APP = """
import json, os, pathlib
import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback

class Tell(Callback):
    def on_job_end(self, config, job_return, **kwargs):
        cfg, folder = job_return.cfg, config.hydra.runtime.output_dir
        told = [cfg.db.name, job_return.working_dir, job_return.status.name, cfg.get("hydra")]
        pathlib.Path(folder, "ended").write_text(json.dumps(told))

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg):
    pathlib.Path("seen").write_text(f"{cfg.db.name} {cfg.lr}")
    print("runs as rank", os.environ.get("RANK", os.environ.get("SLURM_PROCID")), flush=True)
    return cfg.db.port * cfg.lr

if __name__ == "__main__":
    main()
"""
FILES = {
    "pkg/__init__.py": "",
    "pkg/app.py": APP,
    "pkg/conf/__init__.py": "",
    "pkg/conf/config.yaml": "defaults: [db: a, _self_]\nlr: 0.5\n",
    "pkg/conf/db/a.yaml": "name: a\nport: 3\n",
    "pkg/conf/db/b.yaml": "name: b\nport: 4\n",
    "hydra_plugins/telling.py": """
import json, pathlib, pickle
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

class TellingSweeper(BasicSweeper):
    def sweep(self, arguments):
        told = []
        for job in [job for batch in super().sweep(arguments) for job in batch]:
            hydra = job.hydra_cfg.hydra
            assert OmegaConf.is_readonly(hydra) and list(job.hydra_cfg) == ["hydra"]
            assert job.cfg is job.cfg
            job = pickle.loads(pickle.dumps(job))
            told.append({
                "overrides": job.overrides, "cfg": OmegaConf.to_container(job.cfg),
                "task_name": job.task_name, "status": job.status.name, "value": job.return_value,
                "working_dir": str(pathlib.Path(job.working_dir).absolute()),
                "output_dir": hydra.runtime.output_dir, "num": hydra.job.num,
                "task": OmegaConf.to_container(hydra.overrides.task),
                "choices": OmegaConf.to_container(hydra.runtime.choices)["db"],
            })
        pathlib.Path("told.json").write_text(json.dumps(told))

name = f"{__name__}.TellingSweeper"
node = {"_target_": name, "max_batch_size": None, "params": None}
ConfigStore.instance().store("telling", node, group="hydra/sweeper")
""",
}
SWEEP = ["db=a,b", "+more=[1,2]", "hydra.sweep.dir=out", "hydra/sweeper=telling",
         "+hydra.callbacks.tell._target_=pkg.app.Tell"]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sed", "env"):
        (tools / name).symlink_to(shutil.which(name))
    return tmp_path


def start(folder, *argv):
    environ = {"PATH": str(folder / "bin"), "HOME": str(folder)}
    done = subprocess.run(
        [*map(str, argv)],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def told(folder, launcher, *words):
    """What sweeper, callback and function have left of a sweep, the folder cleared of it."""
    argv = [sys.executable, "-m", "pkg.app", "-m", f"hydra/launcher={launcher}", *SWEEP, *words]
    start(folder, *argv)
    jobs = json.loads((folder / "told.json").read_text())
    ended = [json.loads((folder / "out" / str(n) / "ended").read_text()) for n in (0, 1)]
    for job in ended:
        job[1] = str(folder / job[1])  # relative with Hydra's own launcher
    seen = {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("seen")
        if "runs" not in path.parts
    }
    shutil.rmtree(folder / "out")
    for path in folder.glob("seen"):
        path.unlink()
    return jobs, ended, seen


def test_sweeper_and_callbacks_of_a_module_are_told_what_hydras_own_launcher_tells_them(
    folder,
):
    wanted = told(folder, "basic", "hydra.job.chdir=true")
    found = told(folder, "ftslurm", "hydra.job.chdir=true")
    assert found == wanted
    jobs, _, seen = found
    assert [job["value"] for job in jobs] == [1.5, 2.0]
    assert set(seen) == {"out/0/seen", "out/1/seen"}


def test_of_several_ranks_each_runs_the_function_and_one_writes_and_returns(folder):
    words = ["hydra/launcher=ftslurm", "hydra.launcher.cluster.tasks_per_node=2"]
    start(folder, sys.executable, "-m", "pkg.app", "-m", *words, "hydra.sweep.dir=out", "db=b")
    (run,) = (folder / "runs").glob("app-*/app-*-0000")
    assert json.loads((run / "value.json").read_text())["value"] == 2.0
    logs = [(run / f"attempts/0001/logs/rank-{rank}.log").read_text() for rank in (0, 1)]
    assert all(f"runs as rank {rank}" in log for rank, log in enumerate(logs)), logs
    assert (folder / "out/0/.hydra/config.yaml").exists()


def test_a_command_that_an_editable_install_has_made_is_started_on_the_node_as_it_was_here(folder):
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "pkg"\nversion = "1"\nscripts = {pkg-train = "pkg.app:main"}\n'
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[tool.setuptools]\npackages = ["pkg"]\n'
    )
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    (packages,) = venv.glob("lib/python*/site-packages")
    # All that we have here is there, too.
    here = sysconfig.get_path("purelib")
    (packages / "here.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    pip = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", folder]
    subprocess.run([*pip, "--disable-pip-version-check"], check=True, cwd=Path("/"))
    start(folder, venv / "bin" / "pkg-train", "-m", "hydra/launcher=ftslurm", "db=b", "lr=2")
    (run,) = (folder / "runs").glob("*/*-0000")
    assert json.loads((run / "value.json").read_text())["value"] == 8
