"""A throwaway Slurm cluster on this machine: real daemons, every node in namespaces of its own.

Result lines go to stdout, talk to stderr. Exit codes: 0 done, 1 failed (status: not up), 2 usage.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import daemons
import fetch
import image
import lifecycle
import live
import nodes
import options
import packages
import preflight
import shared_fs
from config import Settings
from errors import ClusterError
from identity import DEFAULT_FOLDER, Identity, identify, node_names
from lifecycle import say
from record import Record, read_record

EXAMPLES = """\
examples:
  cluster.py setup-packages                    once on Debian: slurm, munge, mariadb by apt-get
  cluster.py up --nodes 4 --expose .           start; `.` appears read-only at FOLDER/src
  eval "$(cluster.py up)"                      the same, and SLURM_CONF set in this shell
  runuser -u ftuser1 -- sh -c 'cd; sbatch -N2 --wrap "srun hostname"'   submit as ordinary user
  cluster.py set --send-user-signal on         preemption sends a job's own --signal first
  cluster.py set --epilog /opt/site/epilog.sh  what nodes run as root when a job has left
  cluster.py cut n2; cluster.py join n2        pull the node's network cable; plug it in again
  cluster.py kill n2; cluster.py start n2      power off, memory lost; power on
  cluster.py stop slurmdbd; cluster.py start slurmdbd   (or kill; or slurmctld) away, and back
  cluster.py up --slurm-version 24.11          that version, from Debian's packages
  cluster.py enter -- sinfo                    run a command where that version's commands are
  cluster.py status; cluster.py down

what is there when it is up:
  nodes n1..nN, each with 2 CPUs, 4000 MB, gres/gpu:2 (stand-in devices), its own network, host
    name, processes, /tmp and /dev/shm (memory), FOLDER/local (its disk, kept by kill) and
    FOLDER/own (the same, where root alone writes)
  partitions low (default; preempted jobs are requeued after the grace time) and high
  users ftuser1 and ftuser2 with homes under FOLDER/home, known to sacct
  logs in FOLDER/log; `nsenter --target PID --all` enters a node (`status --json` has the PIDs)
