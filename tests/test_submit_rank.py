"""What a rank finds of the plugin: its call, its environment, its signal handlers."""

import json
import os
import signal
import subprocess
import sys

import pytest
from submitit.core.utils import DelayedSubmission

from ftslurm.run.rank import StopFlag
from ftslurm.run.spec import PROGRAM_ENTRY, ClusterSpec, RunSpec
from ftslurm.scheduler import open_scheduler
from ftslurm.scheduler.protocol import Site
from ftslurm.submit import executor as ours
from ftslurm.submit.executor import FtslurmJobEnvironment
from ftslurm.submit.freeze import freeze, plan_run
from ftslurm.submit.rank import TrainCall

SITE = Site("slurm", "22.05.8", kill_wait_s=5, job_requeue=True, send_user_signal=True)
RANK = {
    "SLURM_JOB_ID": "71", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n1",
    "FTSLURM_ATTEMPT": "1", "FTSLURM_TASKS_PER_NODE": "1", "MASTER_ADDR": "n1",
    "MASTER_PORT": "20001",
}  # fmt: skip
OWN_RANK = """
import os, signal, sys
def main():
    handler = signal.getsignal(signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    from ftslurm.run.rank import stop_flag
    print("stopped by", stop_flag.signal_name, handler == stop_flag._set)
    print("heavy", sorted({"torch", "h5py", "numpy"} & set(sys.modules)))
    import numpy
    print("numpy adds", numpy.arange(3).sum())
    return 75
def broken():
    raise RuntimeError("no such luck")
"""


def be_rank(tmp_path, entry, *, program=(), record=None, **environ):
    """The rank's process on a frozen run whose entry is in mytrain.py, of a program as its script
    starts it. `record`: of run.json in its place."""
    (tmp_path / "mytrain.py").write_text(OWN_RANK)
    cluster = ClusterSpec(scheduler="slurm")
    spec = RunSpec(entry=entry, program=list(program), runs_dir="runs", cluster=cluster)
    plan = plan_run(spec, "{}\n", open_scheduler("slurm"), SITE, folder=tmp_path)
    freeze(plan)
    layout = plan.layout
    layout.attempt(1).ranks.mkdir(parents=True)
    if record is not None:
        layout.run_json.write_text(record)
    done = subprocess.run(
        [
            *(sys.executable, *(["-S"] if program else [])),
            *("-u", "-m", "ftslurm.submit.rank", layout.submit),
        ],
        cwd=layout.code,
        env={
            **os.environ, **RANK, "FTSLURM_RUN_DIR": str(layout.root),
            "PYTHONPATH": str(layout.code), "SUBMITIT_EXECUTOR": "ftslurm", **environ,
        },
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return layout, done


def test_a_rank_of_ones_own_runs_under_submitit_with_the_flag_as_its_handler(tmp_path):
    layout, done = be_rank(tmp_path, "rank:mytrain:main")
    assert done.returncode == 75, done.stderr
    assert "stopped by SIGUSR1 True" in done.stdout and "heavy []" in done.stdout
    assert "JobEnvironment(job_id=71" in done.stderr + done.stdout
    assert not list(layout.submit.glob("*_result.pkl"))


def test_the_rank_of_a_program_needs_no_installed_package(tmp_path):
    program = [sys.executable, "-c", "import submitit, sys; sys.exit(f'{sys.stdin.read()}, read')"]
    layout, done = be_rank(tmp_path, PROGRAM_ENTRY, program=program)
    assert done.returncode == 1 and ", read" in done.stderr, "the program itself has them"
    (told,) = layout.attempt(1).ranks.iterdir()
    assert "ended with code 1" in json.loads(told.read_text())["message"]


@pytest.mark.parametrize("program", [[], ["true"]])
def test_a_rank_that_cannot_read_its_run_says_so_on_record(tmp_path, program):
    entry = PROGRAM_ENTRY if program else "rank:mytrain:main"
    layout, done = be_rank(tmp_path, entry, program=program, record="{")
    assert done.returncode == 1
    (told,) = layout.attempt(1).ranks.iterdir()
    assert "run.json` is not JSON" in json.loads(told.read_text())["message"]


def test_a_rank_of_an_array_task_finds_the_runs_one_call(tmp_path):
    array = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}
    _, done = be_rank(tmp_path, "rank:mytrain:main", **array)
    assert done.returncode == 75, done.stderr


def test_an_error_of_a_rank_is_on_record(tmp_path):
    layout, done = be_rank(tmp_path, "rank:mytrain:broken")
    assert done.returncode == 1
    record = json.loads((layout.attempt(1).ranks / "rank-00000.json").read_text())
    assert (record["type"], record["message"]) == ("RuntimeError", "no such luck")


def test_the_call_is_pickled_by_reference(tmp_path):
    ours.write_call(tmp_path)
    data = (tmp_path / ours.CALL).read_bytes()
    assert b"ftslurm.submit.rank" in data and len(data) < 500
    assert isinstance(DelayedSubmission.load(tmp_path / ours.CALL).function, TrainCall)


def test_the_handlers_only_set_the_flag_and_a_leftover_result_does_not_block(tmp_path, monkeypatch):
    flag = StopFlag()
    monkeypatch.setattr(ours, "stop_flag", flag)
    monkeypatch.setenv("SUBMITIT_FOLDER", str(tmp_path))
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    leftover = tmp_path / "71_0_result.pkl.save_tmp"
    leftover.touch()
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    try:
        environment = FtslurmJobEnvironment()
        environment._handle_signals(environment.paths, DelayedSubmission(TrainCall()))
        assert signal.getsignal(signal.SIGUSR1) == signal.getsignal(signal.SIGTERM) == flag._set
        assert not leftover.exists()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
