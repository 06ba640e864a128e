"""cluster.json: what `up` has made, written before or right after each thing is made.

It marks a folder as a cluster's own, and it is the only list of processes that may be ended.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Optional

from config import Settings
from errors import ClusterError

FILE_NAME = "cluster.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ProcessRecord:
    """A process, named so that a later one with the same pid is not taken for it."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/PID/stat: clock ticks after boot at which it started."""


@dataclass
class Record:
    """Everything one cluster has put on this machine."""

    folder: Path
    boot_id: str
    """Pids of an earlier boot mean nothing."""
    version: tuple[int, int]
    settings: Settings
    image: Optional[Path] = None
    """The Slurm it runs, see image.py; None: the one installed here."""
    exposed: Optional[Path] = None
    complete: bool = False
    """`up` came to its end."""
    daemons: dict[str, ProcessRecord] = field(default_factory=dict)
    nodes: dict[str, list[ProcessRecord]] = field(default_factory=dict)
    """Per node its first process (pid 1 inside) and the `unshare` that waits for it."""

    def save(self) -> None:
        """Replace cluster.json; a reader sees the old one or the new one."""
        values = {
            "schema_version": SCHEMA_VERSION,
            "folder": str(self.folder),
            "boot_id": self.boot_id,
            "version": list(self.version),
            "settings": asdict(self.settings),
            "image": str(self.image) if self.image else None,
            "exposed": str(self.exposed) if self.exposed else None,
            "complete": self.complete,
            "daemons": {name: asdict(process) for name, process in self.daemons.items()},
            "nodes": {name: [asdict(p) for p in tree] for name, tree in self.nodes.items()},
        }
        handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=FILE_NAME)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=1)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(self.folder / FILE_NAME)


def read_record(folder: Path) -> Optional[Record]:
    """The folder's record, or None where no cluster has ever been."""
    path = folder / FILE_NAME
    try:
        if path.stat().st_uid != 0 or folder.stat().st_uid != 0:
            # It names processes to be killed: a user's own invention must not be believed.
            raise ClusterError(f"`{path}` was not written by root; remove `{folder}` if it may go")
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ClusterError(f"cannot read `{path}`: {error}") from error
    if values.get("schema_version") != SCHEMA_VERSION:
        raise ClusterError(
            f"`{path}` has schema_version {values.get('schema_version')}, expected "
            f"{SCHEMA_VERSION}; take that cluster down with the version that started it"
        )
    return Record(
        folder=folder,
        boot_id=values["boot_id"],
        version=(values["version"][0], values["version"][1]),
        settings=Settings(**values["settings"]),
        image=Path(values["image"]) if values.get("image") else None,
        exposed=Path(values["exposed"]) if values["exposed"] else None,
        complete=values["complete"],
        daemons={name: ProcessRecord(**p) for name, p in values["daemons"].items()},
        nodes={name: [ProcessRecord(**p) for p in tree] for name, tree in values["nodes"].items()},
    )


def read_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
