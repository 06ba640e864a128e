"""The batch loop on real Slurm, with ranks that speak the protocol without torch.

Runs that do not disturb each other go side by side: a fixture drives a group of them to their ends,
each in a thread, and the tests ask what came of them.
"""

from __future__ import annotations

import os
import pwd
import signal
import time
from functools import partial

import pytest
from batch_runs import STEPS, Group, LabRun, controller_away, time_to_leave
from fakes.project import slow
from lab import Lab

from ftslurm.files import read_json
from ftslurm.run.attempts import STOPPED, read_outcome

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

# Where each attempt is killed, and the step from which the next one goes on. The other points of a
# save are killed at in test_local_chain.py.
DEATHS = [
    ("kill@step:rank=3:step=27", 20),
    ("kill@before_rename:step=40", 20),
    ("kill@after_rename:step=40", 40),
]

QUEUED_S = 300
"""Two runs have room at a time; the others wait for one of them to end."""


def undisturbed_and_started_again(lab: Lab) -> LabRun:
    run = LabRun(lab, "undisturbed")
    run.end_as("COMPLETED", timeout_s=QUEUED_S)
    lab.run_as(lab.user, ["scontrol", "requeue", run.job_id])
    lab.hasten(run.job_id)
    # The row of the run that had ended: 26.05 leaves it as it was.
    before = "COMPLETED" if lab.version >= (26, 5) else "REQUEUED"
    lab.wait_for_runs(run.job_id, [before, "COMPLETED"])
    return run


def preempted_twice(lab: Lab, *, name: str) -> LabRun:
    run = LabRun(lab, name, *slow(2))
    for attempt in (1, 2):
        run.wait_for_training(attempt, timeout_s=QUEUED_S)
        run.preempt()
    run.end_as("COMPLETED")
    return run


def killed(lab: Lab) -> LabRun:
    faults = ";".join(f"{where}:attempt={i}" for i, (where, _) in enumerate(DEATHS, start=1))
    run = LabRun(lab, "killed", f"recovery.max_failures={len(DEATHS)}", faults=faults)
    run.end_as("COMPLETED", timeout_s=QUEUED_S)
    return run


def out_of_time(lab: Lab) -> LabRun:
    """root shortens the limit: the warn signal is due when Slurm next looks at its clock, which is
    each half minute; to as much from then, however long the run has taken to begin."""
    run = LabRun(lab, "out-of-time", "cluster.time=00:10:00", *slow(seconds=3))
    run.wait_for_training(1, timeout_s=QUEUED_S)
    lab.run_as_root("scontrol", "update", f"JobId={run.job_id}", "EndTime=now+75")
    lab.wait_for_state(run.job_id, ["PENDING"], 150)
    lab.run_as_root("scontrol", "update", f"JobId={run.job_id}", "TimeLimit=10")
    lab.hasten(run.job_id)
    run.end_as("COMPLETED")
    return run


def cancelled(lab: Lab) -> LabRun:
    run = LabRun(lab, "cancelled", *slow())
    run.wait_for_training(1, timeout_s=QUEUED_S)
    lab.run_as(lab.user, ["scancel", run.job_id])
    run.end_as("CANCELLED")
    # Looked at here: a later reconfigure makes 24.11 and 26.05 forget by whom.
    lab.wait_for_runs(run.job_id, [f"CANCELLED by {pwd.getpwnam(lab.user).pw_uid}"])
    return run


def requeued_without_controller(lab: Lab) -> LabRun:
    run = LabRun(lab, "controller-away", *slow())
    run.wait_for_training(1, timeout_s=QUEUED_S)
    with controller_away(lab):
        pids = run.rank_pids()
        assert len(pids) == 4, pids
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        if lab.version < (26, 5):
            run.wait_for_decisions(["requeued"])
        # 26.05 tells srun of the tasks' end only when slurmctld has taken it down (26.05.5).
        # Below MessageTimeout, 10 s: else slurmstepd waits a minute before it reports the end
        # of the step again, and the job completes that much later.
        time.sleep(3)
    lab.hasten(run.job_id)
    run.end_as("COMPLETED")
    return run


@pytest.fixture(scope="module")
def with_term(lab: Lab) -> Group[LabRun]:
    """Preemption sends TERM."""
    scenarios = {
        "out of time": out_of_time,
        "killed": killed,
        "undisturbed": undisturbed_and_started_again,
        "preempted": partial(preempted_twice, name="preempted-term"),
        "cancelled": cancelled,
    }
    with time_to_leave(lab):
        return Group(lab, scenarios)


