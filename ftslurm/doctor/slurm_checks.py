"""What a cluster's own settings mean for a run: one line for each that matters. Pure.

Judges `scontrol show config` and the partition a run goes to; preemption, GPU models and the
programs of the site each have a file of their own. What a version does not know is not
asked of it. Each line stands for something that was seen on 22.05, 24.11 or 26.05, or that Slurm's
manual says; none is a matter of taste.
"""

from __future__ import annotations

from collections.abc import Callable

from ftslurm.doctor.cluster import Cluster
from ftslurm.doctor.gpu_models import check_gpu_models
from ftslurm.doctor.let_in import check_let_in
from ftslurm.doctor.line import Line, fail, ok, skipped, warn
from ftslurm.doctor.preemption import check_grace, check_mode
from ftslurm.doctor.site_programs import (
    check_epilog,
    check_health_check,
    check_prolog,
    check_prolog_flags,
    check_prolog_hold,
    check_timeouts,
)
from ftslurm.scheduler.protocol import CLOCKS_S
from ftslurm.scheduler.slurm_parse import (
    exit_codes,
    ignored_user_signals,
    sends_user_signal,
    user_signal_setting,
)

LEAST_KILL_WAIT_S = 10
"""In it the batch script asks for the requeue, which takes a second or two of a busy slurmctld."""
LEAST_UNKILLABLE_S = 120
"""A rank in a write to a file server that hangs takes no KILL; past this the node is drained."""


def check_slurm(cluster: Cluster) -> list[Line]:
    return [check(cluster) for check in CHECKS]


def check_partition(cluster: Cluster) -> list[Line]:
    """What another partition may answer differently."""
    return [check(cluster) for check in OF_PARTITION]


def _version(cluster: Cluster) -> Line:
    major, minor, micro = cluster.version
    told = f"Slurm {cluster.get('SLURM_VERSION')}"
    if (major, minor) < (22, 5):
        return fail(
            "slurm.version",
            told,
            "ftslurm is tested on 22.05, 24.11 and 26.05; have a"
            " newer one, or try `ftslurm submit` with a short run first",
        )
    broken = (25, 11, 0) <= cluster.version < (25, 11, 3)
    if broken and "enable_expedited_requeue" in cluster.words("SlurmctldParameters"):
        return warn(
            "slurm.version",
            f"{told} with enable_expedited_requeue",
            "25.11.0 to 25.11.2 queue a job again that has ended well; ftslurm does not"
            " use it there; have 25.11.3 or later",
        )
    return ok("slurm.version", told)


def _partition(cluster: Cluster) -> Line:
    """UP and DOWN take jobs, UP and DRAIN start them (scontrol(1))."""
    name, row = "slurm.partition", cluster.partition
    state = row.get("State", "UP")
    told = f"partition {cluster.partition_name} is {state}"
    if state != "UP":
        what = "starts no job" if state == "DOWN" else "takes no job"
        return fail(name, f"{told}: it {what}", "name another (--partition), or ask why it is so")
    if not cluster.may_use:
        told = f"partition {cluster.partition_name} is for groups {row['AllowGroups']} only"
        todo = "no job of yours begins there: name another (--partition), or ask to be let in"
        return fail(name, f"{told}, and you are in none", todo)
    limits = (row.get("TotalNodes", ""), row.get("MaxNodes", ""))
    most = min((int(limit) for limit in limits if limit.isdigit()), default=None)
    if most is None:
        return ok(name, told)
    told += f", a job may have {most} nodes"
    if most >= cluster.nodes:
        return ok(name, told)
    never = f"one of {cluster.nodes} never begins"
    return fail(name, f"{told}: {never}", "name another (--partition), or fewer nodes (--nodes)")


def _user_signal(cluster: Cluster) -> Line:
    name = "slurm.user_signal"
    key, word = user_signal_setting(cluster.version)
    for place, found in ignored_user_signals(cluster.config, cluster.version):
        return warn(
            name,
            f"{place}={found}, which this version accepts and ignores",
            f"it reads {key}={word}; until then preemption sends TERM, which runs take as well",
        )
    sends = sends_user_signal(cluster.config, cluster.version)
    return ok(
        name, f"preemption sends {'the job its own signal' if sends else 'TERM'}; runs take both"
    )


def _kill_wait(cluster: Cluster) -> Line:
    seconds = cluster.number("KillWait", 30)
    if seconds >= LEAST_KILL_WAIT_S:
        return ok("slurm.kill_wait", f"KillWait={seconds}")
    return warn(
        "slurm.kill_wait",
        f"KillWait={seconds}: so long the batch script has to ask for the requeue",
        f"ask for {LEAST_KILL_WAIT_S} s or more",
    )


def _requeue(cluster: Cluster) -> Line:
    if cluster.number("JobRequeue", 1):
        return ok("slurm.job_requeue", "JobRequeue=1")
    return warn(
        "slurm.job_requeue",
        "JobRequeue=0: only a job that asks for it is queued again",
        "ftslurm asks (--requeue); where a plugin strips that, submit with"
        " recovery.continue_by=resubmit",
    )


