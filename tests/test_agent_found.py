"""Which processes an agent takes for an attempt's, and how it ends them."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.views import TRAINING_RANK

from ftslurm.agent.processes import Found, end, find, launchers_of, ranks_of
from ftslurm.parent import die_with_parent
from ftslurm.scheduler.process import ProcessName

RUN, NODE = Path("/nowhere/run-7"), "n1"
NAME = ProcessName(1, 1)


@pytest.fixture
def start():
    started = []

    def start(*argv, attempt=3, step=True, node=NODE, **more):
        environ = {"PATH": os.environ["PATH"], "FTSLURM_RUN_DIR": str(RUN), **more}
        environ.update({"FTSLURM_ATTEMPT": str(attempt), "SLURMD_NODENAME": node})
        environ.update({"SLURM_STEP_ID": "2"} if step else {})
        process = subprocess.Popen(
            argv or ["sleep", "60"], env=environ, preexec_fn=die_with_parent()
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def pids(names):
    return {name.pid for name in names}


@pytest.mark.parametrize(
    ("argv", "is_in_step", "is_rank"),
    [
        ("/usr/bin/python3 -u -m ftslurm.submit.rank", True, True),
        ("/opt/bin/train --steps 3", True, True),
        ("/usr/bin/python3 -m ftslurm.node.standby_rank", True, True),
        ("/usr/bin/python3 -m ftslurm.node.standby", True, False),
        ("/usr/bin/python3 -m ftslurm.agent /nowhere/run-7", True, False),
        ("/usr/bin/python3 -m ftslurm recover /nowhere/run-7", True, False),
        ("/usr/bin/python3 -m ftslurm recover /nowhere/run-7", False, False),
        ("srun -n4 python3", False, False),
        ("srun -n4 python3", True, False),
        ("tee launcher.log", True, False),
        ("/bin/bash train.sbatch", False, False),
        ("", True, True),
    ],
)
def test_what_is_a_rank(argv, is_in_step, is_rank):
    assert Found(NAME, 3, tuple(argv.split()), is_in_step).is_rank is is_rank


@pytest.mark.parametrize(
    ("argv", "is_launcher"),
    [
        ("srun -n4 python3 -m ftslurm.submit.rank", True),
        ("/usr/bin/srun --overlap python3 -m ftslurm.agent RUN", False),
        ("srun --overlap python3 -u -m ftslurm.node.standby torch", False),
        ("python3 -m ftslurm.submit.rank", False),
    ],
)
def test_what_is_the_ranks_launcher(argv, is_launcher):
    assert Found(NAME, 3, tuple(argv.split()), False).is_launcher is is_launcher


def test_only_this_runs_processes_of_this_attempt_and_node_are_found(start):
    rank, batch = start(), start(step=False)
    start(node="n2")
    start(FTSLURM_RUN_DIR="/nowhere/run-8")
    older, newer = start(attempt=2), start(attempt=4)
    assert pids(ranks_of(RUN, NODE, 3, [])) == {rank.pid}
    assert pids(ranks_of(RUN, NODE, 3, [], older=True)) == {rank.pid, older.pid}
    assert {found.name.pid for found in find(RUN, NODE)} >= {batch.pid, newer.pid}
    assert not launchers_of(RUN, NODE, 3)


def test_a_job_that_a_rank_has_submitted_is_another_ones(start):
    """It has all variables of the rank, and may run on the same node."""
    rank = start(SLURM_JOB_ID="77", FTSLURM_JOB_ID="77")
    start(SLURM_JOB_ID="78", FTSLURM_JOB_ID="77")
    assert pids(ranks_of(RUN, NODE, 3, [], older=True)) == {rank.pid}
    assert Found(NAME, 3, ("srun", "-n4"), False, False).is_launcher is False


def test_a_beating_rank_counts_whatever_its_environment_and_its_children_with_it(start):
    program = "import subprocess; subprocess.run(['sleep', '60'])"
    forked = start(sys.executable, "-c", program, attempt="", FTSLURM_RUN_DIR="")
    name = wait_for(lambda: ProcessName.of(forked.pid))
    seen = replace(TRAINING_RANK, pid=name.pid, start_ticks=name.started)
    wait_for(lambda: len(ranks_of(RUN, NODE, 3, [seen])) == 2)


def test_a_pid_that_is_used_again_is_no_rank(start):
    other = start(attempt="", FTSLURM_RUN_DIR="")
    name = ProcessName.of(other.pid)
    stale = replace(TRAINING_RANK, pid=name.pid, start_ticks=name.started - 1)
    assert not ranks_of(RUN, NODE, 3, [stale])


def test_term_first_and_kill_for_who_stays(start, tmp_path):
    deaf = f"import signal, time; signal.signal(15, signal.SIG_IGN); open('{tmp_path}/deaf', 'w')"
    polite, stays = start(), start(sys.executable, "-c", f"{deaf}; time.sleep(60)")
    stopped = start()
    stopped.send_signal(signal.SIGSTOP)
    os.waitpid(stopped.pid, os.WUNTRACED)
    wait_for((tmp_path / "deaf").exists)
    assert not end(lambda: ranks_of(RUN, NODE, 3, []), grace_s=2.0)
    codes = [process.wait(60) for process in (polite, stays, stopped)]
    assert codes == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGKILL]


def test_what_does_not_end_is_told():
    class Immortal(ProcessName):
        is_alive = True

        def send(self, number):
            return True

    clock = [0.0]

    def sleep(seconds):
        clock[0] += seconds

    name = Immortal(5, 5)
    assert end(lambda: {name}, sleep=sleep, clock=lambda: clock[0]) == {name}
    assert clock[0] < 15


def wait_for(look, timeout_s=90):
    deadline = time.monotonic() + timeout_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline
        time.sleep(0.05)
