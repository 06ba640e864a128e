"""Nodes are tried before the ranks of an attempt: with torch, over the nodes' own network.

One rank a node of a torch-free run, so that what takes time is the preflight itself.
"""

from __future__ import annotations

import json
import re
from typing import Any, Optional

import pytest
from batch_runs import LabRun
from lab import Lab, wait_until

from ftslurm.node.preflight import DEADLINE_S
from ftslurm.run.attempts import read_attempt

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SLOW_LINK = ("rate", "20mbit", "burst", "32kbit", "latency", "400ms")
"""A thousandth of what the others have. (`netem` is in few kernels.)"""


class TriedRun(LabRun):
    """A run on three nodes, with a spare, that tries them before each attempt."""

    def __init__(self, lab: Lab, name: str, *more: str) -> None:
        placed = ["cluster.nodes=3", "cluster.spares=1", "cluster.tasks_per_node=1"]
        super().__init__(lab, name, *placed, "health.preflight=always", *more)

    def found(self, attempt: int) -> dict[str, Any]:
        path = self.run.layout.attempt(attempt).preflight_json
        return dict(json.loads(path.read_text()))

    def log(self, attempt: int) -> str:
        path = self.run.layout.attempt(attempt).root / "preflight.log"
        return path.read_text() if path.exists() else ""

    def wait_until_tried(self, node: str) -> None:
        """Until the trial of attempt 1 runs on this node, and hears signals."""
        here = re.compile(rf'"kind": "here".*"node": "{node}"')
        wait_until(lambda: here.search(self.log(1)), timeout_s=240, seen=self.says)

    def stop_trial(self, node: str) -> list[str]:
        """On one node alone, as soon as it has been started there; its pids. The others wait two
        minutes for it."""
        look = "pgrep -f '^[^ ]*python.* -m ftslurm.train.preflight' || true"

        def found() -> Optional[list[str]]:
            return self.lab.run_inside(node, "sh", "-c", look).split() or None

        pids = wait_until(found, timeout_s=240, seen=self.says)
        self.lab.run_inside(node, "kill", "-STOP", *pids)
        return pids

    def continue_trial(self, node: str, pids: list[str]) -> None:
        """Unless it has been killed with the others."""
        self.lab.run_inside(node, "sh", "-c", f"kill -CONT {' '.join(pids)} || true")

    def told(self) -> list[str]:
        """What the batch script's own log has of it."""
        text = (self.run.layout.submit / f"{self.job_id}.out").read_text()
        return re.findall(r"^ftslurm: preflight: (.*)$", text, re.MULTILINE)

    def had_ranks(self, attempt: int) -> bool:
        return any(self.run.layout.attempt(attempt).logs.iterdir())


@pytest.fixture
def slow_n2(lab: Lab):
    change = ("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *SLOW_LINK)
    lab.run_inside("n2", *change)
    yield
    lab.run_inside("n2", "tc", "qdisc", "del", "dev", "eth0", "root")


def test_a_node_with_a_slow_network_is_named_and_the_run_goes_on_without_it(
    lab: Lab, slow_n2: None
) -> None:
    run = TriedRun(lab, "slow-link")
    run.end_as("COMPLETED", timeout_s=240)
    print("\n".join(run.told()))
    first, second = run.found(1), run.found(2)
    assert (first["word"], list(first["bad"])) == ("named", ["n2"]), run.says()
    assert "all-reduce" in first["bad"]["n2"]
    assert not second["bad"], second
    assert not run.had_ranks(1) and run.had_ranks(2)
    decision = json.loads(run.run.layout.attempt(1).decision_json.read_text())
    assert (decision["action"], decision["cause"]) == ("restart", "node"), decision
    assert decision["exclude"] == ["n2"] and "all-reduce" in decision["reason"], decision
    assert read_attempt(run.run.layout, 2).nodes == ["n1", "n3", "n4"]
    assert {"start", "gemm", "hbm", "pair"} <= set(first["seconds"])


@pytest.mark.full
@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_a_job_told_to_leave_while_nodes_are_tried_leaves_and_loses_nothing(
    lab: Lab, name: str
) -> None:
    """To the steps alone: the batch shell hears nothing, as at the start of grace. One node is
    stopped meanwhile, so that the trial is not over before."""
    run = TriedRun(lab, f"told-{name.lower()}", "cluster.nodes=2", "cluster.spares=0")
    stopped = run.stop_trial("n2")
    run.wait_until_tried("n1")
    lab.run_as(lab.user, ["scancel", f"--signal={name}", run.job_id])
    run.continue_trial("n2", stopped)
    wait_until(
        lambda: run.run.decisions()[:1] == ["requeued"] or None, timeout_s=120, seen=run.says
    )
    assert not run.had_ranks(1)
    lab.hasten(run.job_id)
    run.end_as("COMPLETED", timeout_s=240)
    assert not run.found(2)["bad"], run.found(2)


@pytest.mark.full
def test_a_node_that_freezes_while_it_is_tried_is_named_in_bounded_time(lab: Lab) -> None:
    run = TriedRun(lab, "frozen")
    stopped = run.stop_trial("n3")  # so long nothing begins
    run.wait_until_tried("n2")
    run.stop_trial("n2")
    run.continue_trial("n3", stopped)
    run.end_as("COMPLETED", timeout_s=390)
    print("\n".join(run.told()))
    assert list(run.found(1)["bad"]) == ["n2"], run.found(1)
    assert run.found(1)["wall_s"] < DEADLINE_S, "its own limits, not that of the whole"
    assert not run.found(2)["bad"], run.found(2)
