"""What a mount, as the kernel's table has it, means for a run that lies on it. Pure."""

from __future__ import annotations

from typing import Optional

from ftslurm.doctor.line import Line, fail, ok, skipped, warn
from ftslurm.files import VIEW_LAG_S
from ftslurm.run.mounts import IN_MEMORY, OF_CONTAINER, OWN_DISK, Mount

NAME = "folder.mount"

_NFS = ("nfs", "nfs4")
_BUCKETS = ("s3fs", "goofys", "gcsfuse", "rclone", "mountpoint-s3", "geesefs", "blobfuse",
            "blobfuse2")  # fmt: skip
"""FUSE programs that show an object store as folders."""


def check_mount(mount: Optional[Mount]) -> Line:
    if mount is None:
        return skipped(NAME, "the kernel's table of mounts does not tell what lies under it")
    told = f"{mount.kind} from {mount.source}, mounted at {mount.point}"
    options = mount.options
    if "ro" in options:
        return fail(NAME, f"{told}, read-only", "name a folder that takes writes")
    if mount.kind in IN_MEMORY + OF_CONTAINER:
        return warn(
            NAME,
            f"{told}: it goes with its host, or with its container",
            "no checkpoint outlives a node there; name a folder on a file system that all share",
        )
    if mount.kind.partition(".")[2] in _BUCKETS:
        return fail(
            NAME,
            f"{told}: an object store shown as folders, where a rename is a copy",
            "commits rest on renames; keep runs on a file system and copy finished steps there",
        )
    if mount.kind in _NFS:
        return _check_nfs(mount, told)
    if mount.kind in OWN_DISK:
        return ok(NAME, f"{told}: a disk of this machine, which others see where it is exported")
    return ok(NAME, told)


def _check_nfs(mount: Mount, told: str) -> Line:
    soft = sorted(mount.options & {"soft", "softerr"})
    if soft:
        return warn(
            NAME,
            f"{told} with {soft[0]}",
            "a write that the server does not answer in time is lost with EIO, and the save fails;"
            " mount with hard",
        )
    for key in ("acdirmax", "acregmax", "actimeo"):
        seconds = mount.number(key)
        if seconds is not None and seconds > VIEW_LAG_S:
            return warn(
                NAME,
                f"{told} with {key}={seconds}",
                "what another node has made may stay out of sight for so long, and readers wait"
                f" {VIEW_LAG_S:g} s; mount with {key}=60 or less",
            )
    return ok(NAME, told)
