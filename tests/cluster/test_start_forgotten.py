"""slurmctld is killed before it has written down that it has started a run, on real Slurm.

It writes at most every 5 s what it knows of jobs; back again, it takes the run's job for one that
waits, refuses its steps (`Job is pending execution`), and has it killed once its nodes tell of it.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Optional

import pytest
from batch_runs import LabRun
from lab import Lab, cluster, wait_until

from ftslurm.run.attempts import read_decision
from ftslurm.run.jobs import read_jobs

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(240)]

SAVED_EVERY_S = 5


def start_and_forget(lab: Lab, run: LabRun, blocker: str) -> None:
    """`run` waits for `blocker`. What is known of jobs is written down now, and not again before
    slurmctld is killed; the run's batch script begins in between."""
    slurmctld = next(one["pid"] for one in lab.status()["daemons"] if one["name"] == "slurmctld")
    saved, out = lab.folder / "state" / "job_state", run.run.layout.submit / f"{run.job_id}.out"
    time.sleep(SAVED_EVERY_S + 1)
    before = saved.stat().st_mtime
    lab.run_as_root("scontrol", "update", f"jobid={run.job_id}", "comment=waits")
    wait_until(
        lambda: saved.stat().st_mtime > before or None,
        timeout_s=10,
        seen=run.says,
        interval_s=0.02,
    )
    written_at = saved.stat().st_mtime
    lab.run_as_root("scancel", blocker)
    wait_until(lambda: out.exists() or None, timeout_s=20, seen=run.says, interval_s=0.02)
    os.kill(slurmctld, signal.SIGKILL)
    print(f"begun and forgotten {time.time() - written_at:.1f} s after what is known was written")
    assert saved.stat().st_mtime == written_at, "the start was written down: begin it sooner"
    started = cluster("start", "slurmctld", folder=lab.folder)
    assert started.returncode == 0, started.stderr


@pytest.mark.parametrize("nodes", ["free", "taken"])
def test_the_run_goes_on_as_another_job_at_once(lab: Lab, nodes: str) -> None:
    """Where its nodes are free, Slurm starts the job once more before the run knows of it, drains
    its own node for that (`Duplicate jobid`) and holds the job."""
    usage = lab.folder / "state" / "assoc_usage"
    if lab.version >= (26, 5) and not usage.exists():
        pytest.skip("slurmctld 26.05 does not start again before it has written assoc_usage once")
    everything = ["--partition=low", f"--nodes={len(lab.nodes)}", "--exclusive", "--time=10"]
    blocker = lab.sbatch_as(lab.user, *everything, script="exec sleep 500\n")
    lab.wait_for_state(blocker, ["RUNNING"], 30)
    run = LabRun(lab, "forgotten", "steps=40", step_s=0.1)
    assert lab.job_state(run.job_id) == "PENDING", run.says()
    start_and_forget(lab, run, blocker)
    if nodes == "free":  # that the blocker has ended is forgotten, too
        lab.run_as_root("scancel", blocker)
    back_at, first = time.time(), run.run.layout.attempt(1)

    def decided() -> Optional[dict[str, Any]]:
        told = dict(read_decision(first))
        return told if "is next" in told.get("reason", "") else None

    told = wait_until(decided, timeout_s=60, seen=run.says)
    took_s = told["decided_at"] - back_at
    print(f"decided {took_s:.1f} s after slurmctld was back: {told['reason']}")
    assert (told["action"], told["cause"]) == ("requeued", "start_forgotten"), run.says()
    newest = read_jobs(run.run.layout)[-1]
    assert newest.after == run.job_id and f"job {newest.job_id} is next" in told["reason"]
    lab.run_as_root("scancel", blocker)
    assert lab.wait_for_end(newest.job_id, 90) == "COMPLETED", run.says()
    assert run.run.decisions()[-1] == "done", run.says()
    assert lab.job_state(run.job_id) == "CANCELLED"
