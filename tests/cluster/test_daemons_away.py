"""slurmctld or slurmdbd is away while a run needs it, on real Slurm, with ranks without torch.

Away means that no process is there and connections are refused. What a run would have become
without that is known beforehand: it trains integers.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from functools import partial
from typing import Any, Optional

import pytest
from batch_runs import STEPS, LabRun, daemon_away, saved_state
from fakes.project import slow
from fakes.rank import MASK, NUM_VALUES
from lab import Lab, wait_until
from sick_runs import SickRun

from ftslurm.files import read_json
from ftslurm.run.attempts import read_decision, read_events
from ftslurm.run.node_memory import RETURNED

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

NUM_RANKS = 4
DECIDES_WITHIN_S = 40
"""5 s for the agents' last word, 6 s for the clues, as long as slurmctld answers; and what a busy
machine adds. Who waits for slurmdbd waits for as long as it is away."""
LATE_KILL = "sleep@step:rank=0:since=20:attempt=1:seconds=3;kill@step:rank=3:step=27:attempt=1"
"""The daemon is away before the failure; no step is as long as a hang."""


def undisturbed(seed: int, steps: int) -> tuple[dict[int, str], str]:
    """Losses and digest of a run of the torch-free rank to which nothing has happened."""
    values = [
        [(rank * 1_000_003 + i * 7919 + seed) & MASK for i in range(NUM_VALUES)]
        for rank in range(NUM_RANKS)
    ]
    losses = {}
    for step in range(steps):
        mix = sum(map(sum, values)) & MASK
        values = [
            [(value * 6364136223846793005 + mix + step + i) & MASK for i, value in enumerate(own)]
            for own in values
        ]
        losses[step + 1] = (mix / 2**64).hex()
    digests = [hashlib.sha256(repr(own).encode()).hexdigest() for own in values]
    return losses, hashlib.sha256(repr(digests).encode()).hexdigest()


def assert_undisturbed(run: LabRun, *, steps: int = STEPS) -> None:
    seed = read_json(run.run.layout.run_json)["spec"]["seed"]
    assert (run.run.losses, run.run.digest) == undisturbed(seed, steps), run.says()


def event_at(run: LabRun, kind: str, *, attempt: int = 1) -> Optional[float]:
    events = read_events(run.run.layout.attempt(attempt))
    return next((float(event["at"]) for event in events if event["kind"] == kind), None)


def wait_for_event(run: LabRun, kind: str, *, timeout_s: float) -> float:
    return wait_until(
        lambda: event_at(run, kind), timeout_s=timeout_s, seen=run.says, interval_s=0.05
    )


def decision(run: LabRun, attempt: int = 1) -> dict[str, Any]:
    return dict(read_decision(run.run.layout.attempt(attempt)))


def wait_for_requeue(run: LabRun, *, timeout_s: float) -> float:
    """When Slurm was seen to have queued the job again."""

    def restarts() -> Optional[float]:
        return time.time() if run.lab.show_job(run.job_id).get("Restarts") == "1" else None

    return wait_until(restarts, timeout_s=timeout_s, seen=run.says)


def wait_for_saved_state(run: LabRun) -> None:
    """Until a slurmctld that is killed knows of the run's steps when it is back."""
    wait_for_event(run, "ranks_started", timeout_s=120)
    saved_state(run.lab, run.job_id)


def reached(run: LabRun, step: int) -> Optional[bool]:
    return (run.step(1) or 0) >= step or None


def ask_to_leave(run: LabRun) -> None:
    """As Slurm warns the ranks of a job."""
    pids = run.rank_pids()
    assert len(pids) == NUM_RANKS, pids
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)


def test_a_controller_that_is_killed_and_comes_back_costs_a_run_nothing(lab: Lab) -> None:
    run = LabRun(lab, "killed", "steps=120", *slow(seconds=0.5))
    wait_for_saved_state(run)
    before = run.wait_for_training(1)
    with daemon_away(lab, "slurmctld"):
        wait_until(partial(reached, run, before + 3), timeout_s=120, seen=run.says)
        ask_to_leave(run)
        if lab.version < (26, 5):  # its srun ends only when slurmctld has taken the end down
            wait_for_event(run, "requeue_asked", timeout_s=120)
            assert run.run.decisions() == ["requeued"], run.says()
    back_at = time.time()
    requeued_at = wait_for_requeue(run, timeout_s=150)
    lab.hasten(run.job_id)
    run.end_as("COMPLETED")
    print(f"requeued {requeued_at - back_at:.1f} s after slurmctld was back")
    assert run.run.decisions() == ["requeued", "done"], run.says()
    assert_undisturbed(run, steps=120)
    assert run.run.steps_trained_twice == 0
    lab.wait_for_runs(run.job_id, ["REQUEUED", "COMPLETED"])


@pytest.mark.full
def test_a_run_trains_on_without_a_controller_and_meets_it_again(lab: Lab) -> None:
    run = LabRun(lab, "trains", step_s=0.3)
    wait_for_saved_state(run)
    for _ in range(2):
        wanted = run.wait_for_training(1) + 8
        with daemon_away(lab, "slurmctld"):
            wait_until(partial(reached, run, wanted), timeout_s=120, seen=run.says)
    assert lab.job_state(run.job_id) == "RUNNING", run.says()
    run.end_as("COMPLETED")
    assert run.run.decisions() == ["done"], run.says()
    assert_undisturbed(run)
    lab.wait_for_runs(run.job_id, ["COMPLETED"])