@pytest.fixture(scope="module")
def with_user_signal(lab: Lab) -> Group[LabRun]:
    """Preemption sends the job's own signal."""
    with time_to_leave(lab, send_user_signal=True):
        return Group(lab, {"preempted": partial(preempted_twice, name="preempted-usr1")})


@pytest.fixture(scope="module")
def alone(lab: Lab) -> Group[LabRun]:
    """Without slurmctld no other run's test could ask it anything."""
    return Group(lab, {"controller away": requeued_without_controller})


def assert_same_trajectory(run: LabRun, baseline: LabRun) -> None:
    assert run.run.losses == baseline.run.losses, run.says()
    assert run.run.digest == baseline.run.digest


def test_an_undisturbed_run_trains_every_step_once_and_started_again_ends_at_once(
    with_term: Group[LabRun],
) -> None:
    run = with_term["undisturbed"]
    assert run.run.decisions() == ["done"]
    assert len(run.status()["attempts"]) == 1
    assert sorted(run.run.losses) == list(range(1, STEPS + 1))
    assert run.run.steps_trained_twice == 0
    assert run.status()["state"] == "done"


@pytest.mark.parametrize(
    ("group", "sent"),
    [
        ("with_term", "SIGTERM"),
        # By default test_spine.py has it, with torch.
        pytest.param("with_user_signal", "SIGUSR1", marks=pytest.mark.full),
    ],
)
def test_a_run_preempted_twice_ends_as_if_nothing_had_happened(
    request: pytest.FixtureRequest, lab: Lab, with_term: Group[LabRun], group: str, sent: str
) -> None:
    run: LabRun = request.getfixturevalue(group)["preempted"]
    assert run.run.decisions() == ["requeued", "requeued", "done"], run.says()
    assert_same_trajectory(run, with_term["undisturbed"])
    assert run.run.steps_trained_twice == 0
    lab.wait_for_runs(run.job_id, ["REQUEUED", "REQUEUED", *lab.last_rows_once_preempted])

    told = run.status()
    assert (told["state"], told["steps_lost"]) == ("done", 0)
    first, second, last = told["attempts"]
    assert [first["signal"], second["signal"], last["signal"]] == [sent, sent, None]
    assert [first["ended"], second["ended"], last["ended"]] == ["stopped", "stopped", "finished"]
    for before, after in ((first, second), (second, last)):
        assert after["restored_step"] == before["committed_step"] == before["last_step"]
    assert [item["restart_count"] for item in told["attempts"]] == [0, 1, 2]
    by = [read_json(run.run.layout.attempt(i).decision_json)["asked_by"] for i in (1, 2)]
    assert by == ["preempted", "preempted"]


def test_a_rank_killed_at_a_bad_moment_costs_the_steps_since_the_last_commit(
    with_term: Group[LabRun],
) -> None:
    run = with_term["killed"]
    assert run.run.decisions() == ["restart"] * len(DEATHS) + ["done"], run.says()
    assert_same_trajectory(run, with_term["undisturbed"])
    told = run.status()
    restored = [attempt["restored_step"] for attempt in told["attempts"]]
    assert restored == [None, *(step for _, step in DEATHS)]
    assert told["steps_lost"] == run.run.steps_trained_twice > 0
    assert "rank 3" in told["attempts"][0]["reason"]


def test_a_time_limit_is_answered_by_a_requeue_without_a_lost_step(
    lab: Lab, with_term: Group[LabRun]
) -> None:
    run = with_term["out of time"]
    assert run.run.decisions() == ["requeued", "done"], run.says()
    assert_same_trajectory(run, with_term["undisturbed"])
    assert run.run.steps_trained_twice == 0
    assert run.status()["attempts"][0]["signal"] == "SIGUSR1"
    lab.wait_for_runs(run.job_id, ["REQUEUED", "COMPLETED"])


def test_a_run_that_its_user_cancels_saves_and_stays_cancelled(with_term: Group[LabRun]) -> None:
    run = with_term["cancelled"]
    outcome = read_outcome(run.run.layout.attempt(1))
    assert outcome is not None and outcome.result == STOPPED, run.says()
    assert outcome.committed_step == outcome.step
    assert len(run.status()["attempts"]) == 1
    assert run.run.decisions() == ["stop"], run.says()


def test_a_requeue_waits_for_a_controller_that_is_away(
    lab: Lab, with_term: Group[LabRun], alone: Group
) -> None:
    run = alone["controller away"]
    assert run.run.decisions() == ["requeued", "done"], run.says()
    assert_same_trajectory(run, with_term["undisturbed"])
    lab.wait_for_runs(run.job_id, ["REQUEUED", "COMPLETED"])
