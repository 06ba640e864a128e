"""Ranks without torch that get stuck: the culprit is named and all show what they were doing."""

import signal
import time
from pathlib import Path
from typing import Any

import launch
import pytest

from ftslurm.agent.stacks import take_stacks
from ftslurm.diagnosis.hang import HangFinding, HangLimits, HangMemory, hung
from ftslurm.run.heartbeat import read_views
from ftslurm.run.spec import CheckpointSpec, ClusterSpec, RunSpec

LIMITS = HangLimits(factor=3, floor_s=8)
"""More than this machine itself may stand still."""


def stuck_at_step_12(tmp_path: Path, **user: Any) -> "tuple[HangFinding, dict[int, str]]":
    """What is found of three ranks, the second of which does as `user` says, and their stacks."""
    spec = RunSpec(
        entry="rank:tests.fakes.rank:main",
        steps=200,
        cluster=ClusterSpec(tasks_per_node=3),
        checkpoint=CheckpointSpec(interval_steps=5, interval_s=0),
        user={"step_s": 0.05, **user},
    )
    layout = launch.prepare(tmp_path / "run", spec)
    environ = {"FTSLURM_BEATS": str(tmp_path / "beats")}
    launched = launch.Launch(layout, world_size=3, environ=environ, module="tests.fakes.rank")
    folder = tmp_path / "beats" / "attempt-0001"
    memory, finding, late_s = HangMemory(), None, 0.0
    deadline = time.monotonic() + 150
    while finding is None and time.monotonic() < deadline:
        time.sleep(0.1)
        views = read_views(folder, "localhost")
        if len(views) == 3:
            before, at = memory.looked_at, time.monotonic()
            late_s = 0.0 if before is None else at - before
            finding = hung(views, memory, LIMITS, at=at)
    assert finding is not None, views
    texts = take_stacks(views, folder)
    for rank in range(3):
        launched.signal(rank, signal.SIGKILL)
    launched.wait()
    print(f"silent for {finding.silent_s:.2f} s at a look {late_s:.2f} s after the one before")
    assert 7 < finding.silent_s <= 3 * memory.usual_step_s + LIMITS.floor_s + late_s
    return finding, texts


@pytest.mark.parametrize("action", ["stop", "hold", "hang"])
def test_a_rank_stuck_outside_of_a_collective_is_named(tmp_path: Path, action: str) -> None:
    finding, texts = stuck_at_step_12(tmp_path, faults=f"{action}@step:rank=1:step=12")
    assert finding.culprits == (1,), finding.why
    assert all("in exchange" in texts[rank] for rank in (0, 2)), texts
    told = {"stop": "State: T (stopped)", "hold": "in _break", "hang": "in _hang"}[action]
    assert told in texts[1], texts[1]
    assert "step 12" in texts[0], "the exchange that it waits in"


def test_a_rank_that_leaves_out_an_exchange_is_named(tmp_path: Path) -> None:
    finding, texts = stuck_at_step_12(tmp_path, skip={"rank": 1, "step": 12, "attempt": 1})
    assert finding.culprits == (1,), finding.why
    assert "waits in step 13 while most others wait in step 12" in finding.why
    assert all("in exchange" in text for text in texts.values())
