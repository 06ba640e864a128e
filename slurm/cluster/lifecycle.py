"""`up` and `down`: a whole cluster, or nothing.

`up` takes down what it started when a part of it fails. `down` undoes each thing by its own
record or mark, goes on when one of them fails, and says at the end what is left.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, NoReturn, Optional

import config
import daemons
import fetch
import image
import mounts
import network
import nodes
import preflight
import shared_fs
import users
from config import Settings
from errors import ClusterError
from identity import NUM_GPUS, Identity, node_names
from processes import end_processes, is_running, run
from record import Record, read_boot_id, read_record

_started_at = time.monotonic()


def say(text: str) -> None:
    """One line of progress for the person who waits."""
    print(f"[{time.monotonic() - _started_at:5.1f} s] {text}", file=sys.stderr, flush=True)


def up(
    identity: Identity,
    settings: Settings,
    *,
    exposed: Optional[Path],
    slurm_version: Optional[str] = None,
) -> None:
    """Bring the cluster up. An error leaves nothing behind but a complete image."""
    preflight.check_root()
    preflight.check_folder(identity.folder)
    preflight.check_programs()
    preflight.check_slurm_user()
    shared_fs.check(settings.shared_fs)
    record = read_record(identity.folder)
    if record is not None:
        if is_alive(record):
            _accept_running(record, settings, exposed, slurm_version)
            return
        say("an earlier cluster in this folder is half dead: taking it down first")
        down(identity)
    preflight.check_place(identity)
    chosen = _choose_image(slurm_version)
    said = run(image.inside(chosen, ["slurmctld", "-V"]))
    version = config.parse_version(said)
    config.check_settings(settings, version)
    record = Record(identity.folder, read_boot_id(), version, settings, chosen, exposed)
    with _ended_by_signals():
        try:
            _start(identity, record)
        except BaseException:
            say("that failed: taking down what was started")
            _take_down_after_failure(identity)
            raise
    say(f"cluster `{identity.cluster_name}` is up: {settings.nodes} nodes")


def down(identity: Identity) -> None:
    """Remove every trace of the cluster; without one, do nothing."""
    preflight.check_root()
    record = read_record(identity.folder)
    if record is None:
        say(f"there is no cluster in `{identity.folder}`")
        return
    problems: list[str] = []
    for undo in _undoing(identity, record):
        try:
            undo()
        except ClusterError as error:
            problems.append(str(error))
    if problems:
        raise ClusterError("not everything could be taken down: " + "; ".join(problems))
    mounts.remove_folder(identity.folder)
    say(f"cluster `{identity.cluster_name}` is down; nothing of it is left")


def is_alive(record: Record) -> bool:
    """All daemons run. A node that was switched off does not count: that is what nodes are for."""
    return was_started(record) and all(is_running(one) for one in record.daemons.values())


def was_started(record: Record) -> bool:
    """`up` came to its end, in this boot; daemons may have ended since."""
    return (
        record.complete
        and record.boot_id == read_boot_id()
        and all(name in record.daemons for name in daemons.NAMES)
    )


def write_slurm_conf(identity: Identity, record: Record) -> None:
    """Write slurm.conf from the record's settings, in one step for readers."""
    text = config.render_slurm_conf(identity, record.settings, record.version)
    temporary = identity.slurm_conf.with_suffix(".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(identity.slurm_conf)


def _choose_image(slurm_version: Optional[str]) -> Optional[Path]:
    """The Slurm to run: what is at hand unless another version is asked for."""
    at_hand = image.current()
    if at_hand is not None:
        if slurm_version not in (None, at_hand):
            raise ClusterError(
                f"this runs inside Slurm {at_hand} already; leave it to start {slurm_version}"
            )
        return image.folder_of(at_hand)
    if slurm_version is None:
        return None
    installed = config.format_version(config.parse_version(run(["slurmctld", "-V"])))
    if slurm_version == installed:
        return None
    image.check_place()
    say(f"Slurm {slurm_version} is taken from `{image.folder_of(slurm_version)}`, or put there")
    return fetch.fetch(slurm_version)


def _accept_running(
    record: Record,
    settings: Settings,
    exposed: Optional[Path],
    slurm_version: Optional[str],
) -> None:
    running = config.format_version(record.version)
    if slurm_version not in (None, running):
        raise ClusterError(
            f"a cluster with Slurm {running} is already up in `{record.folder}`; `down` it first"
        )
    if settings.nodes != record.settings.nodes or exposed not in (None, record.exposed):
        raise ClusterError(
            f"a cluster with {record.settings.nodes} nodes that exposes "
            f"`{record.exposed or 'nothing'}` is already up in `{record.folder}`; "
            "`down` it first, or ask for the same"
        )
    if settings != record.settings:
        raise ClusterError(
            f"the cluster is already up with other settings ({record.settings}); "
            "change them with `set`"
        )
    say("already up")


def _start(identity: Identity, record: Record) -> None:
    password = secrets.token_hex(16)
    say(f"making folder `{identity.folder}`")
    _make_folder(identity, record)
    _write_configuration(identity, record, database_password=password)
    network.create_bridge(identity)
    users.create_users(identity)
    if record.exposed is not None:
        mounts.expose(record.exposed, identity.source_folder)
    say("starting munged")
    daemons.start_munged(identity, record)
    say("starting MariaDB")
    daemons.install_database(identity)
    daemons.start_mariadb(identity, record, database_password=password)
    say("starting slurmdbd")
    daemons.start_slurmdbd(identity, record)
    users.register_cluster(identity, record)
    say("starting slurmctld")
    daemons.start_slurmctld(identity, record)
    names = node_names(record.settings.nodes)
    say(f"switching on {', '.join(names)}")
    for node in names:
        nodes.make_node_folder(identity, node)
        nodes.start_node(identity, record, node)
    users.register_users(identity, record)
    nodes.wait_until_idle(identity, record, names)
    record.complete = True
    record.save()


def _take_down_after_failure(identity: Identity) -> None:
    """Take down what there is; the error that led here is the one to be shown at the end."""
    try:
        down(identity)
    except ClusterError as error:
        say(str(error))


def _make_folder(identity: Identity, record: Record) -> None:
    identity.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    identity.folder.chmod(0o755)
    record.save()
    for name in ("etc", "home", "local", "own", "munge", "nodes", "dev"):
        (identity.folder / name).mkdir()
    for name in ("mysql", "run", "state", "log"):
        (identity.folder / name).mkdir()
        shutil.chown(identity.folder / name, "slurm", "slurm")
    for i in range(NUM_GPUS):
        # The same device as /dev/null: slurmd wants a device, nobody drives it.
        os.mknod(identity.folder / "dev" / f"gpu{i}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    nodes.make_without_scontrol(identity)


def _write_configuration(identity: Identity, record: Record, *, database_password: str) -> None:
    write_slurm_conf(identity, record)
    texts = {
        "gres.conf": config.render_gres_conf(identity, record.settings),
        "mariadb.cnf": config.render_mariadb_cnf(identity),
        "hosts": config.render_hosts(identity, record.settings, login_host=socket.gethostname()),
        "job_submit.lua": config.read_template("job_submit.lua"),
        "cgroup.conf": config.read_template("cgroup.conf"),
    }
    for name, text in texts.items():
        (identity.config_folder / name).write_text(text, encoding="utf-8")
    # slurmdbd refuses its file unless it is the slurm user's and private.
    private = identity.config_folder / "slurmdbd.conf"
    private.touch(mode=0o600)
    shutil.chown(private, "slurm", "slurm")
    private.write_text(
        config.render_slurmdbd_conf(identity, database_password=database_password),
        encoding="utf-8",
    )


def _undoing(identity: Identity, record: Record) -> Iterator[Callable[[], None]]:
    """Every thing `up` makes, undone in an order in which each can be undone."""
    processes = [process for tree in record.nodes.values() for process in reversed(tree)]
    processes += record.daemons.values()
    if record.boot_id == read_boot_id():
        yield lambda: end_processes(processes)
    if record.settings.memory_cgroup:
        yield lambda: nodes.remove_cgroups(node_names(record.settings.nodes))
    yield lambda: users.remove_users(identity)
    yield lambda: network.remove_links(identity, node_names(record.settings.nodes))
    yield lambda: network.remove_bridge(identity)
    yield lambda: mounts.unmount_below(identity.folder)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Within this, TERM and HUP end the work as ctrl-C does, so that it is undone."""

    def interrupt(number: int, _frame: object) -> NoReturn:
        raise ClusterError(f"ended by {signal.Signals(number).name}")

    before = {n: signal.signal(n, interrupt) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
