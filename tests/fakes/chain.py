"""A torch-free run on this machine from `ftslurm submit` to its end: what tests drive."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from fakes.project import Run, make_project, overrides

from ftslurm.scheduler import open_scheduler

ROOT = Path(__file__).resolve().parents[2]
STEPS, INTERVAL = 30, 10
DEADLINE_S = 200
"""For what hangs: a chain of eight attempts takes a minute on two cores at a load of 20."""


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
