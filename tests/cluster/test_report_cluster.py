"""`ftslurm report` on real Slurm after faults of known size: every number against what was done.

What it says is held against slurmctld's own word on each job, the ranks' traces and the clock of
the one who broke things, never against another part of the report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

import pytest
from batch_runs import daemon_away
from lab import Lab, wait_until
from report_faults import (
    CRASH,
    FOREIGN_S,
    GPUS,
    INTERVAL,
    LOST_AFTER_S,
    STALL_S,
    STEP_S,
    Faults,
    ToldRun,
)

from ftslurm.files import read_json

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300), pytest.mark.full]

NODES = {"calm": 1, "preempted": 1, "crash": 2, "killed": 1, "cancelled": 1}
SECOND = 1.01
"""Slurm's times are whole seconds."""


class Told:
    """A report, and its jobs by the names of those who made them."""

    def __init__(self, faults: Faults, record: dict[str, Any]) -> None:
        self.record = record
        self.fleet: dict[str, Any] = record["fleet"]
        names = {one.job_id: name for name, one in faults.foreign.items()}
        self.jobs: dict[str, dict[str, Any]] = {}
        for job in record["jobs"]:
            run_dir = job["run_dir"]
            name = Path(run_dir).name.partition("-")[0] if run_dir else names[job["job_id"]]
            assert name not in self.jobs, f"{name} is in it twice"
            self.jobs[name] = job

    def attempts(self, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.jobs[name]["attempts"]
        return found

    def ours(self) -> dict[str, list[dict[str, Any]]]:
        return {name: self.attempts(name) for name in NODES}


@pytest.fixture(scope="module")
def faults(lab: Lab) -> Faults:
    return Faults(lab)


@pytest.fixture(scope="module")
def told(faults: Faults) -> Told:
    """When accounting has all rows: they come some seconds late."""

    def whole() -> Optional[Told]:
        words = ["--since", faults.since, "--runs-below", str(faults.runs)]
        found = Told(faults, faults.report(*words))
        ended = [job["attempts"][-1]["end_at"] for job in found.jobs.values()]
        return found if len(found.jobs) == len(NODES) + 2 and all(ended) else None

    return wait_until(whole, timeout_s=30, seen=lambda: "accounting lacks rows", interval_s=2)


@pytest.fixture(scope="module")
def degraded(faults: Faults, told: Told) -> Told:
    with daemon_away(faults.lab, "slurmdbd", verb="stop"):
        words = ["--since", faults.since, "--runs-below", str(faults.runs)]
        return Told(faults, faults.report(*words))


def test_every_attempt_ended_of_what_was_done_to_it(faults: Faults, told: Told) -> None:
    assert told.record["source"] == {"accounting": "sacct", "notes": []}
    causes = {
        name: [(one["cause"], one["node"], one["rank"]) for one in job["attempts"]]
        for name, job in told.jobs.items()
    }
    fine = (None, None, None)
    assert causes == {
        "calm": [fine],
        "preempted": [("preempted", None, None), fine],
        "crash": [("unknown", None, CRASH[1]), fine],  # who killed it nobody can know
        "killed": [("node", faults.killed_node, None), fine],
        "cancelled": [("cancelled_user", None, None)],
        "fails": [("code", None, None)],
        "done": [fine],
    }
    states = {name: job["state"] for name, job in told.jobs.items()}
    assert states == dict.fromkeys(causes, "completed") | {
        "cancelled": "cancelled", "fails": "failed",
    }  # fmt: skip
    assert "Killed" in str(told.attempts("crash")[0]["evidence"])


def test_lost_steps_are_those_that_no_checkpoint_held(faults: Faults, told: Told) -> None:
    killed = faults.run["killed"]
    lost = {"crash": CRASH[0] - INTERVAL, "killed": max(killed.trained(1)) - killed.restored(2)}
    assert lost["killed"] >= 1
    for name, attempts in told.ours().items():
        run = faults.run[name]
        batch = read_json(run.run.layout.run_json)["spec"]["optim"]["global_batch_size"]
        steps = lost.get(name, 0)
        first, *others = attempts
        assert (first["steps_lost"], first["tokens_lost"]) == (steps, steps * batch), name
        trace_s = run.trace_s(1)
        assert first["lost_s"] == pytest.approx(sum(trace_s[len(trace_s) - steps :]), abs=0.01)
        assert first["lost_s"] >= steps * STEP_S
        assert [(one["steps_lost"], one["lost_s"]) for one in others] == [(0, 0.0)] * len(others)
        job = told.jobs[name]
        assert job["last_step"] == max(run.trained(len(attempts))), name
        assert job["committed_step"] == job["last_step"], name
        gpu_s = first["lost_s"] * GPUS * NODES[name]
        assert job["lost_gpu_hours"] == pytest.approx(gpu_s / 3600)
    assert told.jobs["fails"]["lost_gpu_hours"] is None  # nobody has seen what it did


def test_times_in_the_queue_and_on_nodes_are_slurmctlds(faults: Faults, told: Told) -> None:
    for name, attempts in told.ours().items():
        run = faults.run[name]
        assert attempts[0]["start_at"] == pytest.approx(run.started_at[0], abs=SECOND), name
        waited = [begin - since for begin, since in zip(run.started_at, run.eligible_at)]
        assert attempts[0]["wait_s"] == pytest.approx(waited[0], abs=SECOND), name
        assert attempts[-1]["end_at"] == pytest.approx(run.ended_at, abs=SECOND), name
        assert {one["num_nodes"] for one in attempts} == {NODES[name]}, name
        assert {one["gpus"] for one in attempts} == {GPUS * NODES[name]}, name
    second = faults.run["preempted"].started_at[1]
    assert told.attempts("preempted")[1]["start_at"] == pytest.approx(second, abs=SECOND)
    # One job of Slurm's, two attempts: they share its time, and only the first has waited.
    first, second = told.attempts("crash")
    run = faults.run["crash"]
    assert first["elapsed_s"] + second["elapsed_s"] == pytest.approx(
        run.ended_at - run.started_at[0], abs=SECOND
    )
    assert second["wait_s"] is None
    assert first["wait_s"] >= 1  # there was no room for it
    over_at = told.attempts("killed")[0]["end_at"]
    assert faults.killed_at + LOST_AFTER_S - 5 < over_at < faults.given_up_at + 2
    (foreign,) = told.attempts("fails")
    assert foreign["elapsed_s"] == pytest.approx(FOREIGN_S, abs=SECOND)


def test_hours_are_seconds_times_nodes_and_gpus(told: Told) -> None:
    for name, job in told.jobs.items():
        nodes = NODES.get(name, 1)
        elapsed_s = sum(one["elapsed_s"] for one in job["attempts"])
        assert job["node_hours"] == pytest.approx(elapsed_s * nodes / 3600), name
        assert job["gpu_hours"] == pytest.approx(elapsed_s * nodes * GPUS / 3600), name
    total = told.fleet["total"]
    for what in ("node_hours", "gpu_hours", "wait_s"):
        assert total[what] == pytest.approx(sum(job[what] for job in told.jobs.values()))
    assert total["unknown_gpu_hours"] == pytest.approx(told.jobs["fails"]["gpu_hours"])


def test_the_fleet_counts_each_fault_once(faults: Faults, told: Told) -> None:
    fleet, total = told.fleet, told.fleet["total"]
    assert (total["jobs"], total["attempts"], total["failures"]) == (7, 10, 3)
    assert fleet["states"] == {"completed": 5, "cancelled": 1, "failed": 1}
    counted = {cause: (one["attempts"], one["failures"]) for cause, one in _by(told, "cause")}
    assert counted == {
        "code": (1, 1), "unknown": (1, 1), "node": (1, 1), "preempted": (1, 0),
        "cancelled_user": (1, 0),
    }  # fmt: skip
    assert [node for node, _ in _by(told, "node")] == [faults.killed_node]
    assert (fleet["node_faults"], fleet["hardware_failures"]) == (1, 1)
    assert fleet["node_mtbf_h"] == pytest.approx(total["node_hours"])
    assert fleet["gpu_mtbf_h"] == pytest.approx(total["gpu_hours"])
    # Of the crash, the killed node and the foreign job, the last was not done in the end.
    assert fleet["recovered_share"] == pytest.approx(2 / 3)
    assert fleet["hit_again_share"] == 0.0
    assert fleet["lemons"] == []  # of one fault on four nodes nothing follows


def test_goodput_and_waste_add_up_to_what_was_allocated(faults: Faults, told: Told) -> None:
    good, ours = told.fleet["goodput"], told.ours()
    parts = {name: good[f"{name}_s"] for name in ("trained", "lost", "stall", "restart", "other")}
    print(parts)
    allocated_s = 3600 * sum(told.jobs[name]["node_hours"] for name in ours)
    assert sum(parts.values()) == pytest.approx(allocated_s, abs=0.5)
    assert good["share"] == pytest.approx(parts["trained"] / sum(parts.values()))
    kept = sum(NODES[name] * told.jobs[name]["last_step"] for name in ours)
    assert kept * STEP_S <= parts["trained"] <= 2.5 * kept * STEP_S
    lost_s = sum(NODES[name] * one["lost_s"] for name in ours for one in ours[name])
    assert parts["lost"] == pytest.approx(lost_s)
    behind_s = sum(NODES[name] * _behind_saves_s(faults.run[name]) for name in ours)
    assert STALL_S - 0.2 <= parts["stall"] <= behind_s
    waited_s = sum(NODES[name] * (one["wait_s"] or 0) for name in ours for one in ours[name])
    assert good["queue_s"] == pytest.approx(waited_s)
    # From the node's death until Slurm gave it up nobody trained and nobody started.
    idle_s = told.attempts("killed")[0]["end_at"] - faults.killed_at
    assert parts["other"] >= idle_s - 2
    assert told.fleet["runs_untold"] == 0


def test_a_run_by_name_is_told_with_the_same_numbers(faults: Faults, told: Told) -> None:
    words = [*(run.root for run in faults.run.values()), faults.foreign["fails"].job_id]
    named = Told(faults, faults.report(*words))
    assert named.jobs == {name: job for name, job in told.jobs.items() if name != "done"}


def test_without_slurmdbd_it_says_so_and_tells_nothing_that_is_wrong(
    faults: Faults, told: Told, degraded: Told
) -> None:
    source = degraded.record["source"]
    assert source["accounting"] == "scontrol"
    assert "only jobs of the last minutes are known" in source["notes"][0]
    assert degraded.jobs.keys() == told.jobs.keys()
    for name, attempts in degraded.ours().items():
        known = told.attempts(name)
        assert len(attempts) == len(known), name
        for less, more in zip(attempts, known):
            same = ("rank", "steps_lost", "lost_s", "tokens_lost", "committed_step", "num_nodes")
            assert {key: less[key] for key in same} == {key: more[key] for key in same}
            # Of a node that died with the batch script nobody but Slurm knew.
            assert less["cause"] == ("unknown" if more["cause"] == "node" else more["cause"]), name
            assert less["node"] is None and less["gpus"] == more["gpus"]
            assert less["elapsed_s"] <= more["elapsed_s"] + 2, (name, less, more)
            assert less["start_at"] == pytest.approx(more["start_at"], abs=10)
    assert degraded.jobs["fails"]["attempts"] == told.jobs["fails"]["attempts"]
    assert (degraded.fleet["node_faults"], degraded.fleet["node_mtbf_h"]) == (0, None)
    assert degraded.fleet["total"]["failures"] == told.fleet["total"]["failures"]


def _behind_saves_s(run: ToldRun) -> float:
    """What the steps took in which a save fell, whole."""
    found = 0.0
    for attempt in (1, 2):
        saved = run.committed(attempt)
        took = dict(zip(run.trained(attempt), run.trace_s(attempt))) if saved else {}
        found += sum(took_s for step, took_s in took.items() if step - 1 in saved)
    return found


def _by(told: Told, what: str) -> list[tuple[str, dict[str, Any]]]:
    return sorted(told.fleet["by"][what].items())
