"""Is there room for the checkpoints that a run keeps: bytes, and files where the disk counts them?

What a checkpoint takes is told by whoever asks (--state-gb), or by the newest step of an earlier
run. Reads only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional

from ftslurm.checkpoint.published import step_folders
from ftslurm.doctor.line import Line, fail, ok, warn
from ftslurm.doctor.run_facts import Past

NAME = "folder.room"
MARGIN = 1.3
"""Room for what is being written, retries and fragments."""
LEAST_INODES, LEAST_BYTES = 100_000, 1e9
"""Where nobody knows how many files and bytes a checkpoint has."""


@dataclass(frozen=True)
class Need:
    """Of one checkpoint; `kept`: how many stay, beside the one that is being written."""

    state_bytes: float
    kept: int
    files: Optional[int] = None
    """None: nobody has said."""
    source: str = ""
    """For a person, e.g. `as run main-1 has saved`."""


def need_of_run(past: Past, *, kept: int) -> Optional[Need]:
    """As an earlier run has saved; None when it never has."""
    folders = step_folders(past.layout)
    try:
        sizes = [one.stat().st_size for one in folders[0].iterdir()] if folders else []
    except OSError:
        return None  # retired meanwhile
    if not sizes:
        return None
    return Need(sum(sizes), kept, 1 + len(sizes), f"as run {past.name} saved")


def check_room(
    folder: Path,
    need: Optional[Need],
    *,
    look: Callable[[str], os.statvfs_result] = os.statvfs,
) -> Line:
    found = look(str(folder))
    free, inodes = found.f_bavail * found.f_frsize, found.f_favail
    told = f"{_gigabytes(free)} free, whatever a quota leaves of it"
    # File systems that make inodes as they need them report none.
    counts_files = bool(found.f_files)
    files = need.files if need is not None else None
    if counts_files and need is not None and files is not None:
        needed_files = files * (need.kept + 1)
        told += f", {inodes} inodes for {needed_files} files"
        if inodes < MARGIN * needed_files:
            return fail(NAME, told, f"make room for files, or ask for quota; {_FEWER}")
    elif counts_files and inodes < LEAST_INODES:
        told = f"{told}, {inodes} inodes left"
        return warn(NAME, told, "make room for files, or ask for quota")
    if need is None and free < LEAST_BYTES:
        return warn(NAME, told, "make room, or ask for quota: there is hardly any for a checkpoint")
    if need is None:
        return ok(NAME, f"{told}; with --state-gb it is held against what is kept")
    needed = MARGIN * need.state_bytes * (need.kept + 1)
    told = f"{told}, {_gigabytes(needed)} needed for {need.kept} checkpoints and one being written"
    told += f" ({need.source})" if need.source else ""
    if free < needed:
        return fail(NAME, told, f"make room, ask for quota; {_FEWER}")
    return ok(NAME, told)


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.0f} GB" if count >= 10e9 else f"{count / 1e9:,.3f} GB"


_FEWER = "or keep fewer (checkpoint.keep_last)"
