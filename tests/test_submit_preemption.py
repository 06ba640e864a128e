"""How a job makes room, and how long it may save before: by its partitions, or by its QOS."""

import dataclasses
from pathlib import Path

import pytest

from ftslurm.run.spec import ClusterSpec, RunSpec
from ftslurm.scheduler.protocol import Site
from ftslurm.scheduler.settings import mode_of_qos, read_qos
from ftslurm.scheduler.slurm import Completed, SlurmScheduler
from ftslurm.submit.continue_by import settle_continue_by
from ftslurm.submit.deadline import emergency_deadline_s
from ftslurm.submit.place import site_of
from ftslurm.submit.preemption import Preemption, qos_of, ways, why_unsure

DATA = Path(__file__).parent / "data"
VERSIONS = ("22.05", "24.11", "26.05")

RECORDED = DATA / "slurm-22.05"
"""What sacctmgr prints of five QOS, and of a user with a default, with several QOS, with one."""
QOS = (RECORDED / "qos.txt").read_text()
DEFAULT, MANY, ONE = (RECORDED / f"assoc{which}.txt" for which in ("", "-many", "-one"))


class Recorded:
    """Answers with a recorded configuration, its PreemptType changed; `accounts`: what sacctmgr
    prints of QOS (None: it fails), `assoc`: of the user."""

    def __init__(self, version="24.11", *, kind="preempt/qos", accounts=None, assoc=""):
        text = (DATA / f"slurm-{version}" / "config.txt").read_text()
        self.config = text.replace("preempt/partition_prio", kind)
        self.partitions = (DATA / f"slurm-{version}" / "partitions.txt").read_text()
        self.accounts, self.assoc, self.asked = accounts, assoc, []

    def __call__(self, argv, timeout_s):
        self.asked.append(argv[0])
        if argv[0] == "sacctmgr":
            failed = Completed(1, "", "sacctmgr: error: Problem talking to the database")
            if self.accounts is None:
                return failed
            told = {"qos": self.accounts, "user": self.assoc}
            return Completed(0, told[argv[argv.index("show") + 1]], "")
        return Completed(0, self.config if "config" in argv else self.partitions, "")

    def site(self):
        return SlurmScheduler(self).site()


def spec(**cluster):
    return RunSpec(cluster=ClusterSpec(signal_lead_s=120, **cluster))


@pytest.mark.parametrize("version", VERSIONS)
def test_accounting_is_asked_only_where_preemption_goes_by_qos(version):
    by_partition, by_qos = Recorded(version, kind="preempt/partition_prio"), Recorded(version)
    site = by_partition.site()
    assert "sacctmgr" not in by_partition.asked
    assert not site.preempt_by_qos and site.qos_preempt_mode == {}
    assert by_qos.site().preempt_by_qos and "sacctmgr" in by_qos.asked


@pytest.mark.parametrize(("qos", "way", "continue_by", "seconds"), [
    ("normal", Preemption("OFF", 0), "requeue", 115.0),  # nobody preempts it
    ("spot", Preemption("cancel", 120), "resubmit", 115.0),
    ("low", Preemption("REQUEUE", 40), "requeue", 40.0),  # the cluster's mode
    ("urgent", Preemption("OFF", 0), "requeue", 115.0),
])  # fmt: skip
@pytest.mark.parametrize("version", VERSIONS)
def test_with_preempt_qos_the_qos_counts_and_the_partition_does_not(
    version, qos, way, continue_by, seconds
):
    site = Recorded(version, accounts=QOS).site()
    kill_wait_s = max(site.kill_wait_s, 5)
    for partition in ("low", "high"):
        chosen = spec(partition=partition, qos=qos)
        assert ways(chosen.cluster, site) == [way]
        assert settle_continue_by(chosen, site) == continue_by
        grace_s = 40.0 + kill_wait_s - 5.0 if qos == "low" else seconds
        assert emergency_deadline_s(site, chosen) == grace_s
        assert why_unsure(chosen.cluster, site) is None


@pytest.mark.parametrize(("assoc", "account", "qos"), [
    (DEFAULT, None, "spot"),
    (DEFAULT, "ftslurm", "spot"),
    (DEFAULT, "other", None),
    (ONE, None, "low"),
    (MANY, None, None),
])  # fmt: skip
def test_a_job_that_names_no_qos_has_its_users_default(assoc, account, qos):
    site = Recorded(accounts=QOS, assoc=assoc.read_text()).site()
    chosen = spec(partition="low", account=account)
    assert qos_of(chosen.cluster, site) == qos
    assert (why_unsure(chosen.cluster, site) is None) == (qos is not None)
    assert qos_of(spec(account=account, qos="low").cluster, site) == "low"


def test_an_association_of_a_partition_is_no_default_of_the_account():
    rows = DEFAULT.read_text() + "ftslurm|ftslurm|high|low|low\n"
    site = Recorded(accounts=QOS, assoc=rows).site()
    assert site.default_qos == {}


def test_a_qos_whose_jobs_preempt_each_other_has_the_clusters_mode():
    known = read_qos(run=Recorded(accounts=QOS))
    assert known["shared"].preempt_mode == "within"
    assert mode_of_qos(known, "shared", "GANG,REQUEUE") == "GANG,REQUEUE"


def test_a_site_with_one_qos_gives_every_job_that_one():
    site = Recorded(accounts="normal|00:00:30|cancel,within|\n").site()
    assert settle_continue_by(spec(partition="low"), site) == "resubmit"


@pytest.mark.parametrize(("accounts", "qos", "said"), [
    (None, "spot", "`sacctmgr show qos` does not answer"),
    (QOS, None, "which QOS the job gets is not known"),
    (QOS, "gone", "set cluster.qos (one of low, normal, shared, spot, urgent)"),
])  # fmt: skip
def test_what_cannot_be_told_goes_by_the_partition_and_is_said(accounts, qos, said, capsys):
    scheduler = SlurmScheduler(Recorded(accounts=accounts))
    chosen = spec(partition="low", qos=qos)
    site = site_of(chosen, scheduler, sbatch_found=True)
    assert said in capsys.readouterr().err
    plain = dataclasses.replace(site, preempt_by_qos=False)
    assert ways(chosen.cluster, site) == ways(chosen.cluster, plain) != []
    assert emergency_deadline_s(site, chosen) == emergency_deadline_s(plain, chosen)
    assert settle_continue_by(chosen, site) == settle_continue_by(chosen, plain) == "requeue"


def test_nothing_is_said_where_partitions_decide(capsys):
    scheduler = SlurmScheduler(Recorded(kind="preempt/partition_prio"))
    site_of(spec(partition="low"), scheduler, sbatch_found=True)
    assert "QOS" not in capsys.readouterr().err


def test_what_was_frozen_by_an_older_version_goes_by_the_partition():
    record = dataclasses.asdict(Recorded(kind="preempt/partition_prio").site())
    for name in ("preempt_by_qos", "qos_grace_s", "qos_preempt_mode", "default_qos"):
        del record[name]
    assert ways(ClusterSpec(partition="low"), Site.from_dict(record))
