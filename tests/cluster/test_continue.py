"""How a run gets its next job on real Slurm, also where requeueing is forbidden or not to be had.

Torch-free ranks; runs that do not disturb each other go side by side.
"""

from __future__ import annotations

from typing import Any, Optional

import pytest
from batch_runs import Group, LabRun
from fakes.project import slow
from lab import ENDED, Lab, wait_until

from ftslurm.files import read_json
from ftslurm.run.attempts import read_events
from ftslurm.run.jobs import read_jobs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

STEP_S = 0.03
RESUBMIT = "recovery.continue_by=resubmit"


class Continued(LabRun):
    """A run with one job after the other, each on one node, so that four have room."""

    def __init__(
        self,
        lab: Lab,
        name: str,
        *more: str,
        slow_attempts: int = 1,
        slow_step_s: float = 1.0,
        step_s: float = STEP_S,
        faults: str = "",
    ) -> None:
        given = ["cluster.nodes=1", *slow(slow_attempts, slow_step_s), *more]
        super().__init__(lab, name, *given, step_s=step_s, faults=faults)

    @property
    def jobs(self) -> list[str]:
        return [job.job_id for job in read_jobs(self.run.layout)]

    def wait_for_jobs(self, count: int, *, timeout_s: float = 120) -> None:
        wait_until(lambda: len(self.jobs) >= count or None, timeout_s=timeout_s, seen=self.says)

    def go_on_as(self, job_id: str, attempt: int) -> None:
        """Wait until the run trains in this job of its, or has done so."""
        self.job_id = job_id
        self.wait_for_training(attempt)

    def end_of_all(self) -> list[str]:
        """States in which the jobs of the run have ended."""
        return [self.lab.wait_for_state(job_id, ENDED, 120) for job_id in self.jobs]


def undisturbed(lab: Lab) -> Continued:
    run = Continued(lab, "continue-undisturbed", slow_attempts=0)
    run.end_as("COMPLETED")
    return run


def preempted_and_requeued(lab: Lab) -> Continued:
    run = Continued(lab, "forbidden")
    run.wait_for_training(1)
    run.preempt()
    run.end_as("COMPLETED")
    return run


def continue_in_a_successor(run: Continued) -> None:
    run.wait_for_training(1)
    run.make_room()
    run.wait_for_jobs(2)
    run.go_on_as(run.jobs[1], 2)


def ended(run: Continued) -> Continued:
    run.end_as("COMPLETED")
    return run


def preempted_with_a_successor(run: Continued) -> Continued:
    continue_in_a_successor(run)
    return ended(run)


def resubmitted(lab: Lab) -> Continued:
    return preempted_with_a_successor(Continued(lab, "resubmitted", RESUBMIT))


def batch_shell_killed(lab: Lab) -> Continued:
    """The batch script ends without a word, as with its node."""
    run = Continued(lab, "shell-killed", RESUBMIT)
    run.wait_for_training(1)
    lab.run_as(lab.user, ["scancel", "--batch", "--signal=KILL", run.job_id])
    run.go_on_as(run.jobs[1], 2)
    run.end_as("COMPLETED")
    return run


def stopped(lab: Lab) -> Continued:
    run = Continued(
        lab, "stopped-for-good", RESUBMIT, "recovery.max_failures=0", faults="exit@step:step=3"
    )
    run.end_as("FAILED")
    return run


def cancelled(lab: Lab) -> Continued:
    run = Continued(lab, "cancelled-for-good", RESUBMIT)
    run.wait_for_training(1)
    lab.run_as(lab.user, ["scancel", run.job_id])
    run.end_as("CANCELLED")
    return run


@pytest.fixture(scope="module")
def forbidden(lab: Lab) -> Group[Continued]:
    """JobRequeue=0. Runs that resubmit themselves do not mind, and so share the time."""
    scenarios = {
        "undisturbed": undisturbed,
        "requeued": preempted_and_requeued,
        "resubmitted": resubmitted,
        "shell killed": batch_shell_killed,
    }
    with lab.changed(job_requeue=False):
        return Group(lab, scenarios)


