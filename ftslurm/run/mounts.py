"""The kernel's table of mounts: what lies under a path.

Reads that table and nothing else: `mount_above` takes the path as it is written, so that a file
system that hangs holds up nobody; only `mount_of` follows its links.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

TABLE = Path("/proc/self/mountinfo")

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
OF_CONTAINER = ("overlay",)
OWN_DISK = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs")
"""File systems of one host's own disks, unless that host exports them."""


@dataclass(frozen=True)
class Mount:
    point: str
    kind: str
    """File system as Linux names it, e.g. `lustre`, `fuse.s3fs`."""
    source: str
    told_options: str
    """As the table has them: those of the mount, a blank, those of the file system."""

    @property
    def options(self) -> frozenset[str]:
        return frozenset(re.split("[ ,]", self.told_options))

    def number(self, key: str) -> Optional[int]:
        for one in self.options:
            name, _, value = one.partition("=")
            if name == key and value.isdigit():
                return int(value)
        return None


def mount_of(path: Path, table: Path = TABLE) -> Optional[Mount]:
    """Of a folder that exists; None where the kernel does not tell."""
    try:
        place = path.resolve()
    except OSError:
        return None
    return mount_above(str(place), table)


def mount_above(place: str, table: Path = TABLE) -> Optional[Mount]:
    """The longest that holds it, and of two on one point the later one, which hides the other."""
    found: Optional[Mount] = None
    for mount in _mounts(table):
        is_above = place == mount.point or place.startswith(mount.point.rstrip("/") + "/")
        if is_above and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def _mounts(table: Path) -> Iterator[Mount]:
    try:
        lines = table.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        # proc(5): optional fields end with `-`, then the type; octal escapes in the mount point.
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) < 6 or len(right) < 2:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), left[4])
        options = f"{left[5]} {right[2] if len(right) > 2 else ''}".strip()
        yield Mount(point, right[0], right[1], options)
