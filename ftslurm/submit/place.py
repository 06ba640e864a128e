"""Where a run goes: to Slurm or to this machine, and whether that place takes it now."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping

from ftslurm.errors import SchedulerError, warn
from ftslurm.run.spec import RunSpec
from ftslurm.scheduler.protocol import Scheduler, Site
from ftslurm.submit.preemption import why_unsure


def open_choices() -> dict[str, str]:
    """Options of the groups that nobody chose."""
    return {"cluster": "slurm" if shutil.which("sbatch") else "local"}


def say_opened(opened: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Tell what was chosen for whoever left it open."""
    if "cluster" in opened:
        why = "sbatch is on PATH" if opened["cluster"] == "slurm" else "there is no sbatch on PATH"
        say(f"cluster={opened['cluster']}, because {why}")


def site_of(spec: RunSpec, scheduler: Scheduler, *, sbatch_found: bool) -> Site:
    """SchedulerError where nothing can be submitted."""
    if spec.cluster.scheduler == "slurm":
        if not sbatch_found:
            raise SchedulerError(
                "the run is for Slurm, but sbatch is not on PATH; submit where Slurm is, or choose "
                "cluster=local"
            )
        if not scheduler.controller_alive():
            raise SchedulerError(
                "sbatch is here, but slurmctld does not answer (see `scontrol ping`); submit when "
                "it is back, or run on this machine with cluster=local"
            )
    site = scheduler.site()
    unsure = why_unsure(spec.cluster, site)
    for finding in [*site.findings, *([unsure] if unsure else [])]:
        warn(finding)
    return site
