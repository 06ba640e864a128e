"""Placement on real Slurm: ranks in a container, an environment unpacked on the nodes, set-up lines
and values that a shell would love to run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import spine
from batch_runs import INTERVAL, STEPS, LabRun
from fakes.project import Run, make_project, overrides, slow
from lab import REPOSITORY, Lab

from ftslurm.files import read_json
from ftslurm.run.attempts import FINISHED, STOPPED, numbers, read_attempt

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

# Nothing of the node's own /dev and /tmp, and a PID namespace: nobody inside is seen by its number.
BWRAP = [
    "bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp",
    "--bind", "{run_dir}", "{run_dir}", "--unshare-pid", "--die-with-parent",
]  # fmt: skip
ODD = "a 'b' \"c\" $(touch pwned) `id`; naïve-名 #"

# Each rank leaves what it sees of its surroundings, then trains.
SEEN = """
import json, os, sys
from tests.fakes.rank import main as train

def main():
    names = ("FROM_SETUP", "FROM_ENV", "MASTER_ADDR", "GLOO_SOCKET_IFNAME", "SLURMD_NODENAME")
    seen = {name: os.environ.get(name) for name in names}
    seen.update(python=sys.executable, pid=os.getpid(), tmp=os.listdir("/tmp"))
    folder = os.environ["FTSLURM_RUN_DIR"]
    with open(f"{folder}/seen-{os.environ['SLURM_PROCID']}.json", "w") as out:
        json.dump(seen, out)
    return train()
"""


def given(key: str, value: object) -> str:
    """An override that Hydra takes as it is."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


# Two of three nodes; job name, comment and environment are what a shell would run.
IN_CONTAINER = (
    "entry=rank:tests.fakes.seen:main",
    given("cluster.container", BWRAP),
    given("cluster.job_name", ODD),
    given("cluster.comment", ODD),
    given("cluster.setup", ["export FROM_SETUP='it is' # set", 'echo "$UNSET_AND_FINE"']),
    given("cluster.env.FROM_ENV", ODD),
    given("cluster.sbatch", ["--nice=3"]),
    "cluster.interface=eth0",
    "cluster.spares=1",
)


def seen(run: LabRun) -> list[dict[str, Any]]:
    paths = sorted(run.run.layout.root.glob("seen-*.json"))
    return [json.loads(path.read_text()) for path in paths]


def in_accounting(text: str) -> str:
    """slurmdbd turns double quotes into backticks, and what its database cannot hold into `?`."""
    return re.sub(r"[^ -~]", "?", text.replace('"', "`"))


