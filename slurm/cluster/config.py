"""The configuration files of a cluster as text: values in, text out; nothing here touches disk
but the reading of templates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from string import Template

from errors import ClusterError
from identity import CONTROLLER_HOST, Identity, node_names

SCHEDULER_PARAMETERS = (
    "batch_sched_delay=0",
    "sched_min_interval=0",
    "sched_interval=2",
    "bf_interval=2",
)
TEMPLATES = Path(__file__).resolve().parent / "templates"

# SlurmctldParameters=preempt_send_user_signal until 22.05; the word moved to PreemptParameters in
# 23.02. The wrong place is accepted and ignored, so the version decides.
USER_SIGNAL_MOVED = (23, 2)

# SlurmctldParameters=enable_expedited_requeue and SchedulerParameters=requeue_delay.
EXPEDITED_REQUEUE_SINCE = (25, 11)
REQUEUE_DELAY_S = 120
"""What Slurm waits by itself: AuthInfo=cred_expire, which is left as it is."""
HEALTH_CHECK_INTERVAL_S = 5
"""Sites have minutes; nobody waits for that here."""


@dataclass(frozen=True)
class Settings:
    """What a person may choose about a cluster."""

    nodes: int = 4
    send_user_signal: bool = False
    """Preemption sends the job's own `--signal` first, in place of TERM."""
    grace_s: int = 60
    """Who has left does not wait for its end; a busy machine may need long to leave."""
    kill_wait_s: int = 5
    slurmd_timeout_s: int = 20
    """After how long a silent node is down. 15 takes healthy neighbours down with the lost node
    (seen on 24.11); sites have 300 and more."""
    job_requeue: bool = True
    """A job that says nothing may be queued again; off: only one that says --requeue."""
    strip_requeue: bool = False
    """The site takes --requeue away from every job that is submitted."""
    scontrol: bool = True
    """Nodes have the command; the login side always has it."""
    expedited_requeue: bool = False
    """Jobs may ask for --requeue=expedite."""
    requeue_delay_s: int = REQUEUE_DELAY_S
    prolog: str = ""
    """A program of root's on every node as soon as a job has it; empty: none."""
    epilog: str = ""
    health_check: str = ""
    """A program that every slurmd starts each HEALTH_CHECK_INTERVAL_S."""
    nohold_on_prolog_fail: bool = False
    """A job whose prolog failed is queued again, not queued and held."""
    shared_fs: str = "none"
    """none | bindfs: how nodes see FOLDER/home, see shared_fs.py. As long as the cluster is up."""
    memory_cgroup: bool = False
    """Jobs ask for memory, and the kernel kills what takes more. As long as the cluster is up."""


def parse_version(text: str) -> tuple[int, int]:
    """`slurm-wlm 22.05.8` or `slurm 22.05.7-Vendor.1` -> (22, 5)."""
    match = re.search(r"\b(\d+)\.(\d+)\.", text)
    if match is None:
        raise ClusterError(f"cannot read a Slurm version from `{text.strip()}`")
    return int(match.group(1)), int(match.group(2))


def format_version(version: tuple[int, int]) -> str:
    """(22, 5) -> `22.05`."""
    return ".".join(f"{part:02d}" for part in version)


def check_settings(settings: Settings, version: tuple[int, int]) -> None:
    """Raise where this version of Slurm would ignore what is asked for."""
    default = settings.requeue_delay_s == REQUEUE_DELAY_S and not settings.expedited_requeue
    if version < EXPEDITED_REQUEUE_SINCE and not default:
        raise ClusterError(
            f"Slurm {format_version(version)} has no expedited requeue and no requeue delay of "
            f"its own, {format_version(EXPEDITED_REQUEUE_SINCE)} and later have; choose another "
            "--slurm-version, or leave both settings out"
        )


def user_signal_parameter(version: tuple[int, int]) -> tuple[str, str]:
    """Key and word in slurm.conf that make preemption send a job's own signal."""
    if version < USER_SIGNAL_MOVED:
        return "SlurmctldParameters", "preempt_send_user_signal"
    return "PreemptParameters", "send_user_signal"


def parameters(settings: Settings, version: tuple[int, int]) -> dict[str, list[str]]:
    """slurm.conf keys that hold a list of words, with those that the settings put there."""
    words: dict[str, list[str]] = {"SchedulerParameters": list(SCHEDULER_PARAMETERS)}
    if settings.send_user_signal:
        key, word = user_signal_parameter(version)
        words.setdefault(key, []).append(word)
    if settings.expedited_requeue:
        words.setdefault("SlurmctldParameters", []).append("enable_expedited_requeue")
    if settings.requeue_delay_s != REQUEUE_DELAY_S:
        words["SchedulerParameters"].append(f"requeue_delay={settings.requeue_delay_s}")
    if settings.nohold_on_prolog_fail:
        words["SchedulerParameters"].append("nohold_on_prolog_fail")
    if settings.strip_requeue:
        words["JobSubmitPlugins"] = ["lua"]
    return words


def programs(settings: Settings) -> dict[str, str]:
    """slurm.conf keys of the programs that slurmd runs as root, and what belongs to them."""
    lines: dict[str, str] = {}
    if settings.prolog:
        # On all nodes of a job before anything of it runs, not with the first step there.
        lines.update(Prolog=settings.prolog, PrologFlags="Alloc")
    if settings.epilog:
        lines["Epilog"] = settings.epilog
    if settings.health_check:
        lines["HealthCheckProgram"] = settings.health_check
        lines["HealthCheckInterval"] = str(HEALTH_CHECK_INTERVAL_S)
        lines["HealthCheckNodeState"] = "ANY"
    return lines


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
        slurmd_timeout_s=settings.slurmd_timeout_s,
        grace_s=settings.grace_s,
        job_requeue=int(settings.job_requeue),
        task_plugin="task/cgroup" if settings.memory_cgroup else "task/none",
        consumable="CR_Core_Memory" if settings.memory_cgroup else "CR_Core",
        parameters="\n".join(
            f"{key}={','.join(words)}" for key, words in parameters(settings, version).items()
        ),
        programs="\n".join(f"{key}={value}" for key, value in programs(settings).items()),
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


def render_hosts(identity: Identity, settings: Settings, *, login_host: str) -> str:
    """slurmctld and the nodes reach a client of this machine by its name: the bridge is its too."""
    names = node_names(settings.nodes)
    return _render(
        "hosts",
        controller_host=CONTROLLER_HOST,
        controller_address=identity.controller_address,
        login_host=login_host,
        node_hosts="\n".join(f"{identity.node_address(n)} {n}" for n in names),
    )


def read_template(name: str) -> str:
    """A file that is the same in every cluster."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _node_list(num_nodes: int) -> str:
    return f"n[1-{num_nodes}]" if num_nodes > 1 else "n1"


def _render(name: str, **values: object) -> str:
    return Template(read_template(name)).substitute(values)
