"""How a run gets its next job is settled when it is submitted: asked for, or by the site."""

from dataclasses import replace

import pytest

from ftslurm.errors import SpecError
from ftslurm.run.spec import ClusterSpec, RecoverySpec, RunSpec
from ftslurm.scheduler.protocol import Site
from ftslurm.submit.continue_by import named, requeue_option, settle_continue_by

SITE = Site("slurm", "24.11.5", 5, job_requeue=True, send_user_signal=True, default_partition="low",
            preempt_mode={"low": "REQUEUE", "spot": "GANG,CANCEL"})  # fmt: skip


def spec(asked="auto", **cluster):
    return RunSpec(cluster=ClusterSpec(**cluster), recovery=RecoverySpec(continue_by=asked))


@pytest.mark.parametrize(("asked", "cluster", "site", "settled"), [
    ("auto", {}, SITE, "requeue"),
    ("auto", {}, replace(SITE, job_requeue=False), "requeue"),
    ("auto", {}, None, "requeue"),
    ("auto", {"partition": "spot"}, SITE, "resubmit"),
    ("auto", {"partition": "low,spot"}, SITE, "resubmit"),
    ("requeue", {"partition": "spot"}, SITE, "requeue"),
    ("resubmit", {}, SITE, "resubmit"),
    ("auto", {"scheduler": "local"}, SITE, "requeue"),
])  # fmt: skip
def test_what_is_asked_for_counts_and_else_what_can_work(asked, cluster, site, settled):
    assert settle_continue_by(spec(asked, **cluster), site) == settled


def test_resubmitting_on_this_machine_is_refused():
    with pytest.raises(SpecError, match="means nothing to cluster=local"):
        settle_continue_by(spec("resubmit", scheduler="local"), SITE)


@pytest.mark.parametrize(("continue_by", "site", "option"), [
    ("requeue", SITE, "--requeue"),
    ("requeue", None, "--requeue"),
    ("resubmit", replace(SITE, expedited_requeue=True), "--no-requeue"),
    ("requeue", replace(SITE, expedited_requeue=True), "--requeue=expedite"),
])  # fmt: skip
def test_the_script_asks_for_what_the_site_understands(continue_by, site, option):
    assert requeue_option(continue_by, site) == option


def test_a_run_that_resubmits_has_a_job_name_under_which_one_job_runs_at_a_time():
    cluster = ClusterSpec(job_name="gpt", sbatch=["--exclusive"])
    own = named(cluster, "resubmit", "gpt-1")
    assert own.job_name == "gpt-gpt-1"
    assert own.sbatch == ["--exclusive", "--dependency=singleton"]
    assert named(cluster, "requeue", "gpt-1") == cluster


def test_a_first_dependency_that_a_person_has_given_is_kept():
    cluster = ClusterSpec(sbatch=["--dependency=afterok:7"])
    assert named(cluster, "resubmit", "r").sbatch == ["--dependency=afterok:7"]


def test_a_name_that_accounting_could_not_keep_is_refused():
    with pytest.raises(SpecError, match="cluster.job_name"):
        named(ClusterSpec(job_name="x" * 200), "resubmit", "y" * 80)