def output(run: LabRun) -> str:
    return (run.run.layout.submit / f"{run.job_id}.out").read_text()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of four ranks on this machine: where they run is no part of the training."""
    folder = make_project(tmp_path_factory.mktemp("undisturbed"))
    asked = overrides(steps=STEPS, interval=INTERVAL, step_s=0.0)
    argv = [sys.executable, "-m", "ftslurm", "submit", "cluster=local", "--json", "--wait"]
    done = subprocess.run(
        [*argv, "cluster.tasks_per_node=4", *asked],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return str(Run(json.loads(done.stdout)["run_dir"]).digest)


def pack_environment(lab: Lab, folder: Path) -> Path:
    """A small venv with what ranks without torch import, packed as the README says."""
    venv = folder / "venv"
    python = Path(sys.base_prefix) / "bin" / "python3"
    lab.run_as(lab.user, [str(python), "-m", "venv", "--without-pip", "--symlinks", str(venv)])
    site = next(venv.glob("lib/python*/site-packages"))
    packages = next((lab.python.parent.parent / "lib").glob("python*/site-packages"))
    for name in ("submitit", "cloudpickle", "xxhash"):
        lab.run_as(lab.user, ["cp", "-r", str(packages / name), str(site)])
    lab.run_as(lab.user, ["cp", str(packages / "typing_extensions.py"), str(site)])
    lab.run_as(lab.user, ["tar", "-C", str(venv), "-cf", str(folder / "env.tar"), "."])
    shutil.rmtree(venv)
    return folder / "env.tar"


@pytest.fixture(scope="module")
def runs(lab: Lab) -> dict[str, LabRun]:
    """Three on one node, and on the others the one that is preempted; all at their ends."""
    made = submit_all(lab)
    made["container"].wait_for_training(1)
    shown = lab.run_as_root("scontrol", "show", "job", made["container"].job_id)
    assert f"JobName={ODD}\n" in shown and f"Comment={ODD}" in shown and "Nice=3" in shown
    assert "NumNodes=3 " in shown
    nodes = lab.show_job(made["container"].job_id)["NodeList"]
    lab.preempt(3, nodelist=nodes, seconds=1)
    lab.hasten(made["container"].job_id)
    for run in made.values():
        lab.wait_for_end(run.job_id, 180)
    return made


def submit_all(lab: Lab) -> dict[str, LabRun]:
    alone = (
        "entry=rank:tests.fakes.seen:main",
        "cluster.nodes=1",
        "recovery.max_failures=1",
        given("cluster.sbatch", ["--nodelist=n4"]),
    )
    shared = Path(
        lab.run_as(lab.user, ["mktemp", "-d", f"{lab.home(lab.user)}/XXX"]).stdout.strip()
    )
    packed = pack_environment(lab, shared)
    torn = shared / "torn.tar"
    torn.write_bytes(packed.read_bytes()[:100_000])
    files = {"tests/fakes/seen.py": SEEN}
    rank_python = given("cluster.rank_python", str(lab.python))
    return {
        "unpacked": LabRun(
            lab,
            "unpacked",
            *alone,
            given("cluster.environment", str(packed)),
            faults="kill@step:rank=1:step=7:attempt=1",
            files=files,
        ),
        "torn": LabRun(lab, "torn", *alone, given("cluster.environment", str(torn)), files=files),
        "setup": LabRun(
            lab, "setup", *alone, given("cluster.setup", ["true", "load_it cuda # 12"]), files=files
        ),
        "container": LabRun(lab, "container", *IN_CONTAINER, rank_python, *slow(), files=files),
    }


def test_ranks_in_a_container_are_preempted_as_any_others(
    lab: Lab, runs: dict[str, LabRun], undisturbed: str
) -> None:
    run = runs["container"]
    run.end_as("COMPLETED")

    assert run.run.decisions() == ["requeued", "done"], run.says()
    assert run.run.digest == undisturbed and run.run.steps_trained_twice == 0
    attempts = [read_attempt(run.run.layout, n) for n in numbers(run.run.layout)]
    nodes = [rank["SLURMD_NODENAME"] for rank in seen(run)]
    assert [len(attempt.nodes) for attempt in attempts] == [2, 2]
    assert nodes == [node for node in attempts[-1].nodes for _ in range(2)]
    for rank in seen(run):
        assert rank["pid"] < 10 and rank["tmp"] == []
        assert (rank["FROM_SETUP"], rank["FROM_ENV"]) == ("it is", ODD)
        assert rank["GLOO_SOCKET_IFNAME"] == "eth0" and rank["MASTER_ADDR"].count(".") == 3
    named = lab.run_as_root("sacct", "-D", "-X", "-n", "-j", run.job_id, "--format=JobName%80")
    assert {in_accounting(line.strip()) for line in named.splitlines()} == {in_accounting(ODD)}
    assert not list(run.folder.rglob("pwned"))


def test_an_environment_is_unpacked_once_on_a_node_for_all_attempts(
    runs: dict[str, LabRun],
) -> None:
    run = runs["unpacked"]
    run.end_as("COMPLETED")
    assert run.run.decisions() == ["restart", "done"], run.says()
    assert output(run).count("env.tar` into `/tmp/ftslurm-") == 1, output(run)
    for rank in seen(run):
        assert rank["python"].startswith("/tmp/ftslurm-")


def test_a_node_that_cannot_unpack_the_environment_fails_the_attempt_by_name(
    runs: dict[str, LabRun],
) -> None:
    run = runs["torn"]
    run.end_as("FAILED")
    assert run.run.decisions() == ["restart", "stop"], run.says()
    node = read_attempt(run.run.layout, 1).nodes[0]
    reason = read_json(run.run.layout.attempt(2).decision_json)["reason"]
    assert "as in attempt 1" in reason and f"on {node} failed first" in reason
    assert "torn.tar` cannot be unpacked" in reason
    assert seen(run) == []


def test_a_line_of_setup_that_fails_ends_the_job_with_a_sentence(runs: dict[str, LabRun]) -> None:
    run = runs["setup"]
    run.end_as("FAILED")
    assert "load_it cuda # 12` (code 127)" in output(run), output(run)
    assert numbers(run.run.layout) == []


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.timeout(600)
def test_torch_in_a_container_ends_with_the_bits_of_torch_outside(lab: Lab) -> None:
    outside = spine.submit(lab, "parallel=fsdp", name="outside")
    rank_python = given("cluster.rank_python", str(lab.python))
    in_container = ("parallel=fsdp", given("cluster.container", BWRAP), rank_python)
    # It is not over before it is preempted.
    slow_steps = {"FTSLURM_FAULTS": "sleep@step:attempt=1:since=7:seconds=2"}
    inside = spine.submit(lab, *in_container, name="inside", environ=slow_steps)
    inside.wait_for_step(1, 7, timeout_s=240)
    inside.preempt()
    inside.finish(timeout_s=240)
    outside.finish(timeout_s=240)
    assert inside.losses == outside.losses, inside.story()
    assert inside.parameter_digest == outside.parameter_digest
    assert inside.trained_twice() == 0
    assert [outcome and outcome.result for outcome in inside.outcomes()] == [STOPPED, FINISHED]
