"""`ftslurm submit` as a person meets it: dry run, sentences, a whole local run, following."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftslurm.cli import main as cli
from ftslurm.recovery.ending import Ending
from ftslurm.submit.follow import Follower

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
OWN = ["entry=rank:mytrain:main", "steps=3"]
TRAIN = """
import os
from pathlib import Path
from ftslurm.errors import RANK_DONE, RANK_STOPPED
from ftslurm.files import write_json
from ftslurm.run.attempts import FINISHED, STOPPED, Outcome, write_outcome
from ftslurm.run.rank import RankEnvironment

def main():
    env = RankEnvironment.read()
    last = env.attempt == 2
    if env.rank == 0:
        write_outcome(env.attempt_layout, Outcome(FINISHED if last else STOPPED, env.attempt, None))
        if last:
            write_json(env.layout.done, {"schema_version": 1, "step": 3})
    print("cwd", Path.cwd(), "source", __file__)
    return RANK_DONE if last else RANK_STOPPED
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A submitter's working folder, without Slurm on PATH."""
    (tmp_path / "mytrain.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    bare = tmp_path / "bin"
    bare.mkdir()
    for name in ("bash", "sed", "env", "git"):
        (bare / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(bare))
    for name in ("SLURM_JOB_ID", "SLURM_CONF"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def slurm(folder, monkeypatch):
    """sbatch and scontrol that answer as Slurm 22.05 did; returns a switch for the controller."""
    data = TESTS / "data" / "slurm-22.05"
    place = folder / "bin" / "sbatch"
    text = (TESTS / "fake_sbatch.py").read_text()
    place.write_text(text.replace("/usr/bin/env python3", sys.executable, 1))
    scontrol = folder / "bin" / "scontrol"
    scontrol.write_text(
        f'#!/bin/bash\necho "$*" >>{folder}/asked\n'
        f'case "$*" in ping) [[ ! -e {folder}/down ]] ;;\n'
        f" *partition*) exec /bin/cat {data}/partitions.txt ;;\n"
        f' "show config") exec /bin/cat {data}/config.txt ;; *) exit 9 ;; esac\n'
    )
    for path in (place, scontrol):
        path.chmod(0o755)
    (folder / "calls").mkdir()
    monkeypatch.setenv("FAKE_SBATCH", str(folder / "calls"))
    return folder / "down"


def everything(folder):
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


def test_a_dry_run_shows_script_and_plan_and_writes_nothing(folder, capsys):
    before = everything(folder)
    assert cli(["submit", *OWN, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "cluster=local, because there is no sbatch on PATH" in out
    assert "#SBATCH --signal=USR1@120" in out and "local_ranks" in out
    assert "emergency save: 115 s" in out and "nothing was submitted" in out
    assert everything(folder) == before


def test_an_entry_that_its_module_does_not_name_is_warned_of_and_not_refused(folder, capsys):
    (folder / "mytrain.py").write_text("def train(): ...")
    assert cli(["submit", *OWN, "--dry-run"]) == 0
    err = capsys.readouterr().err
    assert err.count("`mytrain.py` has no `main` in its text") == 1


def test_a_dry_run_for_slurm_needs_no_slurm(folder, capsys):
    assert cli(["submit", *OWN, "cluster=slurm", "cluster.partition=gpu", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert "sbatch --parsable --job-name=ftslurm --partition=gpu" in captured.out
    assert "is left open" in captured.err
    assert not (folder / "runs").exists()


def test_a_misspelt_key_is_one_sentence_and_usage(folder, capsys):
    assert cli(["submit", "cluster.node=2"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ftslurm: error: no key `cluster.node`, did you mean `cluster.nodes`")
    assert err.count("\n") == 1 and "tasks_per_node" in err
    assert not (folder / "runs").exists()


def test_slurm_asked_for_where_there_is_none_names_the_local_way(folder, capsys):
    assert cli(["submit", *OWN, "cluster=slurm"]) == 1
    assert "sbatch is not on PATH" in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_a_dead_controller_is_told_at_once_and_names_the_local_way(folder, slurm, capsys):
    slurm.touch()
    assert cli(["submit", *OWN]) == 1
    # What blocks for 9 s and more while the controller is away is not even tried.
    assert (folder / "asked").read_text() == "ping\n"
    err = capsys.readouterr().err
    assert "slurmctld does not answer" in err and "cluster=local" in err
    assert not (folder / "runs").exists() and not list((folder / "calls").iterdir())


def test_submitting_prints_job_id_and_run_directory_and_returns(folder, slurm, capsys):
    assert cli(["submit", *OWN, "cluster.partition=low", "name=mine"]) == 0
    out = capsys.readouterr().out
    assert "cluster=slurm, because sbatch is on PATH" in out and "job id:        4000" in out
    (root,) = (folder / "runs").iterdir()
    assert f"run directory: {root}\n" in out and root.name.startswith("mine-")
    (call,) = [json.loads(path.read_text()) for path in (folder / "calls").iterdir()]
    assert call["options"]["partition"] == "low"
    record = json.loads((root / "run.json").read_text())
    # GraceTime 15 and KillWait 5 of that site, less the margin.
    assert record["emergency_deadline_s"] == 15.0 and record["site"]["version"] == "22.05.8"


def test_a_run_id_is_taken_once(folder, slurm, capsys):
    again = ["submit", *OWN, "run_id=mine-1"]
    assert cli(again) == 0
    root = folder / "runs" / "mine-1"
    before = (root / "run.json").read_bytes()
    capsys.readouterr()
    assert cli(again) == 1
    err = capsys.readouterr().err
    assert f"`{root}` exists: two runs cannot share a directory" in err
    assert f"`ftslurm resume {root}`" in err
    assert (root / "run.json").read_bytes() == before
    assert len(list((folder / "calls").iterdir())) == 1, "sbatch was called once"


def test_a_refused_job_leaves_no_run_directory(folder, slurm, capsys):
    answer = {"rc": 1, "stdout": "", "stderr": "sbatch: error: Invalid account\n"}
    (folder / "calls" / "answer.json").write_text(json.dumps(answer))
    assert cli(["submit", *OWN]) == 1
    assert "Invalid account" in capsys.readouterr().err
    assert list((folder / "runs").iterdir()) == []


def test_a_job_that_may_exist_keeps_its_run_directory(folder, slurm, capsys):
    said = "sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received\n"
    (folder / "calls" / "answer.json").write_text(
        json.dumps({"rc": 1, "stdout": "", "stderr": said})
    )
    assert cli(["submit", *OWN]) == 1
    err = capsys.readouterr().err
    (root,) = (folder / "runs").iterdir()
    assert "unclear" in err and "squeue --me --name=ftslurm" in err and str(root) in err
    assert (root / "run.json").is_file()


def test_folders_on_pythonpath_that_the_ranks_will_not_see_are_told(folder, capsys, monkeypatch):
    (folder / "mine").mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{folder}/mine:{folder}:{ROOT}:/nonexistent/x:")
    assert cli(["submit", *OWN, "--dry-run", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("warning") == 1
    assert f"PYTHONPATH has {folder}/mine, which the ranks will not see" in captured.err
    assert json.loads(captured.out)["job_id"] is None


def test_ctrl_c_detaches_and_says_how_to_follow_again(folder, slurm, capsys, monkeypatch):
    def interrupted(follower):
        raise KeyboardInterrupt

    monkeypatch.setattr(Follower, "follow", interrupted)
    assert cli(["submit", *OWN, "--wait"]) == 1
    (root,) = (folder / "runs").iterdir()
    assert f"the run goes on; follow it again: ftslurm submit --follow {root}" in (
        capsys.readouterr().out
    )


def test_the_result_as_json_is_all_there_is_on_stdout(folder, slurm, capsys):
    assert cli(["submit", *OWN, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["job_id"] == "4000" and Path(record["run_dir"]).name == record["run_id"]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--drill"], "needs --wait"),
        (["drill=true"], "needs --wait"),
        (["drill=maybe", "--wait"], "drill=true or drill=false"),
        (["--follow", "x", "steps=3"], "overrides are for a new run"),
    ],
)
def test_options_that_cannot_go_together_are_usage(folder, capsys, arguments, says):
    assert cli(["submit", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_signal_that_nccl_takes_is_refused(folder, capsys, monkeypatch):
    monkeypatch.setenv("NCCL_PROXY_DUMP_SIGNAL", "10")
    assert cli(["submit", *OWN]) == 2
    assert "takes SIGUSR1" in capsys.readouterr().err


def test_following_what_is_no_run_says_so(folder, capsys):
    assert cli(["submit", "--follow", "nothing"]) == 1
    assert "neither it nor `runs/nothing` has a run.json" in capsys.readouterr().err


def test_a_run_is_followed_by_its_id_under_runs(folder, slurm, capsys, monkeypatch):
    assert cli(["submit", *OWN, "run_id=mine"]) == 0
    followed = []

    def follow(follower):
        followed.append(follower.layout.root)
        return Ending(True, 1, "finished: 1 attempt")

    monkeypatch.setattr(Follower, "follow", follow)
    assert cli(["submit", "--follow", "mine"]) == 0
    assert followed == [folder / "runs" / "mine"]


def test_a_local_run_is_submitted_requeued_and_followed_to_its_end(folder):
    command = [sys.executable, "-m", "ftslurm", "submit", *OWN, "cluster=local", "--wait"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (root,) = (folder / "runs").iterdir()
    assert "attempt 2 begins" in done.stdout and "-> requeued" in done.stdout
    assert f"run {root.name} finished: 2 attempts" in done.stdout
    # The batch script's last word is there too when the follower returns.
    assert "attempt 2 ended: " in done.stdout
    assert (root / "attempts" / "0002" / "decision.json").is_file()
    assert "warning" not in done.stderr
    log = (root / "attempts" / "0002" / "logs" / "rank-1.log").read_text()
    assert f"cwd {root}/code source {root}/code/mytrain.py" in log


def test_a_local_run_outlives_its_submitter_and_keeps_no_pipe_of_its(folder):
    command = [sys.executable, "-m", "ftslurm", "submit", *OWN, "cluster=local", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run_dir = Path(json.loads(done.stdout)["run_dir"])
    deadline = time.monotonic() + 200
    while not (run_dir / "DONE").exists():
        assert time.monotonic() < deadline, (run_dir / "submit").iterdir()
        time.sleep(0.1)
    assert cli(["submit", "--follow", str(run_dir)]) == 0
