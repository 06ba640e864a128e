"""Verbs on a cluster that is up: its status, its settings, its nodes."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import Any, Optional

import config
import daemons
import lifecycle
import network
import nodes
import users
from errors import ClusterError
from identity import Identity, node_names
from processes import attempt, daemon_environment, is_running, poll, run
from record import Record, read_record

EFFECT_TIMEOUT_S = 20


def open_cluster(identity: Identity) -> Record:
    """The record of a cluster that is up."""
    record = read_record(identity.folder)
    if record is None or not lifecycle.is_alive(record):
        raise ClusterError(f"no cluster is up in `{identity.folder}`; start one with `up`")
    return record


def change_settings(
    identity: Identity,
    record: Record,
    *,
    send_user_signal: Optional[bool],
    grace_s: Optional[int],
    kill_wait_s: Optional[int],
) -> None:
    """Change slurm.conf under the running daemons; returns when slurmctld says it is so."""
    asked: dict[str, Any] = {
        "send_user_signal": send_user_signal,
        "grace_s": grace_s,
        "kill_wait_s": kill_wait_s,
    }
    changes = {name: value for name, value in asked.items() if value is not None}
    record.settings = replace(record.settings, **changes)
    record.save()
    lifecycle.write_slurm_conf(identity, record)
    daemons.reconfigure(identity)
    if not poll(
        lambda: read_effective(identity, record) == asdict(record.settings),
        timeout_s=EFFECT_TIMEOUT_S,
        interval_s=0.2,
    ):
        raise ClusterError(
            f"slurmctld has {read_effective(identity, record)} after `scontrol reconfigure`, "
            f"expected {asdict(record.settings)}; see `{identity.log('slurmctld.log')}`"
        )


def read_effective(identity: Identity, record: Record) -> dict[str, Any]:
    """The settings as the running slurmctld has them."""
    environment = daemon_environment(identity.slurm_conf)
    shown = run(["scontrol", "show", "config"], env=environment)
    low = run(["scontrol", "show", "partition", "low"], env=environment)
    name, _, word = config.user_signal_line(record.version).partition("=")
    parameters = _field(shown, rf"^{name}\s*=\s*(.*)$")
    return {
        "nodes": int(_field(low, r"TotalNodes=(\d+)")),
        "send_user_signal": word in parameters.split(","),
        "grace_s": int(_field(low, r"GraceTime=(\d+)")),
        "kill_wait_s": int(_field(shown, r"^KillWait\s*=\s*(\d+) sec")),
    }


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
        "ports": {
            "slurmctld": identity.slurmctld_port,
            "slurmd": identity.slurmd_port,
            "slurmdbd": identity.slurmdbd_port,
            "mariadb": identity.mariadb_port,
        },
    }
    if record is None:
        return shown
    states = nodes.read_states(identity) if is_up else {}
    shown["version"] = ".".join(f"{part:02d}" for part in record.version)
    shown["settings"] = asdict(record.settings)
    shown["exposed"] = str(record.exposed) if record.exposed else None
    shown["source_folder"] = str(identity.source_folder) if record.exposed else None
    shown["node_disk"] = str(identity.node_disk)
    shown["daemons"] = [_describe_daemon(record, name) for name in daemons.NAMES]
    shown["nodes"] = [
        _describe_node(identity, record, node, states.get(node, "unknown"))
        for node in node_names(record.settings.nodes)
    ]
    shown["partitions"] = _describe_partitions(identity) if is_up else []
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


def _describe_partitions(identity: Identity) -> list[dict[str, Any]]:
    shown = attempt(
        ["scontrol", "--oneliner", "show", "partition"],
        env=daemon_environment(identity.slurm_conf),
    )
    wanted = {
        "name": "PartitionName",
        "priority_tier": "PriorityTier",
        "preempt_mode": "PreemptMode",
        "grace_s": "GraceTime",
        "nodes": "Nodes",
    }
    rows = [dict(p.split("=", 1) for p in line.split()) for line in shown.stdout.splitlines()]
    return [{ours: row[theirs] for ours, theirs in wanted.items()} for row in rows if row]
