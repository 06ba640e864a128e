"""`ftslurm report` of what Slurm's limit of memory has ended: a run of ours and a foreign job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from batch_runs import lab_of_its_own
from lab import Lab
from report_faults import HOARD, INTERVAL, PATIENCE_S, Foreign, ToldRun
from report_told import new_folder, report

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.full,
    pytest.mark.skipif(not Path("/sys/fs/cgroup/memory").exists(), reason="no cgroup v1 here"),
]


@pytest.fixture
def memory_lab() -> Iterator[Lab]:
    """A cluster that counts memory."""
    with lab_of_its_own("memory", "--memory-cgroup=on") as lab:
        yield lab


def test_what_the_limit_has_ended_is_told_with_and_without_records(memory_lab: Lab) -> None:
    lab, folder = memory_lab, new_folder(memory_lab)
    step, rank = HOARD
    placed = ("cluster.nodes=1", "cluster.mem=500M", "+user.hoards=true")
    run = ToldRun(lab, "hoards", folder / "runs", *placed)
    assert run.end() == "COMPLETED", run.says()
    script = f"exec {lab.python} -c 'x = b\"x\" * (400 << 20)'"
    foreign = Foreign(lab, "foreign-hoards", script, "--mem=100M")
    assert lab.wait_for_end(foreign.job_id, PATIENCE_S) == "OUT_OF_MEMORY"
    told = report(lab, folder, run.root, foreign.job_id)
    jobs = {job["job_id"]: job["attempts"] for job in told["jobs"]}
    ours = [(one["cause"], one["rank"], one["steps_lost"]) for one in jobs[run.job_id]]
    assert ours == [("oom_host", rank, step - INTERVAL), (None, None, 0)]
    assert [one["cause"] for one in jobs[foreign.job_id]] == ["oom_host"]
    assert told["fleet"]["by"]["cause"]["oom_host"]["failures"] == 2
    assert told["fleet"]["node_faults"] == 0
