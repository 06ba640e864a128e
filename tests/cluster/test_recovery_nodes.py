"""A node is lost: its cable is pulled in the middle of a step, and Slurm would not tell for 300 s.

Seconds are counted from the cut, on this machine's clock, which all nodes share.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pytest
from batch_runs import LabRun
from lab import Lab, wait_until

from ftslurm.files import read_json
from ftslurm.run.attempts import read_attempt, read_events, read_progress

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SITES_TIMEOUT_S = 300
"""SlurmdTimeout as sites have it: what is told sooner is told by the agents."""
FAR_SOONER_S = SITES_TIMEOUT_S / 3
WITH_A_SPARE_S = 30
STILL_S = 30
"""A machine may stand still for seconds; what it took is printed."""


@pytest.fixture
def patient_lab(lab: Lab) -> Iterator[Lab]:
    lab.change_settings(slurmd_timeout_s=SITES_TIMEOUT_S)
    yield lab
    lab.reset()


class LossRun(LabRun):
    """A run of two ranks a node, and what became of it after a cut."""

    cut_at = 0.0
    first_step_at = 0.0
    """The first step of attempt 2 after the one it has restored."""

    def wait_for_steps(self) -> None:
        wait_until(lambda: (self.step(1) or 0) > 30 or None, timeout_s=120, seen=self.says)

    def cut(self, node: str) -> None:
        self.cut_at = time.time()
        self.lab.cut(node)

    def wait_for_new_step(self, *, timeout_s: float) -> None:
        def trained() -> Optional[float]:
            progress = read_progress(self.run.layout.attempt(2))
            if progress is None or progress.phase != "training":
                return None
            is_new = progress.step > (progress.restored_step or 0)
            return progress.written_at if is_new else None

        self.first_step_at = wait_until(
            trained, timeout_s=timeout_s, seen=self.says, interval_s=0.02
        )

    def event_at(self, attempt: int, kind: str) -> float:
        events = read_events(self.run.layout.attempt(attempt))
        return next(float(event["at"]) for event in events if event["kind"] == kind)

    def agents(self) -> dict[str, Any]:
        return dict(read_json(self.run.layout.attempt(1).root / "agents.json"))

    def decision(self) -> dict[str, Any]:
        return dict(read_json(self.run.layout.attempt(1).decision_json))

    def agent_pids(self) -> set[tuple[int, int]]:
        """Pid and start of every agent of this run, as root sees them on all nodes at once; not of
        a child of theirs, which is like its parent until its exec."""
        found: dict[int, tuple[int, int]] = {}
        for entry in Path("/proc").iterdir():
            try:
                argv = (entry / "cmdline").read_bytes().split(b"\0")
                is_agent = b"ftslurm.agent" in argv and b"srun" not in argv
                if is_agent and str(self.run.layout.root).encode() in argv:
                    stat = (entry / "stat").read_text().rpartition(")")[2].split()
                    found[int(entry.name)] = (int(stat[1]), int(stat[19]))
            except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
                continue
        return {(pid, start) for pid, (parent, start) in found.items() if parent not in found}

    def parts(self) -> str:
        """Seconds from the cut to each thing that had to happen."""
        moments = {
            "decided": self.decision()["decided_at"],
            "next attempt claimed": read_attempt(self.run.layout, 2).claimed_at,
            "ranks run": self.event_at(2, "ranks_started"),
            "restored": self.event_at(2, "restored"),
            "first new step": self.first_step_at,
        }
        lost = [f["at"] for f in self.agents()["findings"] if f["kind"] == "node_lost"]
        if lost:
            gone = {"old ranks and srun gone": self.event_at(1, "ranks_ended")}
            moments = {"loss confirmed": lost[0], **gone, **moments}
        lines = [f"  {name:24} {at - self.cut_at:6.2f} s" for name, at in moments.items()]
        return "\n".join(lines)


@pytest.mark.parametrize(
    "gpus",
    [
        pytest.param(("cluster.gpus_per_node=2",), id="gres"),
        pytest.param((), id="no-gres", marks=pytest.mark.full),
    ],
)
def test_a_spare_takes_the_place_of_a_node_that_is_cut_off_long_before_slurm_tells(
    patient_lab: Lab, gpus: tuple[str, ...]
) -> None:
    placed = ["cluster.nodes=3", "cluster.spares=1", "steps=4000", *gpus]
    run = LossRun(patient_lab, "cut", *placed, step_s=0.05)
    run.wait_for_steps()
    before = run.agent_pids()
    assert len(before) == 4, run.says()
    run.cut("n2")
    run.wait_for_new_step(timeout_s=FAR_SOONER_S)
    print(f"n2 cut off, SlurmdTimeout={SITES_TIMEOUT_S}:\n{run.parts()}")
    # Of all: that of the cut node lives on in a world of its own.
    assert run.agent_pids() == before
    decision = run.decision()
    assert (decision["action"], decision["cause"]) == ("restart", "node"), run.says()
    assert decision["blamed"]["node"] == "n2", decision
    assert read_attempt(run.run.layout, 2).nodes == ["n1", "n3", "n4"]
    assert patient_lab.job_state(run.job_id) == "RUNNING"
    assert run.first_step_at - run.cut_at < WITH_A_SPARE_S + STILL_S


@pytest.mark.full
def test_the_agents_give_the_run_its_next_job_when_the_batch_node_is_cut_off(
    patient_lab: Lab,
) -> None:
    """Slurm would let the allocation idle to its limit; its own requeue waits for SlurmdTimeout."""
    run = LossRun(patient_lab, "batch", "cluster.nodes=3", "steps=4000", step_s=0.05)
    run.wait_for_steps()
    run.cut("n1")
    wait_until(
        lambda: patient_lab.job_state(run.job_id) != "RUNNING" or None,
        timeout_s=FAR_SOONER_S,
        seen=run.says,
    )
    ended_s = time.time() - run.cut_at
    run.wait_for_new_step(timeout_s=150)
    print(
        f"n1, the batch node, cut off, SlurmdTimeout={SITES_TIMEOUT_S}:\n"
        f"  old job ended            {ended_s:6.2f} s\n{run.parts()}"
    )
    decision = run.decision()
    assert (decision["action"], decision["cause"]) == ("requeued", "node"), run.says()
    assert decision["exclude"] == ["n1"]
    attempt = read_attempt(run.run.layout, 2)
    assert attempt.job_id != run.job_id and attempt.nodes == ["n2", "n3", "n4"]
    # One job goes on with the run, and none idles.
    assert patient_lab.run_as_root("squeue", "-h", "-t", "R,PD", "-o", "%i").split() == [
        attempt.job_id
    ]
    assert ended_s < FAR_SOONER_S


@pytest.mark.full
def test_without_a_spare_a_new_job_goes_on_and_does_not_wait_for_the_lost_node(
    patient_lab: Lab,
) -> None:
    run = LossRun(patient_lab, "short", "cluster.nodes=3", "steps=4000", step_s=0.05)
    run.wait_for_steps()
    run.cut("n2")
    run.wait_for_new_step(timeout_s=150)
    print(f"n2 cut off, no spare, SlurmdTimeout={SITES_TIMEOUT_S}:\n{run.parts()}")
    decision = run.decision()
    assert (decision["action"], decision["cause"]) == ("requeued", "node"), run.says()
    attempt = read_attempt(run.run.layout, 2)
    assert attempt.job_id != run.job_id and attempt.nodes == ["n1", "n3", "n4"]
    assert run.first_step_at - run.cut_at < SITES_TIMEOUT_S / 2


@pytest.mark.full
def test_when_the_leaders_agent_alone_dies_the_ranks_go_on_and_are_watched_again(lab: Lab) -> None:
    run = LossRun(lab, "leader", "cluster.nodes=3", "steps=4000", step_s=0.05)
    run.wait_for_steps()
    before = run.agent_pids()
    assert len(before) == 3, run.says()
    first = read_attempt(run.run.layout, 1).nodes[0]
    (leader,) = (pid for pid, _ in before if node_of(pid) == first)
    died_at = time.time()
    os.kill(leader, signal.SIGKILL)

    def are_all_new() -> Optional[bool]:
        now = run.agent_pids()
        return True if len(now) == 3 and not now & before else None

    wait_until(are_all_new, timeout_s=120, seen=run.says)
    print(f"agents on all nodes again {time.time() - died_at:.1f} s after the leader's was killed")
    assert run.run.decisions() == [] and lab.job_state(run.job_id) == "RUNNING"
    (stopped,) = (pid for pid in run.rank_pids() if rank_of(pid) == "3")
    os.kill(stopped, signal.SIGSTOP)
    run.wait_for_decisions(["restart"], timeout_s=90)
    decision = run.decision()
    assert (decision["cause"], decision["blamed"]["rank"]) == ("hang", 3), decision
    lab.run_as(lab.user, ["scancel", run.job_id])


def node_of(pid: int) -> str:
    return value_of(pid, "SLURMD_NODENAME")


def rank_of(pid: int) -> str:
    return value_of(pid, "SLURM_PROCID")


def value_of(pid: int, name: str) -> str:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))
