"""Set-up lines, environment and container on this machine: the same script, without Slurm."""

import dataclasses
import json
import shutil
import subprocess
import sys
import tarfile

import pytest
from fakes.chain import Chain, wait_for
from fakes.project import slow

from ftslurm.errors import SpecError
from ftslurm.files import read_json
from ftslurm.run.attempts import numbers, read_progress
from ftslurm.run.spec import ClusterSpec, RunSpec
from ftslurm.scheduler import open_scheduler
from ftslurm.submit.freeze import _SLURM_ONLY, freeze, plan_run

BWRAP = ["bwrap", "--dev-bind", "/", "/", "--unshare-pid", "--proc", "/proc", "--die-with-parent"]


def given(key, value):
    return f"{key}={json.dumps(value)}"


@pytest.fixture
def chain(tmp_path):
    return Chain(tmp_path)


@pytest.fixture
def container():
    """bwrap where it works, else a prefix that stays beside the rank as bwrap does."""
    if (
        shutil.which("bwrap")
        and subprocess.run([*BWRAP, "true"], capture_output=True).returncode == 0
    ):
        return BWRAP
    return ["sh", "-c", '"$@"; exit $?', "sh"]


@pytest.fixture
def archive(tmp_path):
    """An environment that is this one but for its place."""
    path = tmp_path / "env.tar"
    with tarfile.open(path, "w") as tar:
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nFROM_ARCHIVE="$0" exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        tar.add(python, arcname="./bin/python")
    return path


def test_a_run_with_all_of_it_stops_on_a_signal_and_goes_on(chain, container, archive, tmp_path):
    node = tmp_path / "node"
    node.mkdir()
    seen = chain.folder / "tests" / "fakes" / "seen.py"
    seen.write_text(
        "import os\n"
        "from tests.fakes.rank import main as train\n"
        "def main():\n"
        "    names = ('FROM_SETUP', 'FROM_ENV', 'FROM_ARCHIVE', 'MASTER_ADDR')\n"
        "    with open(os.environ['FTSLURM_RUN_DIR'] + '/seen', 'a') as out:\n"
        "        out.write('|'.join(os.environ[name] for name in names) + '\\n')\n"
        "    return train()\n"
    )
    run = chain.submit(
        "entry=rank:tests.fakes.seen:main",
        given("cluster.setup", ["export FROM_SETUP=$((1 + 1))"]),
        given("cluster.env.FROM_ENV", "$HOME"),
        given("cluster.container", container),
        given("cluster.environment", str(archive)),
        given("cluster.environment_dir", str(node)),
        "cluster.interface=lo",
        *slow(),
    )

    def trains():
        progress = read_progress(run.layout.attempt(1))
        return progress is not None and progress.step > 2

    wait_for(trains, run.says)
    chain.scheduler.signal_ranks(chain.job_id, "USR1")
    chain.wait("COMPLETED")
    assert run.decisions() == ["requeued", "done"], run.says()
    assert run.steps_trained_twice == 0
    (folder,) = (path for path in node.iterdir() if path.is_dir())
    lines = (run.layout.root / "seen").read_text().splitlines()
    assert lines == [f"2|$HOME|{folder}/bin/python|127.0.0.1"] * 4


def freeze_with(folder, **cluster):
    spec = RunSpec(
        entry="mine:train", runs_dir="runs", cluster=ClusterSpec(scheduler="local", **cluster)
    )
    scheduler = open_scheduler("local")
    plan = plan_run(spec, "name: run\n", scheduler, scheduler.site(), folder=folder)
    freeze(plan)
    return plan


def test_an_interpreter_inside_a_container_is_not_run_where_the_run_is_submitted(tmp_path):
    plan = freeze_with(tmp_path, container=["env"], rank_python="/inside/only/python")
    assert read_json(plan.layout.run_json)["packages"] == {}
    assert "rank_python=/inside/only/python\n" in plan.script


def test_an_interpreter_of_the_ranks_that_is_no_python_here_is_refused_by_its_key(tmp_path):
    with pytest.raises(
        SpecError, match=r"cluster\.rank_python `/nonexistent/python` cannot be run"
    ):
        freeze_with(tmp_path, rank_python="/nonexistent/python")
    with pytest.raises(SpecError, match=r"cluster\.rank_python `/bin/false` is no Python"):
        freeze_with(tmp_path, rank_python="/bin/false")


@pytest.mark.parametrize(
    "cluster",
    [
        {"setup": ["module load python"], "rank_python": "python-of-the-module"},
        {"env": {"PATH": "/opt/python/bin"}, "rank_python": "python-of-the-module"},
        {"setup": ["module load python"], "python": "python-of-the-module"},
    ],
)
def test_an_interpreter_on_a_path_that_only_the_job_has_is_not_asked_here(tmp_path, cluster):
    plan = freeze_with(tmp_path, **cluster)
    assert read_json(plan.layout.run_json)["packages"] == {}


def test_an_interpreter_on_this_path_is_asked_here(tmp_path):
    with pytest.raises(SpecError, match="`python-of-the-module` cannot be run"):
        freeze_with(tmp_path, env={"A": "1"}, rank_python="python-of-the-module")


def test_no_key_is_silently_ignored_by_this_machine():
    """Each is honoured or refused; a new key has to be put somewhere."""
    honoured = {
        "scheduler", "nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "time", "signal",
        "signal_lead_s", "python", "rank_python", "setup", "env", "container", "interface",
        "environment", "environment_dir",
    }  # fmt: skip
    assert {item.name for item in dataclasses.fields(ClusterSpec)} == honoured | {*_SLURM_ONLY}


def test_a_line_of_setup_that_fails_ends_the_run_before_it_counts_as_an_attempt(chain):
    run = chain.submit(given("cluster.setup", ["cd /nonexistent"]))
    chain.wait("FAILED")
    assert numbers(run.layout) == []
    (told,) = (path for path in run.layout.submit.iterdir() if "cluster.setup" in _text(path))
    assert "cluster.setup failed on " in told.read_text()


def _text(path):
    return path.read_text() if path.suffix in (".out", ".err", ".log") else ""


def test_an_environment_that_cannot_be_unpacked_stops_the_run_with_a_sentence(chain, archive):
    archive.write_bytes(b"no archive")
    run = chain.submit(given("cluster.environment", str(archive)), "recovery.max_failures=1")
    chain.wait("FAILED")
    assert run.decisions() == ["restart", "stop"], run.says()
    reason = read_json(run.layout.attempt(2).decision_json)["reason"]
    assert "rank 0 on " in reason and "env.tar` cannot be unpacked" in reason
