"""What a batch loop gives to sbatch: the run's frozen command, in the job's own environment."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftslurm.errors import RunError
from ftslurm.run.layout import RunLayout
from ftslurm.scheduler.sbatch import environment_of_job, frozen_arguments, with_excluded


def test_the_environment_is_the_one_the_batch_shell_was_started_with():
    program = (
        "import json, os, sys; from ftslurm.scheduler.sbatch import environment_of_job;"
        "print(json.dumps(environment_of_job(os.getppid())))"
    )
    # As the batch script does it: what it exports itself, and a subshell of its own in between.
    shell = (
        'export PATH="/extra:$PATH" KEPT=no OWN=yes\n'
        f"said=$({sys.executable} -c '{program}')\n"
        'echo "$said"'
    )
    root = str(Path(__file__).resolve().parent.parent)
    given = {"PATH": os.environ["PATH"], "PYTHONPATH": root, "KEPT": "a b\nc=d",
             "CUDA_VISIBLE_DEVICES": "3"}  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", shell], env=given, capture_output=True, text=True, timeout=60, check=True
    )
    seen = json.loads(done.stdout)
    assert (seen["KEPT"], seen["PATH"]) == ("a b\nc=d", given["PATH"])
    assert "OWN" not in seen and "CUDA_VISIBLE_DEVICES" not in seen


def test_what_the_script_exports_of_this_job_is_not_the_next_ones(tmp_path):
    own = {"FTSLURM_RUN_DIR": "/r", "FTSLURM_ATTEMPT": "3", "MASTER_PORT": "20001"}
    given = {"FTSLURM_FAULTS": "kill@step:attempt=4", "MASTER_OF_MINE": "yes"}
    with subprocess.Popen(["sleep", "60"], env={**own, **given}) as agent:
        # Popen returns when exec closes its pipe; the kernel shows the environment a moment later.
        while not Path(f"/proc/{agent.pid}/environ").read_bytes():
            time.sleep(0.01)
        found = environment_of_job(agent.pid)
        agent.kill()
    assert found == given


def test_a_parent_that_cannot_be_looked_at_leaves_our_own_environment(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    assert environment_of_job(2**22 + 1)["KEPT"] == "1"


def test_the_frozen_command_is_read_as_a_shell_would(tmp_path):
    layout = RunLayout(tmp_path)
    layout.submit.mkdir()
    with pytest.raises(RunError, match="is not there"):
        frozen_arguments(layout)
    layout.sbatch_command.write_text("sbatch --parsable '--job-name=a b' \"/r u/train.sbatch\"\n")
    assert frozen_arguments(layout) == ["--parsable", "--job-name=a b", "/r u/train.sbatch"]


def test_excluded_nodes_join_those_of_the_frozen_command():
    frozen = ["--parsable", "--exclude=n[1-2]", "--nodes=2", "run.sbatch"]
    assert with_excluded(frozen, []) == frozen
    assert with_excluded(frozen, ["n7", "n2"]) == [
        "--exclude=n1,n2,n7", "--parsable", "--nodes=2", "run.sbatch",
    ]  # fmt: skip
    assert with_excluded(["a.sbatch"], ["n7"]) == ["--exclude=n7", "a.sbatch"]
