"""The ranks' Python environment as one file: where a node keeps it unpacked. Names only.

The folder's name is made of the archive's own name, size and time of change, so another archive is
another folder, and of the user's number, so two users of a node never share one.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ftslurm.errors import SpecError
from ftslurm.run.spec import ClusterSpec

TAR = (".tar", ".tar.gz", ".tgz", ".tar.xz")
SQUASHFS = (".squashfs", ".sqsh")

PLACEHOLDER = "{environment}"
"""Stands in cluster.rank_python, container and env for the unpacked folder."""


@dataclass(frozen=True)
class Environment:
    archive: Path
    folder: Path
    """On each node; not there until it has been unpacked."""

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")


def find_environment(cluster: ClusterSpec, base: Path) -> Optional[Environment]:
    """The archive of cluster.environment (relative to `base`) as it now is; None: none is named."""
    if cluster.environment is None:
        return None
    archive = base / Path(cluster.environment).expanduser()
    if not archive.name.endswith(TAR + SQUASHFS):
        raise SpecError(
            f"cluster.environment is `{archive.name}`; give a file of {', '.join(TAR + SQUASHFS)}"
        )
    if not archive.is_file():
        raise SpecError(
            f"cluster.environment `{archive}` is no file here; make it with "
            f"`tar -C VENV -cf {archive.name} .` where all nodes can read it"
        )
    return Environment(archive, Path(cluster.environment_dir) / folder_name(archive))


def folder_name(archive: Path) -> str:
    found = archive.stat()
    identity = f"{archive.name}\0{found.st_size}\0{found.st_mtime_ns}"
    return f"ftslurm-{os.getuid()}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
