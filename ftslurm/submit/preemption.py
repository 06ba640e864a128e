"""What a site's preemption means for one job: how it is ended, and after how long. Pure.

By its partitions, or with preempt/qos by its QOS. Of a job that names none that is its user's
default, where accounting tells of one, and where there is one QOS alone it is that. Else the
partition's word stands in, and `why_unsure` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from ftslurm.run.spec import ClusterSpec
from ftslurm.scheduler.protocol import Site


@dataclass(frozen=True)
class Preemption:
    """One way in which the job may have to make room."""

    mode: str
    """As Slurm prints it, e.g. `GANG,REQUEUE` or OFF; empty: not told."""
    grace_s: int


def ways(cluster: ClusterSpec, site: Site) -> list[Preemption]:
    """That the job may meet; none where the site tells of none."""
    qos = qos_of(cluster, site)
    if qos is not None:
        return [Preemption(site.qos_preempt_mode[qos], site.qos_grace_s[qos])]
    names = (cluster.partition or site.default_partition or "").split(",")
    return [
        Preemption(site.preempt_mode.get(name, ""), site.grace_s.get(name, 0))
        for name in names
        if name in site.grace_s or name in site.preempt_mode
    ]


def qos_of(cluster: ClusterSpec, site: Site) -> Optional[str]:
    """The QOS whose word counts; None: the partition's does, or has to."""
    if not site.preempt_by_qos:
        return None
    known = site.qos_preempt_mode
    name = cluster.qos or site.default_qos.get(cluster.account or "")
    if name is None and len(known) == 1:
        name = next(iter(known))
    return name if name in known else None


def why_unsure(cluster: ClusterSpec, site: Site) -> Optional[str]:
    """A sentence for who submits; None: it is known, or the site's findings say it."""
    if not site.qos_preempt_mode or qos_of(cluster, site) is not None:
        return None
    some = ", ".join(sorted(site.qos_preempt_mode))
    return (
        "PreemptType=preempt/qos, and which QOS the job gets is not known: the time for a save, "
        "and whether Slurm queues a preempted job again, are taken from the partition; set "
        f"cluster.qos (one of {some})"
    )
