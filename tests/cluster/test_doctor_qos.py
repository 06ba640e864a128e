"""Where preemption goes by QOS, doctor and submit judge a job by the one that Slurm gives it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from batch_runs import daemon_away
from lab import Lab

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(400)]

OWN, ABOVE = "ftlow", "fthigh"


@pytest.fixture
def by_qos(lab: Lab) -> Iterator[None]:
    """OWN is what the user's jobs get; jobs of ABOVE take its nodes, after two minutes. slurmctld
    reads how it preempts when it starts."""
    path = Path(lab.environment["SLURM_CONF"])
    plain = path.read_text()
    change = ("sacctmgr", "--immediate")
    for name, values in (
        (OWN, ("GraceTime=120", "PreemptMode=Requeue")),
        (ABOVE, ("Priority=9", f"Preempt={OWN}")),
    ):
        lab.run_as_root(*change, "add", "qos", name, check=False)
        lab.run_as_root(*change, "modify", "qos", name, "set", *values)
    user = (*change, "modify", "user", lab.user, "set")
    lab.run_as_root(*user, f"QOS=normal,{OWN},{ABOVE}", f"DefaultQOS={OWN}")
    kept = [line for line in plain.splitlines() if not line.startswith("PreemptType=")]
    with daemon_away(lab, "slurmctld", verb="stop"):
        path.write_text("\n".join([*kept, "PreemptType=preempt/qos", ""]))
    yield
    lab.cancel_all()
    with daemon_away(lab, "slurmctld", verb="stop"):
        path.write_text(plain)
    lab.run_as_root(*user, "DefaultQOS=-1", "QOS=normal")
    lab.run_as_root(*change, "delete", "qos", OWN, ABOVE, check=False)


@pytest.mark.usefixtures("by_qos")
def test_a_job_that_names_no_qos_is_judged_by_the_one_that_slurm_gives_it(lab: Lab) -> None:
    argv = ["sbatch", "--parsable", "--hold", "--partition=low", "--wrap", "true"]
    number = lab.run_as(lab.user, argv).stdout.strip()
    shown = lab.run_as(lab.user, ["scontrol", "show", "job", number]).stdout
    assert f"QOS={OWN}" in shown.split(), shown
    argv = [str(lab.python), "-m", "ftslurm", "doctor", "--partition", "low", "--write-gb", "0"]
    environ = {"PYTHONPATH": str(lab.checkout)}
    done = lab.run_as(lab.user, [*argv, "--json"], env=environ, check=False)
    found = {one["name"]: one["seen"] for one in json.loads(done.stdout)["lines"]}
    whose = f"QOS {OWN}, which your jobs get"
    assert found["slurm.preempt_mode"] == f"{whose}: preempted jobs are requeued"
    assert found["slurm.grace"] == f"GraceTime=120 of {whose}: so long a preempted run may save"
    # Nothing preempts those of the other.
    done = lab.run_as(lab.user, [*argv, "--json", "--qos", ABOVE], env=environ, check=False)
    found = {one["name"]: one["seen"] for one in json.loads(done.stdout)["lines"]}
    assert found["slurm.preempt_mode"] == f"QOS {ABOVE}: its jobs are never preempted"
