"""How a run's jobs make room for others, and how long they may save before. Pure.

With preempt/partition_prio mode and grace are the partition's; with preempt/qos they are those of
the job's QOS (named, or else its user's default), or the cluster's mode where the QOS has none, and
never the partition's (preempt.c, preempt_qos.c).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from ftslurm.doctor.cluster import Cluster
from ftslurm.doctor.line import Line, ok, skipped, warn
from ftslurm.scheduler.settings import mode_of_qos

LEAST_GRACE_S = 60
"""A save of a gigabyte a rank takes a quarter of 30 s; below, it is a matter of luck."""

OFF, REQUEUE, CANCEL, SUSPEND = "OFF", "REQUEUE", "CANCEL", "SUSPEND"
_BESIDE = {"", OFF, "GANG", "WITHIN", "PRIORITY"}
"""Say when or whom, not how, and stand beside the word that does: `GANG,SUSPEND`."""


@dataclass(frozen=True)
class Preemption:
    how: str
    grace_s: int
    whose: str
    """`partition gpu` or `QOS normal`: where it is set."""


def check_mode(cluster: Cluster) -> Line:
    found, name = _preemption(cluster), "slurm.preempt_mode"
    if isinstance(found, str):
        return skipped(name, found)
    if found.how == SUSPEND:
        told = f"{found.whose}: a preempted job is suspended and goes on later"
        return warn(name, told, _STANDS_STILL)
    if _takes_turns(cluster):
        told = (
            f"PreemptMode=GANG, partition {cluster.partition_name} with"
            f" OverSubscribe={cluster.partition['OverSubscribe']}: jobs take turns on a node"
        )
        return warn(name, told, _STANDS_STILL)
    if found.how == OFF:
        return ok(name, f"{found.whose}: its jobs are never preempted")
    if found.how == REQUEUE:
        return ok(name, f"{found.whose}: preempted jobs are requeued")
    if found.how == CANCEL:
        told = f"{found.whose}: a preempted job is cancelled for good"
        todo = "submit with recovery.continue_by=resubmit: the run gets a new job each time"
        return warn(name, told, todo)
    return skipped(name, f"{found.whose}: PreemptMode={found.how}, a word that is not known here")


def check_grace(cluster: Cluster) -> Line:
    found, name = _preemption(cluster), "slurm.grace"
    if isinstance(found, str):
        return skipped(name, found)
    if found.how not in (REQUEUE, CANCEL):
        return ok(name, f"{found.whose}: no job is ended by preemption, so no grace is needed")
    told = f"GraceTime={found.grace_s} of {found.whose}"
    if found.grace_s >= LEAST_GRACE_S:
        return ok(name, f"{told}: so long a preempted run may save")
    todo = f"a save has to fit it: ask for {LEAST_GRACE_S} s or more, or save often"
    todo += " (checkpoint.interval_s, checkpoint.interval_steps) and keep the state small"
    return warn(name, told, todo)


def _preemption(cluster: Cluster) -> Union[Preemption, str]:
    """Or why it cannot be told."""
    kind = cluster.get("PreemptType")
    of_partition = f"partition {cluster.partition_name}"
    if kind in ("", "preempt/none"):
        return Preemption(OFF, 0, of_partition)
    if kind == "preempt/qos":
        return _of_qos(cluster)
    mode = cluster.partition.get("PreemptMode") or cluster.get("PreemptMode")
    grace = cluster.partition.get("GraceTime", "")
    return Preemption(_how(mode), int(grace) if grace.isdigit() else 0, of_partition)


def _of_qos(cluster: Cluster) -> Union[Preemption, str]:
    if not cluster.qos:
        return "preempt/qos: a job's QOS decides, and `sacctmgr show qos` does not tell"
    name = cluster.qos_name
    if not name and len(cluster.qos) == 1:
        name = next(iter(cluster.qos))
    if name not in cluster.qos:
        return f"preempt/qos: a job's QOS decides; --qos names one of {', '.join(cluster.qos)}"
    mode = mode_of_qos(cluster.qos, name, cluster.get("PreemptMode"))
    whose = f"QOS {name}{', which your jobs get' if cluster.is_default_qos else ''}"
    return Preemption(_how(mode), cluster.qos[name].grace_s, whose)


def _how(mode: str) -> str:
    words = _words(mode)
    return next((one for one in (SUSPEND, CANCEL, REQUEUE) if one in words),
                OFF if words <= _BESIDE else mode)  # fmt: skip


def _words(mode: str) -> set[str]:
    return {word.strip().upper() for word in mode.split(",")}


def _takes_turns(cluster: Cluster) -> bool:
    """Gang scheduling shares only what OverSubscribe has more than one job on."""
    kind, _, most = cluster.partition.get("OverSubscribe", "").partition(":")
    return "GANG" in _words(cluster.get("PreemptMode")) and kind == "FORCE" and most != "1"


_STANDS_STILL = (
    "ranks stand still meanwhile: collectives time out, and a hang may be seen; ask for"
    " PreemptMode=REQUEUE, and for nodes that are not shared"
)
