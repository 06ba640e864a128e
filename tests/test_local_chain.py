"""The whole chain without Slurm and without torch: submit, batch loop, ranks, recovery, status."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes.project import Run, make_project, overrides

from ftslurm.files import read_json
from ftslurm.run.attempts import read_progress
from ftslurm.scheduler import open_scheduler

ROOT = Path(__file__).resolve().parent.parent
STEPS, INTERVAL = 30, 10
DEADLINE_S = 90


class Chain:
    """A project folder, and the run submitted from it."""

    def __init__(self, folder):
        self.folder = make_project(folder)

    def submit(self, *more, faults="", step_s=0.02):
        given = overrides(steps=STEPS, interval=INTERVAL, step_s=step_s, more=more)
        done = ftslurm("submit", "cluster=local", *given, "--json", cwd=self.folder, faults=faults)
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        self.run, self.job_id = Run(record["run_dir"]), record["job_id"]
        self.scheduler = open_scheduler("local", run_dir=self.run.layout.root)
        return self.run

    def wait(self, word):
        wait_for(lambda: self.scheduler.job_state(self.job_id).is_ended, self.run.says)
        assert self.scheduler.job_state(self.job_id).word == word, self.run.says()


def ftslurm(*arguments, cwd, faults=""):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "FTSLURM_FAULTS": faults}
    argv = [sys.executable, "-m", "ftslurm", *arguments]
    return subprocess.run(
        argv, cwd=cwd, env=environ, capture_output=True, text=True, timeout=DEADLINE_S
    )


def wait_for(look, seen):
    deadline = time.monotonic() + DEADLINE_S
    while not look():
        assert time.monotonic() < deadline, seen()
        time.sleep(0.05)


def status(run):
    return json.loads(ftslurm("status", str(run.layout.root), "--json", cwd="/").stdout)


@pytest.fixture
def chain(tmp_path):
    return Chain(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    chain = Chain(tmp_path_factory.mktemp("undisturbed"))
    run = chain.submit()
    chain.wait("COMPLETED")
    assert run.decisions() == ["done"]
    assert sorted(run.losses) == list(range(1, STEPS + 1))
    return run


def test_a_run_that_is_told_to_leave_ends_as_if_nothing_had_happened(chain, undisturbed):
    run = chain.submit(step_s=0.1)

    def trains():
        progress = read_progress(run.layout.attempt(1))
        return progress is not None and 0 < progress.step < STEPS - 5

    wait_for(trains, run.says)
    chain.scheduler.signal_ranks(chain.job_id, "USR1")
    chain.wait("COMPLETED")
    assert run.decisions() == ["requeued", "done"]
    assert (run.digest, run.losses) == (undisturbed.digest, undisturbed.losses)
    assert run.steps_trained_twice == 0
    told = status(run)
    assert (told["state"], told["steps_lost"]) == ("done", 0)
    first, second = told["attempts"]
    assert (first["ended"], first["signal"]) == ("stopped", "SIGUSR1")
    assert second["restored_step"] == first["last_step"] == first["committed_step"]
    assert second["restart_count"] == 1


# Where each attempt is killed, and the step from which the next one goes on.
DEATHS = [
    ("kill@step:rank=1:step=17", 10),
    ("kill@staged:rank=0:step=20", 10),
    ("kill@persist:rank=1:step=20", 10),
    ("kill@before_commit:step=20", 10),
    ("kill@before_rename:step=20", 10),
    ("kill@after_rename:step=20", 20),
    ("kill@restored:rank=1", 20),
]


def test_a_death_costs_the_steps_since_the_last_commit_and_nothing_else(chain, undisturbed):
    faults = ";".join(f"{where}:attempt={i}" for i, (where, _) in enumerate(DEATHS, start=1))
    run = chain.submit(f"recovery.max_failures={len(DEATHS)}", faults=faults)
    chain.wait("COMPLETED")
    assert run.decisions() == ["restart"] * len(DEATHS) + ["done"], run.says()
    assert (run.digest, run.losses) == (undisturbed.digest, undisturbed.losses)
    told = status(run)
    restored = [attempt["restored_step"] for attempt in told["attempts"]]
    assert restored == [None, *(step for _, step in DEATHS)]
    assert told["steps_lost"] == run.steps_trained_twice > 0


def test_a_crash_loop_stops_the_run_with_a_sentence(chain):
    run = chain.submit("recovery.max_failures=1", faults="exit@step:rank=1:step=3")
    chain.wait("FAILED")
    assert run.decisions() == ["restart", "stop"], run.says()
    reason = read_json(run.layout.attempt(2).root / "decision.json")["reason"]
    assert "2 failures in a row" in reason and "rank 1" in reason and "submit again" in reason
    assert status(run)["state"] == "stopped"
    assert "stop: 2 failures in a row" in ftslurm("status", str(run.layout.root), cwd="/").stdout
