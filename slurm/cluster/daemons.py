"""The four daemons on the host: munged, MariaDB, slurmdbd, slurmctld, started in that order.

Each runs in the foreground as a child of `up`, with its own log; `up` leaves and they stay. A
daemon that does not come to life is an error that shows the end of its log.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from typing import Callable

import clients
import config
import image
from errors import ClusterError
from identity import CONTROLLER_HOST, Identity
from processes import (
    attempt,
    daemon_environment,
    end_processes,
    identify_process,
    is_running,
    poll,
    run,
    tail,
)
from record import Record

NAMES = ("munged", "mariadb", "slurmdbd", "slurmctld")
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 120
DATABASE_USER = "slurm"

# A script with children that no record names: should `up` be killed, all of it dies at once.
DIES_WITH_US = ("setpriv", "--pdeathsig=KILL", "unshare", "--pid", "--fork", "--kill-child")


def start_munged(identity: Identity, record: Record) -> None:
    own = identity.munge_socket.parent
    key = own / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    argv = [
        "munged",
        "--foreground",
        f"--socket={identity.munge_socket}",
        f"--key-file={key}",
        f"--pid-file={own}/pid",
        f"--seed-file={own}/seed",
    ]
    probe = ["munge", f"--socket={identity.munge_socket}", "--no-input"]
    _start(identity, record, "munged", argv, probe=probe)


def install_database(identity: Identity) -> None:
    """Lay out an empty MariaDB folder (about 1 s)."""
    run(
        [
            *DIES_WITH_US,
            "mariadb-install-db",
            "--no-defaults",
            f"--user={DATABASE_USER}",
            f"--datadir={identity.folder}/mysql",
            "--auth-root-authentication-method=socket",
            "--skip-test-db",
            "--innodb-log-file-size=8M",
            "--innodb-flush-method=nosync",
        ],
        timeout_s=120,
    )


def start_mariadb(identity: Identity, record: Record, *, database_password: str) -> None:
    configuration = identity.config_folder / "mariadb.cnf"
    argv = ["mariadbd", f"--defaults-file={configuration}", f"--user={DATABASE_USER}"]
    client = ["mariadb", "--no-defaults", f"--socket={identity.mysql_socket}", "--user=root"]
    _start(identity, record, "mariadb", argv, probe=[*client, "--execute=SELECT 1"])
    run(client, stdin=config.render_database_sql(database_password=database_password))


def start_slurmdbd(identity: Identity, record: Record) -> None:
    _start_slurm(identity, record, "slurmdbd", ["sacctmgr", "--noheader", "show", "cluster"])


def start_slurmctld(identity: Identity, record: Record) -> None:
    _start_slurm(identity, record, "slurmctld", ["scontrol", "ping"])


STARTS: dict[str, Callable[[Identity, Record], None]] = {
    "slurmdbd": start_slurmdbd,
    "slurmctld": start_slurmctld,
}
"""The daemons that may be away for a while; clients that ask for them are refused then."""


def stop(record: Record, name: str) -> None:
    """End a daemon as its unit file would: it writes down first what it knows."""
    process = record.daemons[name]
    if is_running(process):
        os.kill(process.pid, signal.SIGTERM)
    if not poll(lambda: not is_running(process), timeout_s=STOP_TIMEOUT_S):
        raise ClusterError(f"{name} does not end within {STOP_TIMEOUT_S} s of its TERM")


def kill(record: Record, name: str) -> None:
    """End a daemon as a crash would."""
    end_processes([record.daemons[name]])


def reconfigure(record: Record) -> None:
    clients.ask(record, "scontrol", "reconfigure")


def _start_slurm(identity: Identity, record: Record, daemon: str, probe: list[str]) -> None:
    """slurmctld and slurmdbd start only on a host with the name their configuration gives, and
    slurmctld resolves that name: an own UTS namespace and an own /etc/hosts."""
    script = 'hostname "$1" && mount --bind "$2" /etc/hosts && exec "$3" -D'
    hosts = str(identity.config_folder / "hosts")
    inside = ["sh", "-c", script, "sh", CONTROLLER_HOST, hosts, daemon]
    argv = ["unshare", "--uts", "--mount", *image.lay_over(record.image, inside)]
    _start(identity, record, daemon, argv, probe=image.inside(record.image, probe))


def _start(
    identity: Identity, record: Record, name: str, argv: list[str], *, probe: list[str]
) -> None:
    """Start a daemon, write it down, and wait until the probe, a client of it, succeeds."""
    environment = daemon_environment(identity.slurm_conf)
    output = identity.log(f"{name}.out")
    with output.open("ab") as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            cwd=identity.folder,
            start_new_session=True,
        )
    record.daemons[name] = identify_process(process.pid)
    record.save()
    said = ""

    def ended_or_ready() -> bool:
        nonlocal said
        if process.poll() is not None:
            return True
        answer = attempt(probe, env=environment)
        said = answer.stderr.strip() or answer.stdout.strip()
        return answer.returncode == 0

    in_time = poll(ended_or_ready, timeout_s=START_TIMEOUT_S)
    if process.returncode is not None:
        raise ClusterError(
            f"{name} ended with code {process.returncode} instead of starting\n{tail(output)}"
        )
    if not in_time:
        raise ClusterError(
            f"{name} gave no answer in {START_TIMEOUT_S} s; `{' '.join(probe)}` said: {said}\n"
            f"{tail(output)}"
        )
