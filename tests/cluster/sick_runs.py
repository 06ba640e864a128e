"""Torch-free runs that cannot train on some nodes: their ranks fail there as on a broken GPU."""

from __future__ import annotations

import time
from typing import Optional

from batch_runs import LabRun
from lab import Lab, wait_until

from ftslurm.run.attempts import Attempt, claimed_numbers, read_attempt
from ftslurm.run.node_memory import RETURNED, read_node_events

SICK = """
import os

from tests.fakes import rank

train, choose = rank.FakeTraining.train_one_step, rank.FakeTraining.choose


def train_one_step(self):
    if os.environ["SLURMD_NODENAME"] in self.spec.user["sick"].split("+") and self.step >= 5:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    return train(self)


def choose_for_any_number_of_ranks(self):
    chosen = choose(self)
    if chosen:
        parts = chosen["indexes"]
        chosen["indexes"] = [parts[i % len(parts)] for i in range(self.env.world_size)]
    return chosen


rank.FakeTraining.train_one_step = train_one_step
rank.FakeTraining.choose = choose_for_any_number_of_ranks
main = rank.main
"""


class PlacedRun(LabRun):
    """A run that is asked where it has been."""

    @property
    def attempts(self) -> list[Attempt]:
        layout = self.run.layout
        return [read_attempt(layout, number) for number in claimed_numbers(layout)]

    def kinds(self) -> list[tuple[str, str]]:
        return [(event.kind, event.node) for event in read_node_events(self.run.layout)]

    def excluded_by_slurm(self) -> str:
        return self.lab.show_job(self.job_id).get("ExcNodeList", "")

    def wait_for_requeue(self, times: int = 1, *, timeout_s: float = 120) -> None:
        """Until the job has been queued again so often, and waits."""

        def waits() -> Optional[bool]:
            job = self.lab.show_job(self.job_id)
            is_again = int(job.get("Restarts", 0)) >= times
            return (job.get("JobState") == "PENDING" and is_again) or None

        wait_until(waits, timeout_s=timeout_s, seen=self.says)

    def queue_again_at_once(self) -> float:
        """Its owner queues the job again and moves its start to a few seconds ahead, which Slurm
        accepts while its nodes are still busy with their epilogs; to when (UTC)."""
        self.lab.run_as(self.lab.user, ["scontrol", "requeue", self.job_id])
        self.lab.wait_for_state(self.job_id, ["COMPLETING"], 60)
        start = ["scontrol", "update", f"JobId={self.job_id}", "StartTime=now+4"]
        self.lab.run_as(self.lab.user, start)
        return time.time() + 4


class SickRun(PlacedRun):
    """A run that cannot train on some nodes."""

    def __init__(self, lab: Lab, name: str, *more: str, sick: str, faults: str = "") -> None:
        given = ["entry=rank:tests.fakes.sick:main", f"+user.sick={sick}", "steps=40", *more]
        files = {"tests/fakes/sick.py": SICK}
        super().__init__(lab, name, *given, faults=faults, files=files, step_s=0.08)

    def wait_for_return(self, *, timeout_s: float = 120) -> None:
        """Until an allocation that Slurm gave has been given back."""
        hastened: list[str] = []

        def returned() -> Optional[bool]:
            # A job whose node died may start at once.
            waits = self.lab.show_job(self.job_id).get("Reason") == "BeginTime"
            if waits and not hastened:
                hastened.append(self.job_id)
                self.lab.hasten(self.job_id)
            return (RETURNED in [kind for kind, _ in self.kinds()]) or None

        wait_until(returned, timeout_s=timeout_s, seen=self.says)
