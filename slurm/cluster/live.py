"""Verbs on a cluster that is up: its status, its settings, its nodes."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import Any, Optional

import clients
import config
import daemons
import lifecycle
import network
import nodes
import users
from errors import ClusterError
from identity import Identity, node_names
from processes import is_running, poll
from record import Record, read_record

EFFECT_TIMEOUT_S = 90


def open_cluster(identity: Identity) -> Record:
    """The record of a cluster that is up."""
    record = read_record(identity.folder)
    if record is None or not lifecycle.is_alive(record):
        raise ClusterError(f"no cluster is up in `{identity.folder}`; start one with `up`")
    return record


def open_without_daemons(identity: Identity) -> Record:
    """The record of a cluster that is up but for daemons that were stopped."""
    record = read_record(identity.folder)
    if record is None or not lifecycle.was_started(record):
        raise ClusterError(f"no cluster is up in `{identity.folder}`; start one with `up`")
    return record


def start_daemon(identity: Identity, record: Record, name: str) -> None:
    """Start it again on what it has left; nothing, where it runs."""
    if not is_running(record.daemons[name]):
        daemons.STARTS[name](identity, record)


def change_settings(identity: Identity, record: Record, changes: dict[str, Any]) -> None:
    """Change slurm.conf under the running daemons and scontrol on the nodes that are on; returns
    when slurmctld says it is so."""
    settings = replace(record.settings, **changes)
    config.check_settings(settings, record.version)
    if settings.scontrol != record.settings.scontrol:
        for node in filter(lambda node: nodes.is_on(record, node), record.nodes):
            nodes.set_scontrol(identity, record, node, present=settings.scontrol)
    record.settings = settings
    record.save()
    lifecycle.write_slurm_conf(identity, record)
    daemons.reconfigure(record)
    expected = asdict(settings)
    seen: dict[str, Any] = {}

    def in_effect() -> bool:
        seen.clear()
        try:
            seen.update(read_effective(record))
        except ClusterError as error:
            seen["error"] = str(error)  # it begins anew when it is reconfigured (24.11 and later)
        return seen == expected

    if not poll(in_effect, timeout_s=EFFECT_TIMEOUT_S, interval_s=0.2):
        raise ClusterError(
            f"slurmctld has {seen} after `scontrol reconfigure`, expected {expected}; see "
            f"`{identity.log('slurmctld.log')}`"
        )


def read_effective(record: Record) -> dict[str, Any]:
    """The settings as the running slurmctld has them; scontrol and the shared file system, which
    it does not know of, as recorded."""
    shown = clients.ask(record, "scontrol", "show", "config")
    low = clients.ask(record, "scontrol", "show", "partition", "low")
    key, word = config.user_signal_parameter(record.version)
    delay = re.search(r"^SchedulerParameters\b.*\brequeue_delay=(\d+)", shown, re.MULTILINE)
    return {
        "nodes": int(_field(low, r"TotalNodes=(\d+)")),
        "send_user_signal": word in _words(shown, key),
        "grace_s": int(_field(low, r"GraceTime=(\d+)")),
        "kill_wait_s": int(_field(shown, r"^KillWait\s*=\s*(\d+) sec")),
        "slurmd_timeout_s": int(_field(shown, r"^SlurmdTimeout\s*=\s*(\d+) sec")),
        "job_requeue": _field(shown, r"^JobRequeue\s*=\s*(\d)") == "1",
        "strip_requeue": "lua" in _words(shown, "JobSubmitPlugins"),
        "scontrol": record.settings.scontrol,
        "expedited_requeue": "enable_expedited_requeue" in _words(shown, "SlurmctldParameters"),
        "requeue_delay_s": int(delay[1]) if delay else config.REQUEUE_DELAY_S,
        "prolog": _program(shown, "Prolog"),
        "epilog": _program(shown, "Epilog"),
        "health_check": _program(shown, "HealthCheckProgram"),
        "nohold_on_prolog_fail": "nohold_on_prolog_fail" in _words(shown, "SchedulerParameters"),
        "shared_fs": record.settings.shared_fs,
        "memory_cgroup": record.settings.memory_cgroup,
    }


def _words(shown: str, key: str) -> list[str]:
    return _field(shown, rf"^{key}\s*=(.*)$").split(",")


def _program(shown: str, key: str) -> str:
    """Slurm 24.11 may have several, `Prolog[0]` first, and says nothing of none."""
    found = re.search(rf"^{key}(?:\[0\])?\s*=\s*(\S*)$", shown, re.MULTILINE)
    return found[1] if found and found[1] != "(null)" else ""


def _field(text: str, pattern: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise ClusterError(f"scontrol's answer has no `{pattern}`")
    return match.group(1).strip()


def cut(identity: Identity, record: Record, node: str) -> None:
    _require_on(record, node)
    network.set_link(identity, node, up=False)


def join(identity: Identity, record: Record, node: str) -> None:
    _require_on(record, node)
    network.set_link(identity, node, up=True)


def _require_on(record: Record, node: str) -> None:
    if not nodes.is_on(record, node):
        raise ClusterError(f"node `{node}` is off; `start {node}` brings it back")


def describe(identity: Identity, record: Optional[Record]) -> dict[str, Any]:
    """The cluster as one value, for `status`."""
    is_up = record is not None and lifecycle.is_alive(record)
    shown: dict[str, Any] = {
        "schema_version": 1,
        "up": is_up,
        "folder": str(identity.folder),
        "slurm_conf": str(identity.slurm_conf),
        "cluster_name": identity.cluster_name,
        "controller_address": identity.controller_address,
        "ports": {
            "slurmctld": identity.slurmctld_port,
            "slurmd": identity.slurmd_port,
            "slurmdbd": identity.slurmdbd_port,
            "mariadb": identity.mariadb_port,
        },
    }
    if record is None:
        return shown
    states = nodes.read_states(record) if record and is_up else {}
    shown["version"] = config.format_version(record.version)
    shown["image"] = str(record.image) if record.image else None
    shown["settings"] = asdict(record.settings)
    shown["exposed"] = str(record.exposed) if record.exposed else None
    shown["source_folder"] = str(identity.source_folder) if record.exposed else None
    shown["node_disk"] = str(identity.node_disk)
    shown["daemons"] = [_describe_daemon(record, name) for name in daemons.NAMES]
    shown["nodes"] = [
        _describe_node(identity, record, node, states.get(node, "unknown"))
        for node in node_names(record.settings.nodes)
    ]
    shown["partitions"] = _describe_partitions(record) if is_up else []
    shown["users"] = [
        {"name": name, "home": str(users.home(identity, name))} for name in identity.user_names
    ]
    return shown


def _describe_daemon(record: Record, name: str) -> dict[str, Any]:
    process = record.daemons.get(name)
    return {
        "name": name,
        "pid": process.pid if process else None,
        "running": process is not None and is_running(process),
    }


def _describe_node(identity: Identity, record: Record, node: str, state: str) -> dict[str, Any]:
    is_on = nodes.is_on(record, node)
    return {
        "name": node,
        "address": identity.node_address(node),
        "on": is_on,
        "linked": is_on and network.is_linked(identity, node),
        "pid": nodes.first_process(record, node) if is_on else None,
        "state": state,
    }


def _describe_partitions(record: Record) -> list[dict[str, Any]]:
    shown = clients.try_to_ask(record, "scontrol", "--oneliner", "show", "partition")
    wanted = {
        "name": "PartitionName",
        "priority_tier": "PriorityTier",
        "preempt_mode": "PreemptMode",
        "grace_s": "GraceTime",
        "nodes": "Nodes",
    }
    rows = [dict(p.split("=", 1) for p in line.split()) for line in shown.stdout.splitlines()]
    return [{ours: row[theirs] for ours, theirs in wanted.items()} for row in rows if row]
