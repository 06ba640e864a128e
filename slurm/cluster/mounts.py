"""Bind mounts below the cluster's folder, and removing the folder without following one."""

from __future__ import annotations

import shutil
from pathlib import Path

from errors import ClusterError
from processes import run


def expose(source: Path, target: Path) -> None:
    """Show a folder read-only at another place; new nodes see it there too."""
    target.mkdir(exist_ok=True)
    run(["mount", "--bind", str(source), str(target)])
    run(["mount", "-o", "remount,bind,ro", str(target)])


def unmount_below(folder: Path) -> None:
    for place in reversed(mounted_below(folder)):
        run(["umount", str(place)])


def remove_folder(folder: Path) -> None:
    """Delete the folder, but never through a mount into somebody else's files."""
    mounted = mounted_below(folder)
    if mounted:
        raise ClusterError(f"`{folder}` is kept: something is mounted at `{mounted[0]}`")
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise ClusterError(f"cannot remove `{folder}`: {error}; try `down` again") from error


def mounted_below(folder: Path) -> list[Path]:
    """Mount points in this mount namespace at or below a folder, in mounting order."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    # Field 5 is the mount point, with spaces and backslashes as octal escapes.
    places = [Path(line.split()[4].encode().decode("unicode_escape")) for line in lines]
    return [place for place in places if place == folder or folder in place.parents]