@pytest.fixture(scope="module")
def impossible(lab: Lab) -> Group[Continued]:
    """A run whose --requeue the site has taken away, and runs on nodes without scontrol."""
    with lab.changed(scontrol=False):
        # Alone: 24.11 may lose the start of a step while it is reconfigured.
        with lab.changed(strip_requeue=True):
            stripped = Continued(lab, "stripped")
            continue_in_a_successor(stripped)
        return Group(
            lab,
            {
                "stripped": lambda lab: ended(stripped),
                "no scontrol": lambda lab: preempted_with_a_successor(
                    Continued(lab, "no-scontrol")
                ),
                "stopped": stopped,
                "cancelled": cancelled,
            },
        )


def assert_as_if_undisturbed(run: Continued, forbidden: Group[Continued]) -> None:
    baseline = forbidden["undisturbed"]
    assert (run.run.digest, run.run.losses) == (baseline.run.digest, baseline.run.losses)


def assert_nothing_is_left(lab: Lab, run: Continued) -> None:
    queued = lab.run_as_root("squeue", "--noheader", "--format=%i|%o").splitlines()
    assert [line for line in queued if line.endswith(str(run.run.layout.script))] == []


def test_jobrequeue_0_does_not_keep_a_run_from_being_requeued(
    lab: Lab, forbidden: Group[Continued]
) -> None:
    run = forbidden["requeued"]
    assert run.run.decisions() == ["requeued", "done"], run.says()
    assert_as_if_undisturbed(run, forbidden)
    assert len(run.jobs) == 1
    lab.wait_for_runs(run.job_id, ["REQUEUED", *lab.last_rows_once_preempted])


def test_a_run_that_resubmits_goes_on_under_a_new_id_and_leaves_no_job(
    lab: Lab, forbidden: Group[Continued]
) -> None:
    run = forbidden["resubmitted"]
    assert run.run.decisions() == ["requeued", "done"], run.says()
    assert_as_if_undisturbed(run, forbidden)
    assert run.run.steps_trained_twice == 0
    first, second, last = run.end_of_all()
    # 22.05 and later versions call a preempted job's own end by different names.
    assert first in ("COMPLETED", "PREEMPTED") and second == "COMPLETED"
    assert last == "CANCELLED"  # the second job's successor
    assert_nothing_is_left(lab, run)
    told = run.status()
    assert (told["state"], len(told["attempts"])) == ("done", 2)


def test_a_batch_shell_that_is_killed_leaves_the_run_with_a_next_job(
    lab: Lab, forbidden: Group[Continued]
) -> None:
    run = forbidden["shell killed"]
    assert run.run.decisions() == ["done"], run.says()
    assert_as_if_undisturbed(run, forbidden)
    assert run.end_of_all() == ["FAILED", "COMPLETED", "CANCELLED"]


def test_a_run_that_stops_for_good_leaves_no_job(lab: Lab, impossible: Group[Continued]) -> None:
    run = impossible["stopped"]
    assert run.run.decisions() == ["stop"], run.says()
    assert run.end_of_all() == ["FAILED", "CANCELLED"]
    assert_nothing_is_left(lab, run)


def test_a_run_whose_job_a_person_cancels_does_not_go_on(
    lab: Lab, impossible: Group[Continued]
) -> None:
    run = impossible["cancelled"]
    first, second = run.end_of_all()
    # The successor is cancelled by the batch loop, or leaves when it starts.
    assert first == "CANCELLED" and second in ("CANCELLED", "FAILED"), run.says()
    assert len(run.status()["attempts"]) == 1
    assert_nothing_is_left(lab, run)


def test_a_site_that_takes_the_requeue_away_is_noticed_when_a_job_begins(
    forbidden: Group[Continued], impossible: Group[Continued]
) -> None:
    run = impossible["stripped"]
    assert run.run.decisions() == ["requeued", "done"], run.says()
    assert_as_if_undisturbed(run, forbidden)
    queued_at = {job.job_id: job.queued_at for job in read_jobs(run.run.layout)}[run.jobs[1]]
    events = read_events(run.run.layout.attempt(1))
    assert queued_at < next(e["at"] for e in events if e["kind"] == "ranks_started"), run.says()


