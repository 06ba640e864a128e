"""The fence on real Slurm: a node that has lost Slurm and not its storage, and one whose clock is
wrong. The old rank is a real one, held by SIGSTOP in the moment before its rename."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Optional

import pytest
from batch_runs import LabRun
from fakes import leftover
from fakes.project import slow_while
from lab import Lab, wait_until

from ftslurm.files import read_json
from ftslurm.run.account import read_account
from ftslurm.run.attempts import read_events
from ftslurm.run.jobs import read_jobs

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(600)]

LEFTOVER = Path(leftover.__file__).read_text()
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
CLOCK = "/dev/shm/ftslurm-test-clock"
"""Each node has a /dev/shm of its own."""
AHEAD_S = 90.0
SITE = f"""
import os, select, sys, time
# Python alone gets the wrong clock: Slurm's commands, which it starts, keep theirs.
if os.environ.pop("CLOCK_IS_WRONG", None) is None:
    wrong = dict(LD_PRELOAD="{FAKETIME}", FAKETIME_TIMESTAMP_FILE="{CLOCK}", CLOCK_IS_WRONG="yes",
                 FAKETIME_DONT_FAKE_MONOTONIC="1", FAKETIME_DONT_RESET="1")
    os.execve(sys.executable, sys.orig_argv, dict(os.environ, **wrong))
os.environ.pop("LD_PRELOAD", None)
# libfaketime 0.9.10 that leaves CLOCK_MONOTONIC alone answers clock_nanosleep(2) with EINVAL.
time.sleep = lambda seconds: select.select([], [], [], max(0.0, seconds)) and None
"""


def stopped_rank(run: LabRun) -> Optional[int]:
    for pid in run.rank_pids():
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            return pid
    return None


def move_to_next_job(run: LabRun) -> None:
    """The surviving agents queue a new job at once; Slurm would keep the old one for long."""
    old = run.job_id

    def queued() -> Optional[str]:
        newest = read_jobs(run.run.layout)[-1].job_id
        return newest if newest != old else None

    run.job_id = wait_until(queued, timeout_s=150, seen=run.says)


def publisher(run: LabRun, step: int) -> int:
    manifest = run.run.layout.steps / f"step-{step:012d}" / "manifest.json"
    return int(read_json(manifest)["attempt"])


@pytest.mark.parametrize("agents", ["false", "true"])
def test_a_rank_on_a_node_that_lost_slurm_publishes_into_nothing(lab: Lab, agents: str) -> None:
    slow = lab.home(lab.user) / f"slow-{agents}"
    run = LabRun(
        lab,
        f"fence-{agents}",
        "entry=rank:tests.fakes.leftover:main",
        "+cluster.env.LEFTOVER_STOPS=rename-40",
        f"recovery.agents={agents}",
        "recovery.hang_factor=0",  # it is to be found stopped by nobody
        *slow_while(slow, since=22, seconds=2.0),
        step_s=0.1,
        files={"tests/fakes/leftover.py": LEFTOVER},
    )
    pid = wait_until(lambda: stopped_rank(run), timeout_s=150, seen=run.says)
    slow.touch()  # the next attempt does not come to the step before the old rank goes on
    undisturbed = LabRun(lab, "calm", f"recovery.agents={agents}")
    undisturbed.end_as("COMPLETED")
    node = lab.show_job(run.job_id)["BatchHost"]
    lab.cut(node)
    if agents == "true":
        move_to_next_job(run)
    else:
        lab.hasten(run.job_id, timeout_s=150)
    run.wait_for_training(2, timeout_s=150)
    assert Path(f"/proc/{pid}").exists(), "the old rank was not left to go on"
    os.kill(pid, signal.SIGCONT)
    wait_until(
        lambda: publisher_or_none(run, 40) == 1 or None, timeout_s=30, seen=run.says,
        interval_s=0.02,
    )  # fmt: skip
    slow.unlink()
    run.end_as("COMPLETED")
    lab.join(node)
    # What Slurm still ends there would keep the node for a minute.
    lab.run_as_root("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")

    assert run.run.losses == undisturbed.run.losses, run.says()
    assert run.run.digest == undisturbed.run.digest
    assert [publisher(run, step) for step in (40, 60)] == [2, 2]
    (home,) = run.run.layout.quarantine.iterdir()
    reason = read_json(home / "reason.json")["reason"]
    assert "published by attempt 1 after attempt 2 was claimed" in reason
    kinds = [event["kind"] for event in read_events(run.run.layout.attempt(2))]
    assert "rejected" in kinds
    told = run.status()
    assert told["put_aside"][0]["reason"] == reason
    assert told["attempts"][0]["late"]["kinds"] == ["error"], told["attempts"][0]
    text = run.ftslurm("status", str(run.run.layout.root))
    assert "a leftover of it still wrote" in text and "quarantined step-000000000040-001" in text


def publisher_or_none(run: LabRun, step: int) -> Optional[int]:
    try:
        return publisher(run, step)
    except FileNotFoundError:
        return None


@pytest.mark.skipif(not FAKETIME.exists(), reason="Debian's libfaketime is not installed")
def test_one_nodes_clock_90_s_ahead_changes_neither_the_order_nor_the_times(lab: Lab) -> None:
    for node in lab.nodes:
        ahead = AHEAD_S if node == "n2" else 0
        lab.run_inside(node, "sh", "-c", f"echo +{ahead:g}s >{CLOCK}; chmod 644 {CLOCK}")
    folder = lab.home(lab.user) / "clock-of-a-node"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(SITE)
    run = LabRun(
        lab,
        "clock",
        f'cluster.setup=["export PYTHONPATH={folder}"]',
        "code=live",  # of a frozen run, agents read no sitecustomize (python -S)
        faults="eio@step:rank=3:step=45:attempt=1",
        step_s=0.1,
    )
    # Not its job's end: on a machine that is too busy an agent may be missed, and the run move on.
    done = run.run.layout.done
    wait_until(lambda: done.exists() or None, timeout_s=300, seen=run.says)
    told = run.status()
    first = told["attempts"][0]
    assert first["nodes"] == ["n1", "n2"], "n2 had to be one of its nodes"
    failure, line = first["first_failure"], first["timeline"]
    assert (failure["rank"], failure["node"]) == (3, "n2"), run.says()
    agents = read_json(run.run.layout.attempt(1).root / "agents.json")
    offsets = {node: agents["nodes"][node]["offset_s"] for node in ("n1", "n2")}
    print(f"offsets {offsets}, times {line}")
    # As exact as a question to the agent is quick; a clock that was believed is AHEAD_S off.
    assert offsets == pytest.approx({"n1": 0.0, "n2": AHEAD_S}, abs=10.0)
    assert line["failed_by"] == "error record of rank 3" and 0 < line["rto_s"] < 300, line
    assert abs(line["mttd_s"]) < AHEAD_S / 2, line
    print(run.ftslurm("status", str(run.run.layout.root)))
    whole = run.ftslurm("status", str(run.run.layout.root), "--attempt", "1")
    print(whole)
    kinds = [event["kind"] for event in read_account(run.run.layout, 1).events]
    assert kinds.index("error") < kinds.index("ranks_ended"), whole
