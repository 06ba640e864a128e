"""A job that is told to end is gone when its ranks are: the agents do not hold it for KillWait."""

from __future__ import annotations

import pytest
from batch_runs import LabRun
from fakes import project
from lab import Lab

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

KILL_WAIT_S = 600
"""Nobody here waits for so long."""


def test_a_run_that_is_preempted_or_cancelled_leaves_with_its_agents(lab: Lab) -> None:
    with lab.changed(kill_wait_s=KILL_WAIT_S):
        run = LabRun(lab, "parts", "steps=2000", *project.slow(attempts=2))
        run.wait_for_training(1)
        run.make_room()
        lab.wait_for_state(run.job_id, ["PENDING"], 180)
        lab.hasten(run.job_id)
        run.wait_for_training(2)
        lab.run_as(lab.user, ["scancel", run.job_id])
        lab.wait_for_state(run.job_id, ["CANCELLED"], 180)
    assert run.run.decisions() == ["requeued", "stop"], run.says()