def test_without_scontrol_on_the_nodes_a_successor_is_queued(
    forbidden: Group[Continued], impossible: Group[Continued]
) -> None:
    run = impossible["no scontrol"]
    assert run.run.decisions() == ["requeued", "done"], run.says()
    assert_as_if_undisturbed(run, forbidden)
    reason = str(read_json(run.run.layout.attempt(1).decision_json)["reason"])
    assert "`scontrol` is not on PATH" in reason and f"job {run.jobs[1]} follows it" in reason
    # Left in its grace it would be requeued beside its successor, and counted, from 24.05 on.
    assert run.end_of_all() == ["CANCELLED", "COMPLETED"]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_seven_preemptions_are_survived(lab: Lab, forbidden: Group[Continued]) -> None:
    # Three steps of each attempt are waited for, and more go by until Slurm asks it to leave.
    run = Continued(lab, "seven", slow_attempts=7, slow_step_s=2.0)
    for attempt in range(1, 8):
        run.wait_for_training(attempt)
        run.preempt()
    run.end_as("COMPLETED")
    assert run.run.decisions() == ["requeued"] * 7 + ["done"], run.says()
    assert_as_if_undisturbed(run, forbidden)
    lab.wait_for_runs(run.job_id, ["REQUEUED"] * 7 + lab.last_rows_once_preempted)


@pytest.mark.full
def test_at_the_end_of_grace_it_is_still_known_that_the_job_was_preempted(lab: Lab) -> None:
    """Its ranks are in a long step, and leave between Slurm's TERM for all and its KILL. Then the
    requeue goes before the question why."""
    with lab.changed(grace_s=3, kill_wait_s=20):
        # On a busy machine a grace of 5 s was seen to end after 13 to 16.
        run = Continued(lab, "late", slow_attempts=0, step_s=18)
        wait_until(lambda: run.step(1), timeout_s=120, seen=run.says)
        run.make_room()
        run.wait_for_decisions(["requeued"])
        told = wait_until(lambda: asked(run), timeout_s=60, seen=run.says)
        lab.run_as(lab.user, ["scancel", run.job_id])
        wait_until(lambda: lab.queue() == "" or None, timeout_s=90, seen=lab.queue)
    assert told["asked_by"] == "preempted", told
    # 26.05 was seen to end the ranks without a TERM for the shell.
    assert told["term"] or lab.version >= (26, 5), told


def asked(run: Continued) -> Optional[dict[str, Any]]:
    """The decision, once it says who has asked; written twice, the question in between."""
    decision = dict(read_json(run.run.layout.attempt(1).decision_json))
    return decision if decision["asked_by"] is not None else None


@pytest.mark.full
def test_a_stop_is_final_in_a_job_that_was_once_preempted(lab: Lab) -> None:
    faults = "exit@step:step=18:attempt=2"  # before another step is committed
    run = Continued(
        lab, "preempted-and-stopped", "recovery.max_failures=0", step_s=0.5, faults=faults
    )
    run.wait_for_training(1)
    run.preempt()
    # 24.11 queues such a job once more whatever its exit code, unless it is told not to.
    run.end_as("PREEMPTED" if lab.queues_once_more else "FAILED")
    assert run.run.decisions() == ["requeued", "stop"], run.says()


@pytest.mark.full
def test_an_expedited_requeue_starts_at_once_and_a_stop_stays_a_failure(
    lab: Lab, forbidden: Group[Continued]
) -> None:
    if lab.version < (25, 11):
        pytest.skip("Slurm before 25.11 has no --requeue=expedite")

    def expedited(lab: Lab) -> Continued:
        run = Continued(lab, "expedited")
        run.wait_for_training(1)
        run.make_room()
        # Not hastened: else it would wait for two minutes.
        run.wait_for_training(2, timeout_s=100)
        run.end_as("COMPLETED")
        return run

    def failing(lab: Lab) -> Continued:
        run = Continued(lab, "failing", "recovery.max_failures=0", faults="exit@step:step=3")
        run.end_as("FAILED")
        return run

    with lab.changed(expedited_requeue=True):
        group = Group(lab, {"run": expedited, "failing": failing})
    assert "--requeue=expedite" in group["run"].run.layout.script.read_text()
    assert_as_if_undisturbed(group["run"], forbidden)
    assert group["failing"].run.decisions() == ["stop"]
