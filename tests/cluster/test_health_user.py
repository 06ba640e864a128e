"""Users mostly cannot drain, and there may be no root-owned probe: the run still keeps off a node
that is sick. Real Slurm, and a probe that reads made-up hardware."""

from __future__ import annotations

import pytest
from fakes.project import slow_while
from health_site import HealthSite
from lab import wait_until
from sick_runs import PlacedRun

from ftslurm.run.attempts import read_decision

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600), pytest.mark.full]

ECHO = "exit@step:rank=0:step=25:attempt=1"
"""What a rank on n1 dies of says nothing of n2."""


def goes_on_without_n2(run: PlacedRun) -> None:
    run.wait_for_requeue()
    # First it is queued again, then kept off the node.
    wait_until(lambda: run.excluded_by_slurm() or None, timeout_s=60, seen=run.says)
    assert run.excluded_by_slurm() == "n2", run.says()
    assert "n2" in read_decision(run.run.layout.attempt(1))["sick"], run.says()
    run.lab.hasten(run.job_id)
    run.end_as("COMPLETED")
    assert "n2" not in run.attempts[-1].nodes, run.says()


def test_a_run_finds_the_sick_node_by_itself_and_goes_on_without_it(site: HealthSite) -> None:
    site.nodes["n2"].fall_sick("dead NVLink")
    run = PlacedRun(site.lab, "user", "cluster.gpus_per_node=2", *site.overrides(), faults=ECHO)
    goes_on_without_n2(run)
    assert not site.drained()


def test_a_run_reads_what_root_has_found_on_its_nodes(site: HealthSite) -> None:
    """The node is drained as well, so that it is the run's own word that keeps it off later on."""
    verdicts = site.folder / "verdicts"
    site.configure(verdict_dir=str(verdicts))
    site.run_in_slurm("prolog", "epilog", "healthcheck")
    given = ["cluster.gpus_per_node=2", "health.probe=never", f"health.verdict_dir={verdicts}"]
    slow = site.lab.home(site.lab.user) / "slow"
    slow.touch()
    run = PlacedRun(site.lab, "verdicts", *given, *slow_while(slow, since=4), faults=ECHO)
    run.wait_for_training(1)
    site.nodes["n2"].fall_sick("remap failure")
    slow.unlink()
    goes_on_without_n2(run)
    assert list(site.drained()) == ["n2"], site.says()
