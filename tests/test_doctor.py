"""A well-set cluster gets no complaint; each setting broken once is named, and nothing else is."""

import grp
import pwd

import pytest
from doctor_inputs import VERSIONS, WELL_SET, Slurm, lines_of, slurm

from ftslurm.doctor.command import slurm_lines
from ftslurm.doctor.line import FAIL, OK, SKIPPED, WARN
from ftslurm.errors import UsageError
from ftslurm.scheduler.settings import read_settings
from ftslurm.scheduler.slurm import Completed


@pytest.mark.parametrize("version", VERSIONS)
def test_a_well_set_cluster_gets_no_complaint(version):
    for line in lines_of(version).values():
        assert line.state == OK, line
        assert not line.todo


NOBODY = pwd.getpwnam("nobody")
THEIRS = grp.getgrgid(NOBODY.pw_gid).gr_name

HARMLESS = [
    {"preempt": "REQUEUE,WITHIN"},
    {"preempt": "OFF", "grace": "0"},
    {"PreemptType": "preempt/none", "PreemptMode": "GANG", "grace": "0"},
    {"PreemptMode": "GANG,REQUEUE", "shared": "FORCE:1"},
    {"Prolog": "/opt/*/site/pro*.sh"},
    {"Prolog": "/opt/ftslurm/*/prolog.sh"},
    {"HealthCheckNodeState": "IDLE,MIXED"},
    {"EpilogTimeout": "300", "PrologTimeout": "60", "PrologEpilogTimeout": "65534"},
    {"gres": "n1|\nn2|(null)\n"},
    {"off_s": 2.0},
    {"MaxArraySize": "0"},
    {"nodes": 4},
    {"nodes": 3, "most": "3"},
    {"groups": "root", "uid": 0},
    {"groups": f"root,{THEIRS}", "uid": NOBODY.pw_uid},
    {"groups": "root,of_slurmctld_only", "uid": NOBODY.pw_uid},
    {"groups": "root", "uid": 2**31 - 7},
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("changed", HARMLESS)
def test_a_setting_that_is_unusual_and_harmless_is_no_false_alarm(version, changed):
    assert [line for line in lines_of(version, **changed).values() if line.state != OK] == []


def test_ours_is_found_behind_a_program_of_the_sites_own():
    both = {"Prolog": ["/etc/slurm/gres.sh", WELL_SET["Prolog"]],
            "Epilog": ["/etc/slurm/gres.sh", WELL_SET["Epilog"]]}  # fmt: skip
    for version in ("24.11", "26.05"):
        assert [one for one in slurm(version, **both) if one.state != OK] == []


def test_what_holds_for_any_prolog_is_looked_at_for_one_of_the_sites_own():
    found = lines_of(
        "26.05", Prolog="/etc/slurm/prolog.d/*", SchedulerParameters="(null)", PrologFlags="(null)"
    )
    for name in ("slurm.prolog", "slurm.prolog_hold", "slurm.prolog_flags"):
        assert found[name].state == WARN


BROKEN = [
    ("slurm.partition", FAIL, {"state": "DOWN"}),
    ("slurm.partition", FAIL, {"state": "DRAIN"}),
    ("slurm.partition", FAIL, {"state": "INACTIVE"}),
    ("slurm.partition", FAIL, {"nodes": 5}),
    ("slurm.partition", FAIL, {"nodes": 3, "most": "2"}),
    ("slurm.partition", FAIL, {"total": "0"}),
    ("slurm.partition", FAIL, {"groups": "root", "uid": NOBODY.pw_uid}),
    ("slurm.grace", WARN, {"grace": "15"}),
    ("slurm.preempt_mode", WARN, {"preempt": "CANCEL"}),
    ("slurm.preempt_mode", WARN, {"preempt": "SUSPEND"}),
    ("slurm.kill_wait", WARN, {"KillWait": "5 sec"}),
    ("slurm.job_requeue", WARN, {"JobRequeue": "0"}),
    ("slurm.max_requeues", WARN, {"MaxBatchRequeue": "2"}),
    ("slurm.requeue_exit", FAIL, {"RequeueExit": "1-3,75"}),
    ("slurm.requeue_exit", FAIL, {"RequeueExitHold": "0"}),
    ("slurm.unkillable", WARN, {"UnkillableStepTimeout": "60 sec"}),
    ("slurm.prolog", WARN, {"Prolog": "(null)"}),
    ("slurm.prolog", WARN, {"Prolog": "/etc/slurm/prolog"}),
    ("slurm.prolog", WARN, {"Prolog": "/opt/ftslurm/site/*.sh"}),
    ("slurm.prolog_flags", WARN, {"PrologFlags": "(null)"}),
    ("slurm.prolog_hold", WARN, {"SchedulerParameters": "(null)"}),
    ("slurm.epilog", WARN, {"Epilog": "(null)"}),
    ("slurm.epilog", WARN, {"Epilog": "/etc/slurm/epilog"}),
    ("slurm.health_check", WARN, {"HealthCheckProgram": "(null)"}),
    ("slurm.health_check", WARN, {"HealthCheckInterval": "0 sec"}),
    ("slurm.health_check", WARN, {"HealthCheckNodeState": "NONDRAINED_IDLE"}),
    ("slurm.health_check", WARN, {"HealthCheckNodeState": "ALLOC,MIXED"}),
    ("slurm.health_check", WARN, {"HealthCheckNodeState": "START_ONLY"}),
    ("slurm.health_check", WARN, {"HealthCheckNodeState": "ANY,REBOOT_ONLY"}),
    ("slurm.health_check", WARN, {"HealthCheckProgram": "/usr/sbin/nhc"}),
    ("slurm.gpu_models", WARN, {"gres": "n1|gpu:h100:2\nn2|gpu:a100:2(S:0-1)\n"}),
    ("slurm.gpu_models", WARN, {"gres": "n1|gpu:h100:2\nn2|gpu:2\n"}),
    ("slurm.clock", WARN, {"off_s": 30.0}),
    ("slurm.clock", WARN, {"off_s": -30.0}),
    ("slurm.clock", WARN, {"off_s": 3600.0}),
    ("slurm.clock", WARN, {"off_s": -3600.0}),
    ("slurm.preempt_mode", WARN, {"preempt": "GANG,SUSPEND", "grace": "0"}),
    ("slurm.preempt_mode", WARN, {"PreemptMode": "GANG,REQUEUE", "shared": "FORCE:4"}),
    (
        "slurm.preempt_mode",
        WARN,
        {"PreemptType": "preempt/none", "PreemptMode": "GANG", "shared": "FORCE:4"},
    ),
    ("slurm.epilog_timeout", WARN, {"PrologEpilogTimeout": "65534"}),
    ("slurm.epilog_timeout", WARN, {"PrologEpilogTimeout": "30"}),
    # As 26.05 prints them when EpilogTimeout=300 alone is set, and PrologTimeout=300 alone.
    ("slurm.epilog_timeout", WARN, {"EpilogTimeout": "300", "PrologTimeout": "65534"}),
    ("slurm.epilog_timeout", WARN, {"EpilogTimeout": "65534", "PrologTimeout": "300"}),
    ("slurm.accounting", WARN, {"AccountingStorageType": "accounting_storage/none"}),
    ("slurm.accounting", WARN, {"AccountingStorageTRES": "cpu,mem,node"}),
    ("slurm.proctrack", WARN, {"ProctrackType": "proctrack/linuxproc"}),
    ("slurm.slurmd_timeout", WARN, {"SlurmdTimeout": "0 sec"}),
    ("slurm.slurmd_timeout", WARN, {"SlurmdTimeout": "3600 sec"}),
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "state", "changed"), BROKEN)
def test_a_setting_that_is_broken_is_named_and_no_other_is(version, name, state, changed):
    found = lines_of(version, **changed)
    assert found[name].state == state, found[name]
    assert found[name].todo
    assert [line.name for line in found.values() if line.state != OK] == [name]


