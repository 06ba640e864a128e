"""slurmctld is killed before it has written down that it has started a run, on real Slurm.

It writes at most every 5 s what it knows of jobs; back again, it takes the run's job for one that
waits, refuses its steps (`Job is pending execution`), and has it killed once its nodes tell of it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Optional

import pytest
from batch_runs import LabRun, daemon_away, saved_state
from lab import Lab, wait_until

from ftslurm.run.attempts import read_decision
from ftslurm.run.jobs import read_jobs

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(600)]


def start_and_forget(lab: Lab, run: LabRun, blocker: str, held: Path) -> None:
    """`run` waits for `blocker`. What slurmctld has written down of jobs by then is what it finds
    when it is back; the run's batch script begins in between, and waits for it in its setup."""
    path, out = lab.folder / "state" / "job_state", run.run.layout.submit / f"{run.job_id}.out"
    state = saved_state(lab, run.job_id)
    lab.run_as_root("scancel", blocker)
    wait_until(lambda: out.exists() or None, timeout_s=60, seen=run.says)
    with daemon_away(lab, "slurmctld"):
        path.write_bytes(state)
        held.unlink()


@pytest.mark.parametrize("nodes", ["free", "taken"])
def test_the_run_goes_on_as_another_job_at_once(lab: Lab, nodes: str) -> None:
    """Where its nodes are free, Slurm starts the job once more before the run knows of it, drains
    its own node for that (`Duplicate jobid`) and holds the job."""
    usage = lab.folder / "state" / "assoc_usage"
    if lab.version >= (26, 5) and not usage.exists():
        pytest.skip("slurmctld 26.05 does not start again before it has written assoc_usage once")
    everything = ["--partition=low", f"--nodes={len(lab.nodes)}", "--exclusive", "--time=10"]
    blocker = lab.sbatch_as(lab.user, *everything, script="exec sleep 500\n")
    lab.wait_for_state(blocker, ["RUNNING"], 60)
    held = lab.home(lab.user) / f"held-{nodes}"
    held.touch()
    waits = f'cluster.setup=["while [ -e {held} ]; do sleep 0.1; done"]'
    run = LabRun(lab, "forgotten", "steps=40", waits, step_s=0.1)
    assert lab.job_state(run.job_id) == "PENDING", run.says()
    start_and_forget(lab, run, blocker, held)
    if nodes == "free":  # that the blocker has ended is forgotten, too
        lab.run_as_root("scancel", blocker)
    back_at, first = time.time(), run.run.layout.attempt(1)

    def decided() -> Optional[dict[str, Any]]:
        told = dict(read_decision(first))
        return told if "is next" in told.get("reason", "") else None

    told = wait_until(decided, timeout_s=150, seen=run.says)
    took_s = told["decided_at"] - back_at
    print(f"decided {took_s:.1f} s after slurmctld was back: {told['reason']}")
    assert (told["action"], told["cause"]) == ("requeued", "start_forgotten"), run.says()
    newest = read_jobs(run.run.layout)[-1]
    assert newest.after == run.job_id and f"job {newest.job_id} is next" in told["reason"]
    lab.run_as_root("scancel", blocker)
    assert lab.wait_for_end(newest.job_id, 240) == "COMPLETED", run.says()
    assert run.run.decisions()[-1] == "done", run.says()
    assert lab.job_state(run.job_id) == "CANCELLED"
