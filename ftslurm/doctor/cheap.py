"""What `ftslurm submit` looks at by the way: Slurm is asked nothing, nothing is written or tried.

Says what submit/refuse.py does not: mount options, room for the checkpoints that are kept, and
settings of the site that was read anyway. Returns only what is not ok.
"""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from ftslurm.doctor.folder_checks import nearest
from ftslurm.doctor.line import Line, warn
from ftslurm.doctor.mounts import check_mount
from ftslurm.doctor.room import check_room, need_of_run
from ftslurm.doctor.run_facts import past_runs, saves_of
from ftslurm.doctor.slurm_checks import LEAST_KILL_WAIT_S
from ftslurm.run.mounts import IN_MEMORY, OF_CONTAINER, mount_of
from ftslurm.run.spec import RunSpec
from ftslurm.scheduler.protocol import Site

_NUM_EARLIER = 5
"""The newest runs of the same shape are among them, or nothing is known."""


def cheap_findings(spec: RunSpec, site: Optional[Site], runs_dir: Path) -> list[Line]:
    """For a run that is about to be submitted; `runs_dir` need not exist yet."""
    found: list[Optional[Line]] = []
    folder = nearest(runs_dir)
    mount = mount_of(folder)
    # That memory goes with its host, submit/refuse.py says.
    if mount is not None and mount.kind not in IN_MEMORY + OF_CONTAINER:
        found.append(check_mount(mount))
    found += _by_earlier_runs(spec, runs_dir, folder)
    if site is not None and spec.cluster.scheduler == "slurm":
        found += [_kill_wait(site), _suspends(spec, site)]
    return [line for line in found if line is not None and line.todo]


def _by_earlier_runs(spec: RunSpec, runs_dir: Path, folder: Path) -> list[Optional[Line]]:
    for past in past_runs(runs_dir, _NUM_EARLIER):
        earlier = past.record.spec
        if (earlier.entry, earlier.program, earlier.model, earlier.user, earlier.world_size) != (
            spec.entry, spec.program, spec.model, spec.user, spec.world_size
        ):  # fmt: skip
            continue
        need = need_of_run(past, kept=spec.checkpoint.keep_last)
        room = check_room(folder, need) if need is not None else None
        return [room, _missed(past.name, saves_of(past.layout, newest_attempts=3).missed)]
    return []


def _missed(run: str, missed: int) -> Optional[Line]:
    if not missed:
        return None
    return warn(
        "runs.emergency_save",
        f"run {run}, which is like this one, could not save in time when it was asked to leave",
        "ask for a longer cluster.signal_lead_s or a partition with a longer grace, or save more"
        " often (checkpoint.interval_steps, checkpoint.interval_s)",
    )


def _kill_wait(site: Site) -> Optional[Line]:
    if site.kill_wait_s >= LEAST_KILL_WAIT_S:
        return None
    return warn(
        "slurm.kill_wait",
        f"KillWait={site.kill_wait_s}: so long the batch script has to ask for the requeue",
        f"have the site set {LEAST_KILL_WAIT_S} s or more",
    )


def _suspends(spec: RunSpec, site: Site) -> Optional[Line]:
    if site.preempt_by_qos:
        return None  # then no partition decides
    names = (spec.cluster.partition or site.default_partition or "").split(",")
    for name in names:
        if "SUSPEND" in site.preempt_mode.get(name, ""):
            return warn(
                "slurm.preempt_mode",
                f"partition {name}: a preempted job is suspended and goes on later",
                "its collectives may time out meanwhile; choose a partition that requeues",
            )
    return None
