"""The operator's verbs on real Slurm, by the run's ordinary user; and by somebody who has no right
but to leave a file in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from batch_runs import STEPS, Group, LabRun, time_to_leave
from fakes.project import slow
from lab import Lab

from ftslurm.run.attempts import read_outcome

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


class Operated(LabRun):
    """A run on one node, so that four have room, the verbs for it, and what they answered."""

    def __init__(self, lab: Lab, name: str, *more: str, slow_attempts: int = 1) -> None:
        super().__init__(lab, name, "cluster.nodes=1", *slow(slow_attempts, seconds=2), *more)
        self.answers: list[dict[str, Any]] = []

    def order(self, verb: str, *options: str) -> str:
        told = self.ftslurm(verb, str(self.run.layout.root), "--json", *options)
        self.answers.append(json.loads(told))
        result: str = self.answers[-1]["result"]
        return result

    def resume(self) -> None:
        self.order("resume")
        self.job_id = self.answers[-1]["job_id"]


def undisturbed(lab: Lab) -> Operated:
    run = Operated(lab, "operate-undisturbed", slow_attempts=0)
    run.end_as("COMPLETED")
    return run


def stopped_and_resumed(lab: Lab) -> Operated:
    run = Operated(lab, "stopped")
    run.wait_for_training(1)
    run.order("save", "--wait")
    run.order("stop", "--wait")
    run.end_as("COMPLETED")
    run.resume()
    run.end_as("COMPLETED")
    return run


def paused_and_resumed(lab: Lab) -> Operated:
    run = Operated(lab, "paused")
    run.wait_for_training(1)
    run.order("pause", "--wait")
    held = lab.show_job(run.job_id)
    run.answers[-1]["priority"] = held["Priority"]
    run.order("resume")
    run.end_as("COMPLETED")
    return run


def resubmitting(lab: Lab) -> Operated:
    """Without requeue: paused, its successor is held; stopped, the successor is cancelled."""
    run = Operated(lab, "resubmitting", "recovery.continue_by=resubmit", slow_attempts=2)
    run.wait_for_training(1)
    run.order("pause", "--wait")
    run.resume()
    run.wait_for_training(2)
    run.order("stop", "--wait")
    # The job itself may have its nodes for a moment yet (COMPLETING).
    there = ["--noheader", "--states=PENDING,RUNNING,SUSPENDED", "--format=%i"]
    named = f"--name=ftslurm-{run.run.layout.root.name}"
    run.answers[-1]["queue"] = lab.run_as_root("squeue", named, *there)
    run.resume()
    run.end_as("COMPLETED")
    return run


def cancelled_in_the_queue(lab: Lab) -> Operated:
    run = Operated(lab, "queued", 'cluster.sbatch=["--begin=now+3600"]')
    run.order("stop")
    run.end_as("CANCELLED")
    run.order("stop")
    return run


def stopped_by_somebody_else(lab: Lab) -> Operated:
    """The folder is everybody's and sticky: the run may not take the file away."""
    folder = Path(
        lab.run_as_root("mktemp", "--directory", f"{lab.home(lab.user).parent}/XXXXXX").strip()
    )
    lab.run_as_root("chmod", "1777", str(folder))
    run = Operated(lab, "shared", f"recovery.control_dir={folder}")
    run.wait_for_training(1)
    order = folder / f"{run.run.layout.root.name}.stop"
    lab.run_as(lab.other_user, ["touch", str(order)])
    run.end_as("COMPLETED")
    assert order.exists()
    run.resume()
    run.end_as("COMPLETED")
    return run


@pytest.fixture(scope="module")
def runs(lab: Lab) -> Group[Operated]:
    scenarios = {
        "undisturbed": undisturbed,
        "stopped": stopped_and_resumed,
        "paused": paused_and_resumed,
        "shared": stopped_by_somebody_else,
        "queued": cancelled_in_the_queue,
        "resubmitting": resubmitting,
    }
    with time_to_leave(lab):
        return Group(lab, scenarios)


def assert_as_undisturbed(run: Operated, baseline: Operated) -> None:
    assert run.run.losses == baseline.run.losses, run.says()
    assert run.run.digest == baseline.run.digest
    assert run.run.steps_trained_twice == 0
    assert sorted(run.run.losses) == list(range(1, STEPS + 1))


def test_a_stopped_run_is_resumed_in_a_new_job_and_loses_no_step(
    lab: Lab, runs: Group[Operated]
) -> None:
    run = runs["stopped"]
    assert [answer["result"] for answer in run.answers] == ["saved", "stopped", "queued"]
    assert run.run.decisions() == ["ended", "done"], run.says()
    outcome = read_outcome(run.run.layout.attempt(1))
    assert outcome is not None
    assert (outcome.order, outcome.signal, outcome.committed_step) == ("stop", None, outcome.step)
    assert_as_undisturbed(run, runs["undisturbed"])
    first, second = [attempt["job_id"] for attempt in run.status()["attempts"]]
    assert first != second == run.job_id
    lab.wait_for_runs(first, ["COMPLETED"])


def test_a_paused_run_keeps_its_job_held_by_its_user(lab: Lab, runs: Group[Operated]) -> None:
    run = runs["paused"]
    paused, released = run.answers
    assert (paused["result"], paused["priority"], released["result"]) == ("paused", "0", "released")
    assert run.run.decisions() == ["paused", "done"], run.says()
    assert_as_undisturbed(run, runs["undisturbed"])
    lab.wait_for_runs(run.job_id, ["REQUEUED", "COMPLETED"])


def test_somebody_without_a_right_on_the_job_stops_it_by_a_file_and_only_once(
    runs: Group[Operated],
) -> None:
    run = runs["shared"]
    assert run.run.decisions() == ["ended", "done"], run.says()
    assert_as_undisturbed(run, runs["undisturbed"])


def test_a_run_that_resubmits_itself_pauses_by_its_successor_and_stops_with_it(
    runs: Group[Operated],
) -> None:
    run = runs["resubmitting"]
    results = [answer["result"] for answer in run.answers]
    assert results == ["paused", "released", "stopped", "queued"]
    assert run.answers[2]["queue"].strip() == "", "no successor is left"
    assert run.run.decisions() == ["paused", "ended", "done"], run.says()
    assert_as_undisturbed(run, runs["undisturbed"])
    assert len({attempt["job_id"] for attempt in run.status()["attempts"]}) == 3


def test_a_stop_of_a_queued_job_cancels_it_before_it_has_run(
    runs: Group[Operated],
) -> None:
    run = runs["queued"]
    assert [answer["result"] for answer in run.answers] == ["cancelled", "not_running"]
    assert run.status()["state"] == "cancelled" and run.status()["attempts"] == []
