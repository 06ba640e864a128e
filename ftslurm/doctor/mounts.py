"""What lies under a folder, by the kernel's table of mounts, and what its options mean for a run.

Pure but for `mount_of`, which reads that table: nothing of the mount itself is touched.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ftslurm.doctor.line import Line, fail, ok, skipped, warn
from ftslurm.files import VIEW_LAG_S

NAME = "folder.mount"

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
OF_CONTAINER = ("overlay",)
OWN_DISK = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs")
_NFS = ("nfs", "nfs4")
_BUCKETS = ("s3fs", "goofys", "gcsfuse", "rclone", "mountpoint-s3", "geesefs", "blobfuse",
            "blobfuse2")  # fmt: skip
"""FUSE programs that show an object store as folders."""


@dataclass(frozen=True)
class Mount:
    point: str
    kind: str
    """File system as Linux names it, e.g. `lustre`, `fuse.s3fs`."""
    source: str
    options: frozenset[str]

    def number(self, key: str) -> Optional[int]:
        for one in self.options:
            name, _, value = one.partition("=")
            if name == key and value.isdigit():
                return int(value)
        return None


def mount_of(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> Optional[Mount]:
    """Of a folder that exists; None where the kernel does not tell."""
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        place = path.resolve()
    except OSError:
        return None
    found: Optional[Mount] = None
    for line in lines:
        # proc(5): optional fields end with `-`; octal escapes in the mount point.
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) < 6 or len(right) < 2:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), left[4])
        # Of two on one point the later one hides the other.
        if Path(point) in (place, *place.parents) and (
            found is None or len(point) >= len(found.point)
        ):
            options = [*left[5].split(","), *(right[2].split(",") if len(right) > 2 else [])]
            found = Mount(point, right[0], right[1], frozenset(options))
    return found


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
