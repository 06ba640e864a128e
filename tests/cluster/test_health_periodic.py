"""HealthCheckProgram: an idle node is drained and, well again, resumed; what an administrator has
drained is left as it is. Real Slurm, and a probe that reads made-up hardware."""

from __future__ import annotations

import pytest
from health_site import HealthSite
from lab import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(500), pytest.mark.full]

DRIVER_NOT_LOADED = 9


def test_a_node_whose_driver_was_away_is_drained_and_resumed(site: HealthSite) -> None:
    lab = site.lab
    by_hand = ["scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=new memory on Monday"]
    lab.run_as_root(*by_hand)
    site.configure(resume_passes=2, resume_gap_s=4)
    site.run_in_slurm("healthcheck")
    init = ("*", "code:nvmlInit_v2")
    site.nodes["n2"].gpus.set(*init, DRIVER_NOT_LOADED)
    wait_until(lambda: "n2" in site.drained() or None, timeout_s=150, seen=site.says)
    assert site.drained()["n2"].startswith("ftslurm:DRIVER "), site.says()
    site.nodes["n2"].gpus.set(*init, 0)
    wait_until(lambda: "n2" not in site.drained() or None, timeout_s=150, seen=site.says)
    assert list(site.drained()) == ["n3"], site.says()
    assert site.drained()["n3"].startswith("new memory on Monday"), site.says()
    by_hand_too = site.nodes["n3"]
    wait_until(
        lambda: len(by_hand_too.calls("healthcheck")) >= 3 or None, timeout_s=150, seen=site.says
    )
    assert {call.code for call in by_hand_too.calls("healthcheck")} == {0}, site.says()
    assert list(site.drained()) == ["n3"], site.says()
    took = [call.seconds for node in lab.nodes for call in site.nodes[node].calls()]
    print(f"{len(took)} looks, {max(took):.2f} s at most")
