"""How a run will get its next job, settled at submit from what was asked for and the site. Pure.

requeue keeps the job and its id, and needs a site that lets its jobs be queued again; resubmit
queues a successor as soon as a job begins, and needs nothing but sbatch on the batch node.
"""

from __future__ import annotations

import dataclasses
from typing import Optional

from ftslurm.errors import SpecError
from ftslurm.run.record import REQUEUE, RESUBMIT
from ftslurm.run.spec import ClusterSpec, RunSpec
from ftslurm.scheduler.protocol import Site
from ftslurm.submit.preemption import ways

LONGEST_NAME = 255
"""Characters that accounting keeps of a job's name (slurmdbd: tinytext)."""


def settle_continue_by(spec: RunSpec, site: Optional[Site]) -> str:
    """requeue | resubmit.

    auto takes requeue wherever it can work, JobRequeue=0 included: Slurm then requeues what asks
    for it (22.05 to 26.05, seen). Where preemption cancels, a run that is killed before it has
    asked for its requeue would be lost. A site that takes `--requeue` away from jobs shows only
    in a job: `ftslurm claim` sees it there.
    """
    wanted = spec.recovery.continue_by
    if spec.cluster.scheduler == "local":
        if wanted == RESUBMIT:
            raise SpecError(
                "recovery.continue_by=resubmit means nothing to cluster=local, whose one job is "
                "always queued again; leave it out"
            )
        return REQUEUE
    if wanted != "auto":
        return wanted
    return RESUBMIT if site is not None and _cancels(spec.cluster, site) else REQUEUE


def _cancels(cluster: ClusterSpec, site: Site) -> bool:
    return any("CANCEL" in way.mode.upper() for way in ways(cluster, site))


def requeue_option(continue_by: str, site: Optional[Site]) -> str:
    """sbatch's option for the script."""
    if continue_by == RESUBMIT:
        return "--no-requeue"
    if site is not None and site.expedited_requeue:
        return "--requeue=expedite"
    return "--requeue"


def named(cluster: ClusterSpec, continue_by: str, run_id: str) -> ClusterSpec:
    """`cluster` as sbatch is asked for it: a run that resubmits itself has a job name of its own,
    under which no two of its jobs run at once (--dependency=singleton)."""
    if continue_by != RESUBMIT:
        return cluster
    name = f"{cluster.job_name}-{run_id}"
    if len(name) > LONGEST_NAME:
        raise SpecError(
            f"cluster.job_name with the run's id has {len(name)} characters; give a shorter one, "
            f"the two may have {LONGEST_NAME}"
        )
    dependency = "--dependency=singleton"
    chosen = any(option.startswith("--dependency=") for option in cluster.sbatch)
    further = cluster.sbatch if chosen else [*cluster.sbatch, dependency]
    return dataclasses.replace(cluster, job_name=name, sbatch=further)
