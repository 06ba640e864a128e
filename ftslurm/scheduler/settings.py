"""A cluster's settings as Slurm tells them, undigested: for whoever judges them one by one."""

from __future__ import annotations

import dataclasses
import os
import pwd
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Callable, Optional

from ftslurm.errors import SchedulerError
from ftslurm.scheduler.protocol import Site
from ftslurm.scheduler.slurm import SHOW_PARTITIONS, Runner, checked, run_command
from ftslurm.scheduler.slurm_parse import parse_config, parse_partitions

ASK_S = 20.0

# Of the first line of `scontrol show config`; slurmctld fills it in as it answers (proc_req.c).
_SAID_AT = re.compile(r"data as of (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
_SPAN = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")


@dataclass(frozen=True)
class Settings:
    config: dict[str, str]
    """Key -> value, `(null)` as an empty text."""
    partitions: dict[str, dict[str, str]]
    clock_off_s: Optional[float]
    """slurmctld's clock less this machine's, 0 within the second it is told in; None: not told."""


@dataclass(frozen=True)
class Qos:
    grace_s: int
    preempt_mode: str
    """`cluster`, or an empty text: that of the cluster."""
    preempts: tuple[str, ...]
    """Names of the QOS whose jobs make room for jobs of this one."""


def read_settings(*, run: Runner = run_command, clock: Callable[[], float] = time.time) -> Settings:
    """SchedulerError when Slurm does not answer."""
    asked_at = clock()
    told = checked(run, ["scontrol", "show", "config"], ASK_S)
    off_s = _clock_off_s(told, asked_at, clock())
    rows = parse_partitions(checked(run, SHOW_PARTITIONS, ASK_S))
    return Settings(parse_config(told), {row["PartitionName"]: row for row in rows}, off_s)


def read_qos(*, run: Runner = run_command) -> Optional[dict[str, Qos]]:
    """By name; None when accounting does not answer."""
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "qos",
            "format=Name,GraceTime,PreemptMode,Preempt"]  # fmt: skip
    try:
        told = checked(run, argv, ASK_S)
    except SchedulerError:
        return None
    found = {}
    for line in told.splitlines():
        name, grace, mode, preempts = [*line.split("|"), "", "", ""][:4]
        if name:
            names = tuple(filter(None, preempts.split(",")))
            found[name] = Qos(_span_s(grace), mode.strip(), names)
    return found


def read_default_qos(cluster: str, user: str, *, run: Runner = run_command) -> dict[str, str]:
    """Account -> the QOS that a job of `user` gets which names none: its association's default, or
    the only one that it may use; under an empty name that of the account which such a job gets.
    Without what is not told: which of several without a default (22.05 to 26.05 gave `normal`), and
    by partition."""
    of = ["sacctmgr", "--noheader", "--parsable2", "show"]
    columns = "format=Cluster,Account,User,Partition,DefaultQOS,QOS"
    try:
        told = checked(run, [*of, "assoc", f"user={user}", f"cluster={cluster}", columns], ASK_S)
        default = checked(run, [*of, "user", user, "format=User,DefaultAccount"], ASK_S)
    except SchedulerError:
        return {}
    rows = [line.split("|") for line in told.splitlines() if line.count("|") == 5]
    parted = {row[1] for row in rows if row[3]}
    found = {}
    for _, account, _, _, default_qos, allowed in rows:
        qos = default_qos or ("" if "," in allowed else allowed)
        if qos and account not in parted:
            found[account] = qos
    account = default.splitlines()[0].partition("|")[2] if default.strip() else ""
    return {**found, **({"": found[account]} if account in found else {})}


def mode_of_qos(known: Mapping[str, Qos], name: str, of_cluster: str) -> str:
    """How jobs of the QOS `name` make room with preempt/qos: by its own mode, else the cluster's;
    OFF where no QOS preempts it (preempt_qos.c). Pure."""
    own = known[name].preempt_mode
    words = [word for word in own.split(",") if word.lower() != "within"]
    among_themselves = "WITHIN" in f"{own},{of_cluster}".upper().split(",")
    if not among_themselves and not any(name in one.preempts for one in known.values()):
        return "OFF"
    return of_cluster if not words or words[0].lower() in ("", "cluster") else own


def with_qos(site: Site, config: Mapping[str, str], *, run: Runner = run_command) -> Site:
    """`site`, of preempt/qos, with what each QOS says, and which its user's jobs get."""
    of_cluster = config["PreemptMode"]
    known = read_qos(run=run)
    if known is None:
        said = (
            "PreemptType=preempt/qos, and `sacctmgr show qos` does not answer: the time for a "
            "save, and whether Slurm queues a preempted job again, are taken from the partition"
        )
        return dataclasses.replace(site, findings=[*site.findings, said])
    return dataclasses.replace(
        site,
        qos_grace_s={name: one.grace_s for name, one in known.items()},
        qos_preempt_mode={name: mode_of_qos(known, name, of_cluster) for name in known},
        default_qos=own_default_qos(config, run=run),
    )


def own_default_qos(config: Mapping[str, str], *, run: Runner = run_command) -> dict[str, str]:
    """read_default_qos of whoever asks."""
    return read_default_qos(config.get("ClusterName", ""), _user(), run=run)


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def read_gres(partition: str, *, run: Runner = run_command) -> Optional[dict[str, str]]:
    """Node -> its gres, e.g. `gpu:h100:8(S:0-1)`; None when Slurm does not answer."""
    argv = ["sinfo", "--noheader", "--Node", f"--partition={partition}", "--format=%N|%G"]
    try:
        told = checked(run, argv, ASK_S)
    except SchedulerError:
        return None
    rows = [line.strip().partition("|") for line in told.splitlines()]
    return {node: "" if gres == "(null)" else gres for node, _, gres in rows if node}


def _clock_off_s(told: str, asked_at: float, answered_at: float) -> Optional[float]:
    match = _SAID_AT.search(told)
    if match is None:
        return None
    there = time.strptime(match[1], "%Y-%m-%dT%H:%M:%S")
    # Local time without its offset: in the hour that comes twice a year, the nearer one is meant.
    offs = []
    for is_summer in (0, 1):
        said_at = time.mktime((*there[:8], is_summer))
        if time.localtime(said_at)[:6] != there[:6]:
            continue
        # Its seconds are cut off, and it was said between the question and the answer.
        offs.append(min(0.0, said_at + 1.0 - asked_at) + max(0.0, said_at - answered_at))
    return min(offs, key=abs, default=None)


def _span_s(text: str) -> int:
    """Of sacctmgr's `1-00:02:00`."""
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        return int(text) if text.strip().isdigit() else 0
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
