"""Debian packages the cluster and its tests need, and what of them is missing here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import shared_fs
from errors import ClusterError
from processes import DAEMON_PATH

# Program -> package that brings it. The -core packages of MariaDB start no service of their own.
PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmdbd": "slurmdbd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "mariadbd": "mariadb-server-core",
    "mariadb": "mariadb-client-core",
    "ip": "iproute2",
    "unshare": "util-linux",
    "mount": "mount",
    "useradd": "passwd",
    "hostname": "hostname",
}
# For the tests of the repository, not for the cluster itself.
TEST_PROGRAMS = {
    "shellcheck": "shellcheck",
    "mkfs.btrfs": "btrfs-progs",
    "bwrap": "bubblewrap",
    "faketime": "faketime",
}
PYTHON_VENV = "python3-venv"


def is_debian() -> bool:
    """Debian itself or a child of it such as Ubuntu."""
    try:
        lines = Path("/etc/os-release").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return False
    words = [line.partition("=")[2].strip('"') for line in lines if line.startswith("ID")]
    return "debian" in " ".join(words).split()


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=DAEMON_PATH) is None]


def missing_packages(*, shared_fs_kind: str = "none") -> list[str]:
    wanted = {**PROGRAMS, **TEST_PROGRAMS}
    if shared_fs_kind != "none":
        wanted |= shared_fs.PROGRAMS
    missing = {p for name, p in wanted.items() if shutil.which(name, path=DAEMON_PATH) is None}
    if not _is_installed(PYTHON_VENV):
        missing.add(PYTHON_VENV)
    return sorted(missing)


def install(packages: list[str]) -> None:
    """apt-get the packages; needs root and a package mirror."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    get = ["apt-get", "--yes", "--no-install-recommends", "-o", "Dpkg::Use-Pty=0"]
    for argv in (["apt-get", "update"], [*get, "install", *packages]):
        # apt's talk goes to stderr: stdout is for results.
        code = subprocess.run(argv, env=environment, stdout=sys.stderr, check=False).returncode
        if code != 0:
            raise ClusterError(
                f"`{' '.join(argv)}` failed with code {code}; its own message is above"
            )


def _is_installed(package: str) -> bool:
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout == "installed"
