"""Submitting from a login node that gives a person little: few processes, little memory."""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
NUM_PROCESSES = 200
ADDRESS_SPACE_BYTES = 2 << 30
NOBODY = 65534
"""No limit on processes binds root, so as root these tests submit as this user. Other users' own
processes count too, and may be more: for them only memory is limited."""

SUBMIT = ("submit", "entry=rank:mytrain:main", "steps=3", "cluster=slurm")
COUNT = """
import sys
from pathlib import Path
from ftslurm.cli import main
code = main(sys.argv[1:])
print("loaded:", *sorted({"numpy", "torch", "h5py"}.intersection(sys.modules)), file=sys.stderr)
# All of the process, those of native libraries too.
print("threads:", len(list(Path("/proc/self/task").iterdir())), file=sys.stderr)
sys.exit(code)
"""
USER = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}


def limit():
    if USER:
        resource.setrlimit(resource.RLIMIT_NPROC, (NUM_PROCESSES, NUM_PROCESSES))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))


@pytest.fixture
def home():
    """A folder of the person's own; pytest's are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="ftslurm-login-"))
    (folder / "mytrain.py").write_text("def main():\n    return 0\n")
    (folder / "calls").mkdir()
    tools = folder / "bin"
    tools.mkdir()
    sbatch = (TESTS / "fake_sbatch.py").read_text()
    (tools / "sbatch").write_text(sbatch.replace("/usr/bin/env python3", sys.executable, 1))
    data = TESTS / "data" / "slurm-22.05"
    (tools / "scontrol").write_text(
        f'#!/bin/bash\ncase "$*" in ping) ;;\n'
        f" *partition*) exec /bin/cat {data}/partitions.txt ;;\n"
        f' "show config") exec /bin/cat {data}/config.txt ;; *) exit 9 ;; esac\n'
    )
    for path in tools.iterdir():
        path.chmod(0o755)
    if USER:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


def ftslurm(home, *arguments, program=("-m", "ftslurm")):
    environ = {
        "PATH": f"{home / 'bin'}:/usr/bin:/bin",
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "FAKE_SBATCH": str(home / "calls"),
    }
    command = [sys.executable, *program, *arguments]
    options = {"cwd": home, "env": environ, "capture_output": True, "text": True, **USER}
    try:
        done = subprocess.run(command, timeout=60, preexec_fn=limit, **options)  # noqa: PLW1509
    except PermissionError:
        pytest.skip(f"`{sys.executable}` is closed to other users, so nobody else can submit here")
    if "No module named ftslurm" in done.stderr:
        pytest.skip(f"`{ROOT}` is closed to other users, so nobody else can submit from it")
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_a_run_is_planned_within_a_login_nodes_limits(home):
    said = ftslurm(home, *SUBMIT, "--dry-run").stdout
    assert "#SBATCH" in said and "nothing was submitted" in said


def test_a_run_is_submitted_within_a_login_nodes_limits(home):
    said = ftslurm(home, *SUBMIT, "--json").stdout
    root = Path(json.loads(said)["run_dir"])
    assert (root / "submit" / "train.sbatch").is_file()
    assert [path.name for path in (home / "calls").iterdir()] == ["call-0.json"]
    assert "never started" in ftslurm(home, "status", str(root)).stdout


def test_submitting_starts_no_threads_and_loads_no_array_library(home):
    said = ftslurm(home, *SUBMIT, program=("-c", COUNT)).stderr
    assert "loaded:\n" in said and "threads: 1\n" in said