The default folder gives ports 26800-26803 and network 10.117.0.0/24; another folder gives another
cluster with ports, network and users of its own (see `status`). No other Slurm is touched.
"""


def main() -> int:
    arguments = _parse(sys.argv[1:])
    folder = Path(os.path.normpath(Path(arguments.folder).absolute()))
    identity = identify(folder)
    try:
        code = int(arguments.verb_function(identity, arguments))
        sys.stdout.flush()
        return code
    except ClusterError as error:
        print(f"cluster: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # `status | head`: the reader has seen enough; keep the interpreter's last flush quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("cluster: interrupted", file=sys.stderr)
        return 1


def _up(identity: Identity, arguments: argparse.Namespace) -> int:
    exposed = arguments.expose.resolve() if arguments.expose else None
    if exposed is not None and not exposed.is_dir():
        raise ClusterError(f"--expose: `{exposed}` is not a folder")
    preflight.check_root()
    with _locked(identity):
        lifecycle.up(
            identity,
            _settings(identity, arguments),
            exposed=exposed,
            slurm_version=arguments.slurm_version,
        )
    print(f"export SLURM_CONF={identity.slurm_conf}")
    return 0


def _settings(identity: Identity, arguments: argparse.Namespace) -> Settings:
    """What was asked for; what was not is as it is in a running cluster, else the default."""
    record = read_record(identity.folder)
    base = record.settings if record and lifecycle.is_alive(record) else Settings()
    asked = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    return Settings(
        **{name: getattr(base, name) if value is None else value for name, value in asked.items()}
    )


def _down(identity: Identity, _arguments: argparse.Namespace) -> int:
    preflight.check_root()
    with _locked(identity):
        lifecycle.down(identity)
    return 0


def _status(identity: Identity, arguments: argparse.Namespace) -> int:
    shown = live.describe(identity, read_record(identity.folder))
    if arguments.json:
        print(json.dumps(shown, indent=1))
    else:
        print("\n".join(_status_lines(shown)))
    return 0 if shown["up"] else 1


def _status_lines(shown: dict[str, Any]) -> Iterator[str]:
    word = "up" if shown["up"] else ("half dead" if "daemons" in shown else "not up")
    yield f"cluster {shown['cluster_name']} in {shown['folder']}: {word}"
    if "daemons" not in shown:
        return
    yield f"  Slurm {shown['version']}, settings {shown['settings']}"
    for daemon in shown["daemons"]:
        life = f"pid {daemon['pid']}" if daemon["running"] else "DEAD"
        yield f"  {daemon['name']:10} {life}"
    for node in shown["nodes"]:
        power = "on" if node["on"] else "off"
        cable = "linked" if node["linked"] else "cut"
        yield (
            f"  node {node['name']:5} {node['address']:15} {node['state']:10} "
            + (f"{power}, {cable}, pid {node['pid']}" if node["on"] else power)
        )
    for p in shown["partitions"]:
        yield (
            f"  partition {p['name']:5} PriorityTier={p['priority_tier']} "
            f"PreemptMode={p['preempt_mode']} GraceTime={p['grace_s']} Nodes={p['nodes']}"
        )
    for user in shown["users"]:
        yield f"  user {user['name']}, home {user['home']}"
    if shown["exposed"]:
        yield f"  {shown['exposed']} is seen read-only at {shown['source_folder']}"
    yield f"export SLURM_CONF={shown['slurm_conf']}"


def _set(identity: Identity, arguments: argparse.Namespace) -> int:
    asked = {field.name: getattr(arguments, field.name, None) for field in fields(Settings)}
    changes = {name: value for name, value in asked.items() if value is not None}
    with _opened(identity) as record:
        live.change_settings(identity, record, changes)
        say(f"in effect: {record.settings}")
    return 0


def _node(identity: Identity, arguments: argparse.Namespace) -> int:
    node = arguments.node
    if node in daemons.STARTS and arguments.verb in ("kill", "start"):
        return _daemon(identity, arguments)
    with _opened(identity) as record:
        known = node_names(record.settings.nodes)
        if node not in known:
            raise ClusterError(f"there is no node `{node}`; choose one of {', '.join(known)}")
        if arguments.verb == "cut":
            live.cut(identity, record, node)
        elif arguments.verb == "join":
            live.join(identity, record, node)
        elif arguments.verb == "kill":
            nodes.kill_node(record, node)
        else:
            nodes.start_node(identity, record, node)
    return 0


def _daemon(identity: Identity, arguments: argparse.Namespace) -> int:
    name = arguments.node
    preflight.check_root()
    with _locked(identity):
        record = live.open_without_daemons(identity)
        if arguments.verb == "stop":
            daemons.stop(record, name)
        elif arguments.verb == "kill":
            daemons.kill(record, name)
        else:
            live.start_daemon(identity, record, name)
    return 0


def _enter(identity: Identity, arguments: argparse.Namespace) -> int:
    """Become the command; returns only by an error."""
    preflight.check_root()
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise ClusterError("enter: which command? `cluster.py enter -- COMMAND [ARGUMENT ...]`")
    record = live.open_cluster(identity)
    argv = image.inside(record.image, command)
    environment = {
        **os.environ,
        "SLURM_CONF": str(identity.slurm_conf),
        "FTSLURM_CLUSTER": str(identity.folder),
    }
    try:
        os.execvpe(argv[0], argv, environment)
    except FileNotFoundError as error:
        raise ClusterError(f"enter: there is no command `{argv[0]}`") from error


def _setup_packages(_identity: Identity, arguments: argparse.Namespace) -> int:
    if not packages.is_debian():
        raise ClusterError("setup-packages knows Debian's apt-get only; this is not Debian")
    missing = packages.missing_packages(shared_fs_kind=arguments.shared_fs)
    if not missing:
        say("all packages are installed")
        return 0
    preflight.check_root()
    say(f"installing {', '.join(missing)}")
    packages.install(missing)
    return 0


@contextmanager
def _opened(identity: Identity) -> Iterator[Record]:
    preflight.check_root()
    with _locked(identity):
        yield live.open_cluster(identity)


@contextmanager
def _locked(identity: Identity) -> Iterator[None]:
    """One verb at a time. The lock is the parent folder's: a lock file of our own would have to
    be left behind by `down`."""
    identity.folder.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(identity.folder.parent, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another cluster.py to finish")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="cluster.py",
        description=(__doc__ or "").partition("\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--folder",
        default=os.environ.get("FTSLURM_CLUSTER", str(DEFAULT_FOLDER)),
        help=f"the cluster's own folder (or $FTSLURM_CLUSTER; default {DEFAULT_FOLDER})",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    up = verbs.add_parser("up", help="start the cluster; prints the line that sets SLURM_CONF")
    _add_up(up)

    down = verbs.add_parser("down", help="end it and remove every trace")
    down.set_defaults(verb_function=_down)

    status = verbs.add_parser("status", help="show it; exit code 1 when it is not up")
    status.add_argument("--json", action="store_true", help="for programs")
    status.set_defaults(verb_function=_status)

    change = verbs.add_parser("set", help="change settings of the running cluster")
    options.add_settings(change)
    change.set_defaults(verb_function=_set)

    enter = verbs.add_parser("enter", help="run a command with the cluster's Slurm on its PATH")
    enter.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    enter.set_defaults(verb_function=_enter)

    for verb, text in (
        ("cut", "pull a node's network cable"),
        ("join", "plug it in again"),
        ("kill", "power a node off: processes and memory are lost; or kill a daemon"),
        ("start", "power it on again; or start that daemon on what it has left"),
    ):
        node = verbs.add_parser(verb, help=text)
        node.add_argument("node", metavar="NODE", help="n1, n2, ...")
        node.set_defaults(verb_function=_node)

    stop = verbs.add_parser("stop", help="end a daemon in good order")
    stop.add_argument("node", choices=tuple(daemons.STARTS), metavar="DAEMON", help="slurmctld ...")
    stop.set_defaults(verb_function=_daemon)

    setup = verbs.add_parser("setup-packages", help="install what is missing (Debian, root)")
    setup.add_argument(
        "--shared-fs", choices=shared_fs.KINDS, default="none", help="and what that needs"
    )
    setup.set_defaults(verb_function=_setup_packages)
    return parser.parse_args(argv)


def _add_up(up: argparse.ArgumentParser) -> None:
    up.add_argument("--nodes", type=options.node_count, help="number of nodes (default 4)")
    options.add_settings(up)
    up.add_argument("--expose", type=Path, metavar="PATH", help="show PATH at FOLDER/src")
    up.add_argument(
        "--slurm-version",
        metavar="VERSION",
        help=f"default: the one installed here; else {' or '.join(fetch.SUITES)}, made once from "
        f"Debian's packages in $FTSLURM_SLURM (default {image.DEFAULT_FOLDER})",
    )
    up.add_argument(
        "--shared-fs",
        choices=shared_fs.KINDS,
        help="bindfs: nodes see FOLDER/home through a client that remembers names and sizes for "
        f"{shared_fs.CACHE_S} s (default none)",
    )
    up.add_argument(
        "--memory-cgroup",
        type=options.on_off,
        metavar="on|off",
        help="jobs ask for memory and are killed above it; needs cgroup v1 (default off)",
    )
    up.set_defaults(verb_function=_up)


if __name__ == "__main__":
    sys.exit(main())
