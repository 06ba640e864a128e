"""Slurm tells of which script a job is, however it was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from lab import Lab

from ftslurm.scheduler.slurm import Completed
from ftslurm.scheduler.whose import Marks, jobs_of_others

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def test_jobs_and_arrays_are_told_from_those_of_other_runs(lab: Lab) -> None:
    def run(argv: Sequence[str], timeout_s: float) -> Completed:
        done = lab.run_as(lab.user, argv, timeout_s=timeout_s, check=False)
        return Completed(done.returncode, done.stdout, done.stderr)

    def queue(name: str, script: Path, *options: str) -> str:
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text("#!/bin/bash\nexec sleep 60\n")
        words = ["--hold", "--output=/dev/null", f"--job-name={name}", *options]
        return lab.sbatch_as(lab.user, *words, str(script), "7")

    home = lab.home(lab.user)
    own = queue("a|b", home / "a run" / "submit" / "train.sbatch")
    array = queue("a|b", home / "sweep" / "submit" / "group-000.sbatch", "--array=0-2")
    copied = queue("a|b", home / "copy-of-the-site.sh")
    other = queue("a|b", home / "another" / "submit" / "train.sbatch")
    foreign = queue("sleep", home / "sleep.sh", "--array=0-2")
    marks = Marks([home / "a run", home / "sweep"], ["a|b"])
    job_ids = [own, f"{array}_1", copied, other, f"{foreign}_2"]
    told = jobs_of_others(job_ids, marks, run=run)
    assert list(told) == [other, f"{foreign}_2"]
    assert jobs_of_others(["99999999"], marks, run=run) == {}
