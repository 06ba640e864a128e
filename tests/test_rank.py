"""The protocol of a rank: who it is, what a signal does, what it leaves when it fails."""

import os
import signal
import time

import pytest

from ftslurm import faults
from ftslurm.errors import FormatError, RunError, UsageError
from ftslurm.files import read_json
from ftslurm.run import attempts
from ftslurm.run.layout import (
    RunLayout,
    parse_step_name,
    parse_temporary_name,
    step_name,
    temporary_name,
)
from ftslurm.run.rank import RankEnvironment, StopFlag, write_rank_error

ENVIRON = {
    "FTSLURM_RUN_DIR": "/runs/r", "FTSLURM_ATTEMPT": "3", "FTSLURM_TASKS_PER_NODE": "2",
    "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURMD_NODENAME": "n2",
    "MASTER_ADDR": "n1", "MASTER_PORT": "20001",
}  # fmt: skip


def test_a_rank_knows_who_it_is():
    env = RankEnvironment.read({**ENVIRON, "FTSLURM_STOP_AT": "1700000000"})
    assert (env.rank, env.world_size, env.local_rank, env.node) == (3, 4, 1, "n2")
    assert (env.master_addr, env.master_port, env.stop_at) == ("n1", 20001, 1.7e9)


@pytest.mark.parametrize("unknown", ["", "0"])
def test_an_unknown_end_of_the_job_is_no_time_to_stop(unknown):
    assert RankEnvironment.read({**ENVIRON, "FTSLURM_STOP_AT": unknown}).stop_at is None


def test_a_rank_started_by_hand_is_told_how_ranks_are_started():
    with pytest.raises(UsageError, match="SLURM_NTASKS is not set"):
        RankEnvironment.read({})


def test_the_first_signal_counts_and_later_ones_change_nothing():
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    flag = StopFlag()
    try:
        flag.install()
        assert not flag.is_set and flag.signal_name is None
        os.kill(os.getpid(), signal.SIGUSR1)
        seen_at = flag.signalled_at
        os.kill(os.getpid(), signal.SIGTERM)
        assert (flag.is_set, flag.signal_name) == (True, "SIGUSR1")
        assert 0 < seen_at <= time.monotonic() and flag.signalled_at == seen_at
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_a_rank_that_fails_leaves_its_own_account(tmp_path):
    env = RankEnvironment.read({**ENVIRON, "FTSLURM_RUN_DIR": str(tmp_path)})
    env.attempt_layout.ranks.mkdir(parents=True)
    try:
        raise ValueError("bad loss")
    except ValueError as error:
        write_rank_error(env, error, step=7)
    record = read_json(env.attempt_layout.ranks / "rank-00003.json")
    assert (record["type"], record["message"], record["step"]) == ("ValueError", "bad loss", 7)
    assert any("test_rank.py" in line for line in record["traceback"])


@pytest.mark.parametrize("step", [0, 1, 12_000, 10**12 - 1])
def test_names_of_steps_are_read_back(step):
    assert parse_step_name(step_name(step)) == step
    assert parse_temporary_name(temporary_name(step, 3)) == (step, 3)
    assert parse_step_name(temporary_name(step, 3)) is None


def test_an_outcome_is_written_once(tmp_path):
    paths = RunLayout(tmp_path).attempt(1)
    paths.root.mkdir(parents=True)
    outcome = attempts.Outcome(attempts.STOPPED, step=3, committed_step=3)
    attempts.write_outcome(paths, outcome)
    assert attempts.read_outcome(paths) == outcome
    with pytest.raises(RunError, match="written once"):
        attempts.write_outcome(paths, outcome)


def test_an_outcome_that_is_not_whole_is_refused_and_none_is_none(tmp_path):
    paths = RunLayout(tmp_path).attempt(1)
    paths.root.mkdir(parents=True)
    assert attempts.read_outcome(paths) is None
    paths.outcome_json.write_text('{"schema_version": 1, "result": "stopped"}')
    with pytest.raises(FormatError, match="lacks a field"):
        attempts.read_outcome(paths)


def test_a_fault_breaks_where_and_when_it_was_asked_to(monkeypatch):
    monkeypatch.setenv(faults.ENVIRONMENT, "enospc@persist:rank=1:step=20; eio@staged")
    faults.point("persist", rank=0, step=20)
    faults.point("persist", rank=1, step=10)
    with pytest.raises(OSError, match="No space left"):
        faults.point("persist", rank=1, step=20)
    with pytest.raises(OSError, match="Input/output error"):
        faults.point("staged")


def test_a_fault_can_be_time_that_passes_from_a_step_on(monkeypatch):
    slept = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    monkeypatch.setenv(faults.ENVIRONMENT, "sleep@step:since=3:attempt=2:seconds=0.5")
    for attempt in (1, 2):
        for step in (2, 3, 4):
            faults.point("step", rank=0, step=step, attempt=attempt)
    assert slept == [0.5, 0.5]


def test_a_fault_is_any_error_by_its_name_at_a_named_file_so_many_times(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv(faults.ENVIRONMENT, "estale@read_file:name=run.json:rank=1:times=2")
    faults.point("read_file", name="attempt.json")
    for _ in range(2):
        with pytest.raises(OSError, match="Stale file handle"):
            faults.point("read_file", name="run.json")
    faults.point("read_file", name="run.json")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv(faults.ENVIRONMENT, "edquot@read_file:name=run.json:rank=1")
    faults.point("read_file", name="run.json")


@pytest.mark.parametrize("plan", ["kill@nowhere", "explode@persist"])
def test_a_fault_that_does_not_exist_is_refused(monkeypatch, plan):
    monkeypatch.setenv(faults.ENVIRONMENT, plan)
    with pytest.raises(UsageError, match="choose from|use kill"):
        faults.point("persist")