@pytest.mark.parametrize(
    ("version", "setting", "state"),
    [
        ("22.05", {"SlurmctldParameters": "preempt_send_user_signal"}, OK),
        ("22.05", {"PreemptParameters": "send_user_signal"}, WARN),
        ("24.11", {"PreemptParameters": "send_user_signal"}, OK),
        ("24.11", {"SlurmctldParameters": "preempt_send_user_signal"}, WARN),
        ("26.05", {"SchedulerParameters": "nohold_on_prolog_fail,send_user_signal"}, WARN),
    ],
)
def test_a_word_that_this_version_accepts_and_ignores_is_found(version, setting, state):
    line = lines_of(version, **setting)["slurm.user_signal"]
    assert line.state == state
    assert ("ignores" in line.seen) is (state == WARN)


@pytest.mark.parametrize(
    ("version", "state"), [("25.11.1", WARN), ("25.11.3", OK), ("21.08.8", FAIL)]
)
def test_versions_that_cannot_be_trusted_are_named(version, state):
    changed = {
        "SLURM_VERSION": version, "SlurmctldParameters": "enable_expedited_requeue"
    }  # fmt: skip
    assert lines_of("26.05", **changed)["slurm.version"].state == state


def test_without_slurm_that_is_said_and_nothing_is_claimed():
    def down(argv, timeout_s):
        return Completed(1, "", "scontrol: error: x\nUnable to contact slurm controller\n")

    (line,) = slurm_lines("", run=down)
    assert line.state == SKIPPED
    assert "Unable to contact" in line.seen


