"""The configuration files of a cluster as text: values in, text out; nothing here touches disk
but the reading of templates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from string import Template

from errors import ClusterError
from identity import CONTROLLER_HOST, Identity, node_names

TEMPLATES = Path(__file__).resolve().parent / "templates"

# SlurmctldParameters=preempt_send_user_signal until 22.05; the word moved to PreemptParameters in
# 23.02. The wrong place is accepted and ignored, so the version decides.
USER_SIGNAL_MOVED = (23, 2)


@dataclass(frozen=True)
class Settings:
    """What a person may choose about a cluster."""

    nodes: int = 4
    send_user_signal: bool = False
    """Preemption sends the job's own `--signal` first, in place of TERM."""
    grace_s: int = 15
    kill_wait_s: int = 5


def parse_version(text: str) -> tuple[int, int]:
    """`slurm-wlm 22.05.8` or `slurm 22.05.7-Vendor.1` -> (22, 5)."""
    match = re.search(r"\b(\d+)\.(\d+)\.", text)
    if match is None:
        raise ClusterError(f"cannot read a Slurm version from `{text.strip()}`")
    return int(match.group(1)), int(match.group(2))


def user_signal_line(version: tuple[int, int]) -> str:
    """The slurm.conf line that makes preemption send a job's own signal."""
    if version < USER_SIGNAL_MOVED:
        return "SlurmctldParameters=preempt_send_user_signal"
    return "PreemptParameters=send_user_signal"


def render_slurm_conf(identity: Identity, settings: Settings, version: tuple[int, int]) -> str:
    return _render(
        "slurm.conf",
        cluster_name=identity.cluster_name,
        controller_host=CONTROLLER_HOST,
        controller_address=identity.controller_address,
        slurmctld_port=identity.slurmctld_port,
        slurmd_port=identity.slurmd_port,
        slurmdbd_port=identity.slurmdbd_port,
        folder=identity.folder,
        nodes=settings.nodes,
        kill_wait_s=settings.kill_wait_s,
        grace_s=settings.grace_s,
        user_signal_line=user_signal_line(version) if settings.send_user_signal else "",
        node_list=_node_list(settings.nodes),
        address_list=",".join(identity.node_address(n) for n in node_names(settings.nodes)),
    )


def render_slurmdbd_conf(identity: Identity, *, database_password: str) -> str:
    return _render(
        "slurmdbd.conf",
        controller_host=CONTROLLER_HOST,
        controller_address=identity.controller_address,
        slurmdbd_port=identity.slurmdbd_port,
        mariadb_port=identity.mariadb_port,
        folder=identity.folder,
        database_password=database_password,
    )


def render_gres_conf(identity: Identity, settings: Settings) -> str:
    return _render("gres.conf", node_list=_node_list(settings.nodes), folder=identity.folder)


def render_mariadb_cnf(identity: Identity) -> str:
    return _render("mariadb.cnf", folder=identity.folder, mariadb_port=identity.mariadb_port)


def render_database_sql(*, database_password: str) -> str:
    return _render("database.sql", database_password=database_password)


def render_hosts(identity: Identity, settings: Settings) -> str:
    names = node_names(settings.nodes)
    return _render(
        "hosts",
        controller_host=CONTROLLER_HOST,
        controller_address=identity.controller_address,
        node_hosts="\n".join(f"{identity.node_address(n)} {n}" for n in names),
    )


def _node_list(num_nodes: int) -> str:
    return f"n[1-{num_nodes}]" if num_nodes > 1 else "n1"


def _render(name: str, **values: object) -> str:
    return Template((TEMPLATES / name).read_text(encoding="utf-8")).substitute(values)
