"""A prolog that finds a sick node sends the job elsewhere, whether Slurm holds it or not. Real
Slurm, and a probe that reads made-up hardware."""

from __future__ import annotations

import pytest
from health_site import HealthSite
from sick_runs import PlacedRun

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]

HELD = "launch_failed_requeued_held"


def submit(site: HealthSite, *, nohold: bool) -> PlacedRun:
    """A run whose first job meets a node that is sick already."""
    site.run_in_slurm("prolog", "epilog", nohold_on_prolog_fail=nohold)
    site.nodes["n2"].fall_sick("remap failure")
    return PlacedRun(site.lab, "prolog", "cluster.gpus_per_node=2")


def finishes_elsewhere(run: PlacedRun, site: HealthSite) -> None:
    run.end_as("COMPLETED")
    # The batch script begins when its own node is ready, and may have claimed an attempt; a step
    # waits for the prologs of all.
    assert "n2" not in run.attempts[-1].nodes, run.says()
    assert all(run.step(one.number) is None for one in run.attempts[:-1]), run.says()
    assert site.drained()["n2"].startswith("ftslurm:REMAP-FAIL "), site.says()
    assert list(site.drained()) == ["n2"], site.says()


def test_a_prolog_that_finds_a_sick_node_sends_the_job_elsewhere(site: HealthSite) -> None:
    run = submit(site, nohold=True)
    run.wait_for_requeue()
    site.lab.hasten(run.job_id)
    finishes_elsewhere(run, site)


@pytest.mark.full
def test_where_slurm_holds_such_a_job_status_says_so_and_resume_releases_it(
    site: HealthSite,
) -> None:
    run = submit(site, nohold=False)
    run.wait_for_requeue()
    assert site.lab.show_job(run.job_id)["Reason"] == HELD, run.says()
    told = run.ftslurm("status", str(run.run.layout.root))
    assert "held" in told and "ftslurm resume" in told, told
    run.ftslurm("resume", str(run.run.layout.root))
    site.lab.hasten(run.job_id)
    finishes_elsewhere(run, site)