def test_what_slurm_does_not_tell_is_not_claimed():
    found = lines_of("26.05", gres=None)
    assert found["slurm.gpu_models"].state == SKIPPED
    assert lines_of("26.05", gres="n1|gpu:8(S:0-1)\n")["slurm.gpu_models"].state == SKIPPED
    untold = lines_of("26.05", said_at="(null)")
    assert untold["slurm.clock"].state == SKIPPED


def test_the_clock_is_told_in_seconds_as_slurm_was_asked():
    run = Slurm("26.05", said_at="1792888200")
    for behind_s, off_s in ((0.5, 0.0), (-30.0, 30.0), (31.0, -30.0)):
        settings = read_settings(run=run, clock=lambda by=behind_s: 1792888200 + by)
        assert settings.clock_off_s == off_s


def test_how_far_an_array_may_go_is_told():
    assert "up to 1000" in lines_of("22.05")["slurm.max_array"].seen


def test_the_clocks_are_told_apart_with_their_side():
    assert "is 30 s behind" in lines_of("22.05", off_s=30.0)["slurm.clock"].seen
    assert "is 30 s ahead of" in lines_of("22.05", off_s=-30.0)["slurm.clock"].seen


def test_of_several_partitions_each_is_looked_at_for_what_differs():
    lines = slurm("26.05", partition="low,high", grace="15")
    graces = [one for one in lines if one.name == "slurm.grace"]
    assert [(one.state, "partition" in one.seen) for one in graces] == [(WARN, True), (OK, True)]
    assert sum(one.name == "slurm.version" for one in lines) == 1
    with pytest.raises(UsageError, match="no partition `gpu`; there are low, high"):
        slurm("26.05", partition="low,gpu")


QOS = "normal|00:00:00|cluster|\nlow|00:05:00|cluster|\nlong|1-00:00:00|Suspend|\n"
QOS += "short|00:00:30|Cancel|low,normal,long\n"


@pytest.mark.parametrize(
    ("qos", "mode", "grace", "seen"),
    [
        ("normal", OK, WARN, "GraceTime=0 of QOS normal"),
        ("low", OK, OK, "GraceTime=300 of QOS low"),
        ("long", WARN, OK, "QOS long: no job is ended by preemption"),
        ("short", OK, OK, "QOS short: no job is ended by preemption"),
    ],
)
def test_with_preempt_qos_the_jobs_qos_is_judged_and_not_the_partition(qos, mode, grace, seen):
    for partition in ({"grace": "120"}, {"grace": "0", "preempt": "OFF"}):
        found = lines_of("26.05", PreemptType="preempt/qos", accounts=QOS, qos=qos, **partition)
        assert (found["slurm.preempt_mode"].state, found["slurm.grace"].state) == (mode, grace)
        assert seen in found["slurm.grace"].seen


def test_a_qos_may_cancel_where_the_cluster_requeues_and_be_preempted_from_within():
    cancels = "a|00:01:00|cancel|\nb|00:00:00|cluster|a\n"
    found = lines_of("26.05", PreemptType="preempt/qos", accounts=cancels, qos="a")
    assert "continue_by=resubmit" in found["slurm.preempt_mode"].todo
    within = "a|00:00:10|Requeue,Within|\n"
    found = lines_of("26.05", PreemptType="preempt/qos", accounts=within)  # the only one
    assert found["slurm.grace"].state == WARN


def test_without_a_qos_or_without_accounting_it_is_said_that_nothing_can_be_told():
    for told, word in (
        ({"accounts": QOS}, "--qos names one of normal, low"),
        ({}, "does not tell"),
    ):
        found = lines_of("26.05", PreemptType="preempt/qos", **told)
        for name in ("slurm.preempt_mode", "slurm.grace"):
            assert found[name].state == SKIPPED
            assert word in found[name].seen
    with pytest.raises(UsageError, match="no QOS `x`; there are normal"):
        slurm("26.05", PreemptType="preempt/qos", accounts=QOS, qos="x")


def test_a_job_that_names_no_qos_is_judged_by_its_users_own():
    found = lines_of("26.05", PreemptType="preempt/qos", accounts=QOS, default_qos="low")
    assert found["slurm.preempt_mode"].seen.startswith("QOS low, which your jobs get: ")
    assert (found["slurm.grace"].state, found["slurm.grace"].seen) == (
        OK, "GraceTime=300 of QOS low, which your jobs get: so long a preempted run may save"
    )  # fmt: skip
    found = lines_of("26.05", PreemptType="preempt/qos", accounts=QOS, default_qos="normal")
    assert found["slurm.grace"].state == WARN
    named = lines_of(
        "26.05", PreemptType="preempt/qos", accounts=QOS, default_qos="low", qos="long"
    )
    assert named["slurm.grace"].seen.startswith("QOS long: ")


def test_accounting_is_asked_only_where_preemption_goes_by_qos():
    run = Slurm("26.05")
    slurm_lines("low", run=run)
    assert "sacctmgr" not in run.asked
