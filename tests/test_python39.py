"""The cold half on RHEL 9's Python: the batch shell and a login node have 3.9 and nothing more."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import RUN_ID, make_step

from ftslurm.cli import VERBS
from ftslurm.files import read_json, write_json
from ftslurm.run.attempts import FINISHED, Attempt, Outcome, claim, read_attempt, write_outcome
from ftslurm.run.jobs import BY_SUBMIT, add_job
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import RunSpec, to_dict
from ftslurm.scheduler.local_state import LocalJob, write_job
from ftslurm.scheduler.process import ProcessName

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ftslurm"
HOT = ("train", "replay/determinism.py")
JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[03-04]"}
# Without site-packages, user's or other's: the standard library and our own folder.
START = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); from ftslurm.cli import main; sys.exit(main())"
)
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def cold_files():
    paths = sorted(PACKAGE.rglob("*.py"))
    return [path for path in paths if not is_hot(path.relative_to(PACKAGE).as_posix())]


def is_hot(name):
    return any(name == hot or name.startswith(f"{hot}/") for hot in HOT)


def interpreters():
    """Where a Python 3.9 may be found: by its own name, RHEL's own one, and under pyenv."""
    names = ("python3.9", "/usr/bin/python3", "/usr/libexec/platform-python")
    yield from (found for found in map(shutil.which, names) if found)
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, timeout=30)
        yield from sorted(Path(root.stdout.strip()).glob("versions/3.9*/bin/python3.9"))


def is_39(path):
    code = "import sys; sys.exit(sys.version_info[:2] != (3, 9))"
    done = subprocess.run([path, "-c", code], capture_output=True, timeout=30, check=False)
    return done.returncode == 0


@pytest.fixture(scope="module")
def python39():
    found = next((str(path) for path in interpreters() if is_39(path)), None)
    if found is None:
        pytest.skip("there is no Python 3.9 here: not on PATH, not RHEL's, not under pyenv")
    return found


@pytest.fixture
def call(python39, tmp_path):
    def call(*arguments, code=START, expect=0):
        environ = {**JOB, "PATH": "/nowhere", "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        argv = [python39, "-I", "-S", "-B", "-c", code, *map(str, arguments)]
        done = subprocess.run(
            argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == expect, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return call


@pytest.fixture
def layout(tmp_path):
    """A run of two steps, saved with the digest that needs no library."""
    layout = RunLayout(tmp_path / RUN_ID)
    for folder in (layout.steps, layout.submit):
        folder.mkdir(parents=True)
    record = {
        "schema_version": 1,
        "run_id": RUN_ID,
        "scheduler": "slurm",
        "spec": to_dict(RunSpec(steps=20)),
    }
    write_json(layout.run_json, record)
    for step in (10, 20):
        make_step(layout, step, algorithm="sha256")
    return layout


def test_the_cold_half_is_written_for_python_39():
    vermin = [sys.executable, "-c", "from vermin.main import main; main()"]
    argv = [*vermin, "--target=3.9-", "--no-tips", "--violations"]
    done = subprocess.run([*argv, *cold_files()], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_cold_module_imports_there_without_a_library(call):
    places = [path.relative_to(ROOT).with_suffix("").as_posix() for path in cold_files()]
    names = {place.removesuffix("/__init__").replace("/", ".") for place in places}
    # The one module that is submitit's, the one that is Hydra's, and the one that is a command.
    plugin = "ftslurm.hydra_app.plugin.hydra_plugins.ftslurm_launcher"
    modules = sorted(names - {"ftslurm.submit.executor", plugin, "ftslurm.__main__"})
    assert len(modules) > 40
    call(*modules, code=f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{IMPORT_ALL}")


def test_help_and_version_are_there(call):
    assert "submit" in call("--help").stdout
    assert call("--version").stdout.strip()


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "data"])
def test_every_cold_verb_explains_itself_there(call, verb):
    assert "usage: ftslurm" in call(verb, "--help").stdout


def test_a_run_is_claimed_decided_shown_and_verified_there(call, layout):
    word, attempt, address, *_ = call("claim", layout.root).stdout.split()
    assert (word, attempt, address) == ("go", "1", "n03")
    assert [item.step for item in read_attempt(layout, 1).adopted] == [20, 10]
    assert "attempt 1" in call("status", layout.root).stdout

    write_outcome(layout.attempt(1), Outcome(FINISHED, 20, 20))
    write_json(layout.done, {"schema_version": 1, "step": 20})
    assert call("recover", layout.root, "--attempt", "1", "--rc", "0").stdout == "done\n"
    assert read_json(layout.attempt(1).decision_json)["action"] == "done"
    assert call("claim", layout.root).stdout == "done\n"
    assert "done" in call("status", layout.root).stdout
    assert "20" in call("verify", layout.root).stdout


@pytest.fixture
def local_layout(layout):
    """The run as a job of this machine that is this test itself, and so runs."""
    write_json(layout.run_json, {**read_json(layout.run_json), "scheduler": "local"})
    us = ProcessName.of(os.getpid())
    write_job(layout, LocalJob("local-1", "RUNNING", 0, us.pid, us.started))
    add_job(layout, "local-1", scheduler="local", queued_by=BY_SUBMIT)
    return layout


def test_a_running_run_is_ordered_about_there(call, local_layout):
    layout = local_layout
    claim(layout, Attempt(0, "local-1", 0, ["n1"], claimed_at=0.0))
    assert "the order is" in call("save", layout.root).stdout
    assert "the order is" in call("stop", layout.root).stdout
    assert {"save", "stop"} <= {path.name for path in layout.control.iterdir()}
    (layout.attempt(1).logs / "rank-0.log").write_text("step 7\n")
    assert call("logs", layout.root).stdout == "step 7\n"
    assert "`stop` is withdrawn" in call("resume", layout.root).stdout


def test_a_digest_that_cannot_be_computed_there_is_no_finding_but_a_sentence(call, layout):
    make_step(layout, 30)
    done = call("verify", layout.root, expect=2)
    assert "has no xxhash" in done.stderr and done.stderr.count("\n") == 1
    assert (layout.steps / "step-000000000030").is_dir()
