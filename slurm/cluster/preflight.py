"""Reasons not to start: looked for before anything is touched, each said in one sentence."""

from __future__ import annotations

import os
import pwd
import re
import socket
import stat
from pathlib import Path

import network
import packages
import users
from errors import ClusterError
from identity import Identity
from record import FILE_NAME

# The path goes into configuration files, passwd and unix socket addresses (at most 107 bytes).
PLAIN_PATH = re.compile(r"/[A-Za-z0-9._/-]{1,80}")
PRIVATE_TO_NODES = (Path("/tmp"), Path("/dev"), Path("/proc"))


def check_root() -> None:
    if os.geteuid() != 0:
        raise ClusterError("this must run as root: it makes namespaces, a network and users")


def check_folder(folder: Path) -> None:
    """The folder can hold a cluster and is not somebody's data."""
    if not PLAIN_PATH.fullmatch(str(folder)):
        raise ClusterError(
            f"folder `{folder}` must be an absolute path of at most 80 letters, digits and ._/-"
        )
    if any(place == folder or place in folder.parents for place in PRIVATE_TO_NODES):
        raise ClusterError(
            f"folder `{folder}` cannot be under /tmp, /dev or /proc: each node has its own; "
            "choose one under /var/tmp"
        )
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ClusterError(f"`{folder}` exists and is not a folder; remove it or choose another")
    if folder.exists() and folder.stat().st_uid != 0:
        raise ClusterError(f"`{folder}` is not root's: somebody else could change it under us")
    if folder.is_dir() and not (folder / FILE_NAME).exists() and any(folder.iterdir()):
        raise ClusterError(
            f"folder `{folder}` holds something else (it has no {FILE_NAME}); choose another"
        )
    for parent in folder.parents:
        if parent.exists() and not parent.stat().st_mode & stat.S_IXOTH:
            raise ClusterError(
                f"ordinary users cannot pass through `{parent}`, so they could not use a cluster "
                f"in `{folder}`; choose another --folder"
            )


def check_programs() -> None:
    missing = packages.missing_programs()
    if not missing:
        return
    if packages.is_debian():
        hint = "run `cluster.py setup-packages` to install them with apt-get"
    else:
        hint = "this is not Debian, so install them yourself"
    raise ClusterError(f"missing programs: {', '.join(missing)}; {hint}")


def check_slurm_user() -> None:
    """slurmctld, slurmdbd and MariaDB run as the user that Debian's packages create."""
    try:
        pwd.getpwnam("slurm")
    except KeyError as error:
        raise ClusterError(
            "there is no user `slurm` for slurmctld to run as; `useradd --system slurm` makes one"
        ) from error


def check_place(identity: Identity) -> None:
    """Nobody else, another Slurm above all, uses our ports, network or user names."""
    ports = {
        "slurmctld": identity.slurmctld_port,
        "slurmdbd": identity.slurmdbd_port,
        "MariaDB": identity.mariadb_port,
    }
    for daemon, port in ports.items():
        if not _is_free(port):
            raise ClusterError(
                f"port {port}, which {daemon} needs, is taken by a process not of this cluster "
                f"(`ss -ltnp sport = :{port}` names it); end it or choose another --folder to "
                "get other ports"
            )
    network.refuse_foreign_network(identity)
    users.refuse_foreign_users(identity)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