def _most_requeues(cluster: Cluster) -> Line:
    name, most = "slurm.max_requeues", cluster.number("MaxBatchRequeue", 5)
    if most >= 5:
        return ok(name, f"a job is held after {most} failed starts")
    return warn(
        name,
        f"MaxBatchRequeue={most}: a job is held after so many failed starts",
        "bad nodes use it up in a night; 5 or more is usual; `ftslurm resume` releases the job",
    )


def _requeue_exit(cluster: Cluster) -> Line:
    name = "slurm.requeue_exit"
    for key, what in (("RequeueExit", "queued again by Slurm"), ("RequeueExitHold", "held")):
        found = sorted({0, 1} & set(exit_codes(cluster.get(key))))
        if found:
            return fail(
                name,
                f"{key}={cluster.get(key)}: a run that ended with {found[0]} is {what}",
                "a run that stops for a person ends with 1, one that is done with 0; ask"
                " for other codes",
            )
    return ok(name, "no exit code of a run is taken for a requeue")


def _unkillable(cluster: Cluster) -> Line:
    name, seconds = "slurm.unkillable", cluster.number("UnkillableStepTimeout", 60)
    if seconds >= LEAST_UNKILLABLE_S:
        return ok(name, f"UnkillableStepTimeout={seconds}")
    return warn(
        name,
        f"UnkillableStepTimeout={seconds}",
        "a rank that waits for a slow file server drains its node after so long; ask for"
        f" {LEAST_UNKILLABLE_S} s or more",
    )


def _accounting(cluster: Cluster) -> Line:
    name, kind = "slurm.accounting", cluster.get("AccountingStorageType")
    if kind in ("", "accounting_storage/none"):
        return warn(
            name,
            "no accounting",
            "`ftslurm report` knows only runs that left records and"
            " the jobs of the last minutes; ask for slurmdbd",
        )
    counted = cluster.get("AccountingStorageTRES")
    if "gpu" in cluster.get("GresTypes") and "gres/gpu" not in counted:
        return warn(
            name,
            "AccountingStorageTRES does not hold gres/gpu",
            "no GPU-hours are on record; add gres/gpu to it",
        )
    if {"jobs", "usage"} & cluster.words("PrivateData"):
        return ok(name, f"{kind}; users see their own jobs only (PrivateData)")
    return ok(name, kind)


def _process_tracking(cluster: Cluster) -> Line:
    name, kind = "slurm.proctrack", cluster.get("ProctrackType")
    if kind == "proctrack/cgroup":
        return ok(name, kind)
    return warn(
        name,
        kind or "none",
        "what leaves its process group outlives its job and keeps"
        " GPU memory; ask for proctrack/cgroup",
    )


def _node_timeout(cluster: Cluster) -> Line:
    name, seconds = "slurm.slurmd_timeout", cluster.number("SlurmdTimeout", 300)
    if seconds == 0:
        return warn(
            name,
            "SlurmdTimeout=0: no node is ever found to be down",
            "jobs of a dead node stay RUNNING; node agents (recovery.agents) see it, ask for 300",
        )
    if seconds > 600:
        return warn(
            name,
            f"SlurmdTimeout={seconds}: so long a dead node is not noticed",
            "node agents (recovery.agents) see it in seconds; others wait",
        )
    return ok(name, f"SlurmdTimeout={seconds}")


def _submit_plugins(cluster: Cluster) -> Line:
    name, plugins = "slurm.submit_plugins", cluster.get("JobSubmitPlugins")
    if not plugins:
        return ok(name, "no JobSubmitPlugins")
    return ok(
        name,
        f"JobSubmitPlugins={plugins}, which may rewrite jobs; where --requeue is"
        " taken away, recovery.continue_by=resubmit serves",
    )


def _arrays(cluster: Cluster) -> Line:
    most = cluster.number("MaxArraySize")
    if not most:
        return ok("slurm.max_array", "MaxArraySize=0: no job arrays here; runs need none")
    told = f"MaxArraySize={most}: tasks of an array are numbered up to {most - 1}"
    return ok("slurm.max_array", f"{told}; a larger sweep is several arrays")


def _clock(cluster: Cluster) -> Line:
    name, off_s = "slurm.clock", cluster.clock_off_s
    if off_s is None:
        return skipped(name, "`scontrol show config` does not tell slurmctld's time")
    if abs(off_s) <= CLOCKS_S:
        return ok(name, f"slurmctld's clock and this machine's are {abs(off_s):.0f} s apart")
    side = "ahead of" if off_s < 0 else "behind"
    return warn(
        name,
        f"this machine's clock is {abs(off_s):.0f} s {side} slurmctld's",
        f"what Slurm and a run have on record is matched by time, {CLOCKS_S:g} s apart at most,"
        " and munge refuses what is minutes old: have chrony or ntpd run on all machines",
    )


OF_PARTITION: tuple[Callable[[Cluster], Line], ...] = (
    _partition, check_let_in, check_mode, check_grace, check_gpu_models,
)  # fmt: skip

CHECKS: tuple[Callable[[Cluster], Line], ...] = (
    _version, *OF_PARTITION, _user_signal, _kill_wait, _requeue, _most_requeues,
    _requeue_exit, _unkillable, check_prolog, check_prolog_hold, check_prolog_flags, check_epilog,
    check_health_check, check_timeouts, _accounting, _process_tracking, _node_timeout,
    _submit_plugins, _arrays, _clock,
)  # fmt: skip
