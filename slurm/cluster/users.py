"""The ordinary users who submit jobs, in this machine's passwd and in Slurm's accounting.

A user is ours if its comment (GECOS) says so; nobody else's account is used or removed.
"""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import Optional

import clients
from errors import ClusterError
from identity import Identity
from processes import end_processes, identify_process, run
from record import ProcessRecord, Record

ACCOUNT = "ftslurm"


def home(identity: Identity, name: str) -> Path:
    return identity.folder / "home" / name


def refuse_foreign_users(identity: Identity) -> None:
    for name in identity.user_names:
        entry = _find(name)
        if entry is not None and entry.pw_gecos != identity.user_comment:
            raise ClusterError(
                f"user `{name}` exists on this machine and is not of this cluster; choose "
                "another --folder to get other names"
            )


def create_users(identity: Identity) -> None:
    for name in identity.user_names:
        run(
            [
                "useradd",
                "--no-log-init",
                "--user-group",
                f"--home-dir={home(identity, name)}",
                "--create-home",
                "--shell=/bin/bash",
                f"--comment={identity.user_comment}",
                name,
            ]
        )


def register_cluster(identity: Identity, record: Record) -> None:
    """Tell accounting about the cluster, before slurmctld asks for it."""
    _add(record, "cluster", identity.cluster_name)


def register_users(identity: Identity, record: Record) -> None:
    cluster = f"cluster={identity.cluster_name}"
    _add(record, "account", ACCOUNT, cluster)
    _add(record, "user", ",".join(identity.user_names), f"account={ACCOUNT}", cluster)


def remove_users(identity: Identity) -> None:
    """Remove our users and end what they still run: nobody else can be behind those uids."""
    for name in identity.user_names:
        entry = _find(name)
        if entry is None or entry.pw_gecos != identity.user_comment:
            continue
        end_processes(_processes_of(entry.pw_uid))
        run(["userdel", name])


def _processes_of(uid: int) -> list[ProcessRecord]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid == uid:
                found.append(identify_process(int(entry.name)))
        except (FileNotFoundError, ProcessLookupError, ClusterError):
            pass  # ended meanwhile
    return [process for process in found if process.pid != os.getpid()]


def _find(name: str) -> Optional[pwd.struct_passwd]:
    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def _add(record: Record, *arguments: str) -> None:
    clients.ask(record, "sacctmgr", "--immediate", "add", *arguments)
