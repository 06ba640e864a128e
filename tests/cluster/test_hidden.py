"""A partition that is hidden (Hidden=YES) serves its users like any other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from lab import Lab

from ftslurm.scheduler.protocol import NodeNeed
from ftslurm.scheduler.settings import read_settings
from ftslurm.scheduler.slurm import Completed, SlurmScheduler

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture
def hidden_lab(lab: Lab) -> Iterator[Lab]:
    lab.run_as_root("scontrol", "update", "PartitionName=low", "Hidden=YES")
    yield lab
    lab.run_as_root("scontrol", "update", "PartitionName=low", "Hidden=NO")


def test_jobs_and_settings_of_a_hidden_partition_are_seen(hidden_lab: Lab) -> None:
    lab = hidden_lab

    def run(argv: Sequence[str], timeout_s: float) -> Completed:
        done = lab.run_as(lab.user, argv, timeout_s=timeout_s, check=False)
        return Completed(done.returncode, done.stdout, done.stderr)

    scheduler = SlurmScheduler(run)
    script = lab.home(lab.user) / "hidden.sh"
    script.write_text("#!/bin/bash\nexec sleep 60\n")
    script.chmod(0o755)
    placed = ["--hold", "--partition=low", "--output=/dev/null"]
    job = lab.sbatch_as(lab.user, *placed, str(script))
    assert [one.job_id for one in scheduler.waiting(Path(script))] == [job]
    assert scheduler.job_state(job).is_held
    assert scheduler.job_states([job])[job].is_held
    assert scheduler.site().grace_s["low"] == lab.settings["grace_s"]
    assert "low" in read_settings(run=run).partitions
    assert scheduler.serving_nodes("low", NodeNeed()) == lab.nodes
