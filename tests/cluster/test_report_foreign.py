"""Jobs that are none of ours, on real Slurm: accounting alone tells what each ended of, in whatever
shell it is asked for. Nobody is blamed for a kill that came from outside.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, Optional

import pytest
from lab import Lab, wait_until
from report_faults import PATIENCE_S
from report_told import ask, between, new_folder, same

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), pytest.mark.full]

TASKS = sorted(random.Random(1).sample(range(1, 1000), 120))
"""No ranges among them: as text they are longer than sacct prints by itself."""
ENDS = {
    "says so": ("FAILED", "code", "exit code 3"),
    "no output": ("FAILED", "code", "could not open its output"),
    "killed": ("FAILED", "unknown", "signal 9"),
    "ended": ("FAILED", "unknown", "signal 15"),
    "step killed": ("FAILED", "unknown", "128 + 9: what it ran was killed"),
    "step ended": ("FAILED", "unknown", "128 + 15: what it ran was killed"),
    "raises": ("FAILED", "code", "exit code"),
    "raises on one": ("FAILED", "unknown", "or srun ended it because one of its ranks had failed"),
    "crashes": ("COMPLETED", "code", "died of signal 11"),
    "shrinks": ("COMPLETED", None, ""),
    "follows": ("CANCELLED", "cancelled_user", "as where a job that it depends on has failed"),
}
"""Slurm's word, the cause and what is said of it."""
SHRINKS = """
sleep 3
date +%s.%N > resized
scontrol update JobId=$SLURM_JOB_ID NumNodes=1
date +%s.%N >> resized
sleep 4
"""
RAISES = "srun -K sh -c '[ $SLURM_PROCID = 0 ] && sleep 1 && exit 1; exec sleep 600'"
"""srun kills the other rank, and returns 128 + 15."""
SHELL = {"SLURM_BITSTR_LEN": "8", "SLURM_TIME_FORMAT": "relative", "SACCT_FORMAT": "jobid",
         "TZ": "Asia/Kolkata", "COLUMNS": "20", "PYTHONIOENCODING": "ascii"}  # fmt: skip
"""What somebody may have set."""


class Jobs:
    """All of them, ended, and what was told of them while an array still waited."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.ids = lab, dict[str, str]()
        self._submit("waits", f"--array={','.join(map(str, TASKS))}", "--hold", script="true")
        self._submit("says so", script="exit 3")
        self._submit("follows", "--kill-on-invalid-dep=yes",
                     f"--dependency=afterok:{self.ids['says so']}", script="true")  # fmt: skip
        self._submit("no output", "--output=/nowhere/at.all", script="true")
        self._submit("killed", script="exec sleep 600")
        self._submit("ended", script="exec sleep 600")
        self._submit("step killed", script="srun sh -c 'kill -KILL $$'")
        self._submit("step ended", script="srun sh -c 'kill -TERM $$'")
        self._submit("raises", "--nodes=2", script=RAISES)
        self._submit("raises on one", "--ntasks=2", script=RAISES)
        self._submit("crashes", script="srun sh -c 'kill -SEGV $$'; true")
        self.place = new_folder(lab)
        self._submit("shrinks", "--nodes=3", f"--chdir={self.place}", script=SHRINKS)
        for name, signal in (("killed", "KILL"), ("ended", "TERM")):
            self._signal(name, signal)
        for name, (state, _, _) in ENDS.items():
            assert lab.wait_for_end(self.ids[name], PATIENCE_S) == state, name
            # A resize begins a row.
            rows = ["RESIZING", state] if name == "shrinks" else [state]
            lab.wait_for_runs(self.ids[name], rows, timeout_s=PATIENCE_S)
        self.folder = new_folder(lab)
        self.plain = wait_until(
            self._whole, timeout_s=PATIENCE_S, seen=lambda: "accounting lacks rows"
        )
        self.odd = self._ask(SHELL)
        lab.cancel_all()

    def _ask(self, env: Mapping[str, str]) -> str:
        return ask(self.lab, self.folder, "--json", *self.ids.values(), env=env).stdout

    def _whole(self) -> Optional[str]:
        """A row whose end came to slurmdbd before its begin has another name until then (22.05)."""
        told = self._ask({})
        return told if {job["name"] for job in json.loads(told)["jobs"]} == {*self.ids} else None

    def _submit(self, name: str, *more: str, script: str) -> None:
        given = [f"--job-name={name}", "--nodes=1", "--partition=low", "--output=/dev/null", *more]
        self.ids[name] = self.lab.sbatch_as(self.lab.user, *given, script=script)

    def _signal(self, name: str, signal: str) -> None:
        """Once its script runs, which is some time after Slurm has called it RUNNING."""
        argv = ["scancel", "--batch", f"--signal={signal}", self.ids[name]]
        self.lab.wait_for_state(self.ids[name], ["RUNNING"], PATIENCE_S)

        def is_hit() -> Any:
            self.lab.run_as(self.lab.user, argv, check=False)
            return self.lab.job_state(self.ids[name]) != "RUNNING" or None

        wait_until(is_hit, timeout_s=PATIENCE_S, seen=lambda: f"{name} lives on", interval_s=1)


@pytest.fixture(scope="module")
def jobs(lab: Lab) -> Jobs:
    return Jobs(lab)


def test_what_each_ended_of_is_told_and_a_kill_from_outside_blames_nobody(jobs: Jobs) -> None:
    record = json.loads(jobs.plain)
    told = {job["name"]: job for job in record["jobs"]}
    for name, (state, cause, sentence) in ENDS.items():
        (one,) = told[name]["attempts"]
        same(f"{name}: state, cause", (one["state"], one["cause"]), (state, cause))
        assert sentence in one["sentence"], one["sentence"]
    same("tasks that wait", told["waits"]["tasks"], len(TASKS))
    same("jobs", record["fleet"]["jobs"], len(ENDS) + len(TASKS))
    failed = sum(cause in ("code", "unknown") for _, cause, _ in ENDS.values())
    same("failures", record["fleet"]["total"]["failures"], failed)


def test_a_job_that_gave_nodes_back_has_used_what_it_had(jobs: Jobs) -> None:
    (told,) = [job for job in json.loads(jobs.plain)["jobs"] if job["name"] == "shrinks"]
    (one,) = told["attempts"]
    asked_at, done_at = map(float, (jobs.place / "resized").read_text().split())
    least_s, most_s = (3 * (at - one["start_at"]) + (one["end_at"] - at)
                       for at in (asked_at - 1.01, done_at + 1.01))  # fmt: skip
    between("shrinks: node-seconds", 3600.0 * one["node_hours"], least_s, most_s)
    same("shrinks: seconds", one["elapsed_s"], one["end_at"] - one["start_at"], within=1.01)


def test_the_shell_in_which_it_is_asked_for_changes_no_figure(jobs: Jobs) -> None:
    assert jobs.plain == jobs.odd


def test_a_window_that_ends_before_it_begins_is_refused(jobs: Jobs) -> None:
    for words in (("--since", "1d", "--until", "2d"), ("--since", "2099-01-01")):
        done = ask(jobs.lab, jobs.folder, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--since has to be earlier" in done.stderr and len(done.stderr.splitlines()) == 1
