"""A Slurm of another version than the installed one, seen only where it is asked for.

An image is a folder whose `usr` holds that Slurm and the shared libraries it was built with, glibc
among them. It is laid over the machine's own /usr by a read-only overlay in a mount namespace of
its own. Everything else, the interpreter of the tests' venv included, shows through: newer
libraries run older programs. So paths, users, homes and sockets inside are those outside, and a
namespace with an image needs nothing but this one mount. (A root of its own to chroot into would
need the machine's Python, users and folders brought in one by one; rewritten binaries beside the
installed ones would leave two Slurms on every PATH.)

Nothing of an image is installed, and outside such a namespace nothing is changed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Optional

import mounts
from errors import ClusterError

DEFAULT_FOLDER = Path("/var/tmp/ftslurm-slurm")
USR = Path("/usr")
# In an image's usr, so seen as /usr/lib/... by whoever is inside: the version, `24.11`.
MARK = Path("lib/ftslurm-slurm-version")
LAY_OVER = 'mount -t overlay -o "ro,lowerdir=$1/usr:/usr" overlay /usr && shift && exec "$@"'


def folder_of(version: str) -> Path:
    """Where the image of a version is, or will be."""
    return Path(os.environ.get("FTSLURM_SLURM", str(DEFAULT_FOLDER))) / version


def mark(image: Path, version: str) -> None:
    (image / "usr" / MARK).write_text(f"{version}\n", encoding="ascii")


def current() -> Optional[str]:
    """The version whose image lies over /usr here, None without one."""
    try:
        return (USR / MARK).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return None


def lay_over(image: Optional[Path], argv: list[str]) -> list[str]:
    """`argv` with the image, for a mount namespace that was made for it."""
    # A namespace made inside an image has it already, and overlays stack only two high.
    if image is None or current() == image.name:
        return argv
    # A shell, since it loads nothing after the mount: Python would mix old and new libraries.
    return ["sh", "-c", LAY_OVER, "sh", str(image), *argv]


def inside(image: Optional[Path], argv: list[str]) -> list[str]:
    """`argv` in a mount namespace of its own with the image."""
    command = lay_over(image, argv)
    return argv if command is argv else ["unshare", "--mount", *command]


def check_place() -> None:
    """An overlay over /usr shows all of Slurm and hides nothing."""
    for name in ("bin", "sbin", "lib"):
        if Path("/", name).resolve() != USR / name:
            raise ClusterError(
                f"/{name} is not a link to /usr/{name} on this machine, so another version of "
                "Slurm cannot be laid over it; leave --slurm-version out"
            )
    below = [place for place in mounts.mounted_below(USR) if place != USR]
    if below:
        raise ClusterError(
            f"`{below[0]}` is a mount, which an overlay over /usr would hide; unmount it, or leave "
            "--slurm-version out"
        )