@pytest.mark.full
def test_a_requeue_and_an_excluded_node_wait_a_minute_for_a_controller(lab: Lab) -> None:
    late = "sleep@step:attempt=1:rank=0:since=2:seconds=4"  # slurmctld is away before the failure
    run = SickRun(lab, "minute", sick="n2", faults=late)
    wait_until(lambda: run.step(1), timeout_s=120, seen=run.says, interval_s=0.05)
    with daemon_away(lab, "slurmctld", verb="stop"):
        away_at = time.time()
        # srun tries to reach slurmctld for 9 s, and then squeue for 18 s.
        run.wait_for_decisions(["requeued"])
        decided = decision(run)
        assert decided["exclude"] == ["n2"], run.says()
        time.sleep(max(0.0, away_at + 60 - time.time()))
    back_at = time.time()
    wait_until(lambda: run.excluded_by_slurm() == "n2" or None, timeout_s=120, seen=run.says)
    excluded_at = time.time()
    # slurmstepd, whose word of the step's end was refused, says it again after a minute.
    run.wait_for_requeue(timeout_s=180)
    waits_at = time.time()
    assert run.excluded_by_slurm() == "n2", run.says()
    lab.hasten(run.job_id)
    run.end_as("COMPLETED")
    print(
        f"decided {decided['decided_at'] - away_at:.1f} s after slurmctld went, which was away for "
        f"{back_at - away_at:.1f} s; requeued and off n2 {excluded_at - back_at:.1f} s after it "
        f"was back, PENDING {waits_at - back_at:.1f} s after"
    )
    assert run.run.decisions() == ["requeued", "done"], run.says()
    assert "n2" not in run.attempts[1].nodes
    # Slurm kept the list: no allocation with n2 in it was given.
    assert RETURNED not in [kind for kind, _ in run.kinds()], run.says()
    assert_undisturbed(run, steps=40)


@pytest.mark.full
def test_without_accounting_a_failure_is_told_as_far_as_the_run_itself_knows(lab: Lab) -> None:
    run = LabRun(lab, "no-slurmdbd", step_s=0.1, faults=LATE_KILL)
    run.wait_for_training(1)
    with daemon_away(lab, "slurmdbd", verb="stop"):
        assert not decision(run), run.says()
        run.end_as("COMPLETED")
    decided = decision(run)
    ended_at = event_at(run, "ranks_ended")
    assert ended_at is not None
    took_s = decided["decided_at"] - ended_at
    print(
        f"decided in {took_s:.1f} s: {decided['cause']} at {decided['confidence']}: "
        f"{decided['reason']}; evidence {decided['evidence']}"
    )
    assert run.run.decisions() == ["restart", "done"], run.says()
    assert (decided["cause"], decided["first_failure"]["rank"]) == ("unknown", 3), decided
    assert took_s < DECIDES_WITHIN_S, decided
    assert_undisturbed(run)
    # Accounting hears of it all the same.
    lab.wait_for_runs(run.job_id, ["COMPLETED"])


@pytest.mark.full
def test_a_rank_that_fails_while_the_controller_is_away_is_replaced_when_it_is_back(
    lab: Lab,
) -> None:
    # For some seconds a slurmctld that is back refuses new steps.
    run = LabRun(lab, "restart", "recovery.backoff_s=2", step_s=0.4, faults=LATE_KILL)
    wait_for_saved_state(run)
    with daemon_away(lab, "slurmctld"):
        away_at = time.time()
        wait_until(lambda: decision(run) or None, timeout_s=120, seen=run.says)
        time.sleep(max(0.0, away_at + 40 - time.time()))
    run.end_as("COMPLETED")
    decided = decision(run)
    print(
        f"decided {decided['decided_at'] - (event_at(run, 'ranks_ended') or 0):.1f} s after the "
        f"ranks' end: {decided['cause']}: {decided['reason']}"
    )
    actions = run.run.decisions()
    assert actions[-1] == "done" and set(actions[:-1]) == {"restart"}, run.says()
    assert decided["first_failure"]["rank"] == 3
    assert_undisturbed(run)
    assert lab.show_job(run.job_id).get("Restarts") == "0"


@pytest.mark.full
def test_a_preempted_run_is_queued_again_when_the_controller_is_back_within_grace(
    lab: Lab,
) -> None:
    late = "sleep@staged:attempt=1:rank=0:seconds=10"  # slurmctld is away before the end
    run = LabRun(lab, "grace", *slow(), faults=late)
    wait_for_saved_state(run)
    run.make_room()
    warned_at = wait_for_event(run, "signal", timeout_s=120)
    with daemon_away(lab, "slurmctld"):
        away_at = time.time()
        if lab.version < (26, 5):
            wait_for_event(run, "requeue_asked", timeout_s=120)
        time.sleep(max(0.0, warned_at + 15 - time.time()))
    back_at = time.time()
    requeued_at = wait_for_requeue(run, timeout_s=150)
    lab.hasten(run.job_id)
    run.end_as("COMPLETED")
    asked_at = event_at(run, "requeue_asked")
    print(
        f"from the signal: away {away_at - warned_at:.1f} s, asked {asked_at - warned_at:.1f} s, "
        f"back {back_at - warned_at:.1f} s, requeued {requeued_at - warned_at:.1f} s"
    )
    assert asked_at is not None and asked_at < back_at
    assert requeued_at - warned_at < lab.settings["grace_s"], "not within grace"
    assert run.run.decisions() == ["requeued", "done"], run.says()
    assert run.run.steps_trained_twice == 0
    assert_undisturbed(run)
