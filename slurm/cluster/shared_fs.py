"""FOLDER/home on the nodes as through a network file system's client: each node remembers names,
missing ones too, and sizes for half a minute, whatever the others do meanwhile.

A bindfs of its own lies over it on every node. What lies below is the file server, so all nodes see
each other's files in the end; whoever submits outside the nodes sees the server itself. Seen with
bindfs 1.14.7 and libfuse 2.9: a file that a node has looked for in vain stays away there for these
30 s though listings show it; stat keeps the old size of a file that grows; mkdir and rename are
decided by the server; RENAME_NOREPLACE is refused (EINVAL), as NFS does.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from errors import ClusterError

KINDS = ("none", "bindfs")
CACHE_S = 30
PROGRAMS = {"bindfs": "bindfs"}
OPTIONS = (
    f"attr_timeout={CACHE_S},entry_timeout={CACHE_S},negative_timeout={CACHE_S}",
    "allow_other",
    "nonempty",  # it lies over the very folder that it shows
)


def check(kind: str) -> None:
    """Whether nodes can have it."""
    if kind == "none":
        return
    if shutil.which("bindfs") is None:
        raise ClusterError(
            "`bindfs` is not installed; run `cluster.py setup-packages --shared-fs bindfs`"
        )
    if not Path("/dev/fuse").exists():
        raise ClusterError(
            "this machine has no /dev/fuse, so nodes cannot mount bindfs; load the kernel module "
            "fuse, or leave --shared-fs out"
        )


def lay_over(kind: str, home: Path) -> None:
    """Inside a node, before anything there has looked at `home`; ends with the node."""
    if kind == "bindfs":
        subprocess.run(["bindfs", "-o", ",".join(OPTIONS), str(home), str(home)], check=True)
