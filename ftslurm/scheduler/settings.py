"""A cluster's settings as Slurm tells them, undigested: for whoever judges them one by one."""

from __future__ import annotations

import dataclasses
import os
import pwd
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Callable, Optional

from ftslurm.errors import SchedulerError
from ftslurm.scheduler.protocol import Site
from ftslurm.scheduler.slurm import SHOW_PARTITIONS, Runner, checked, run_command
from ftslurm.scheduler.slurm_parse import at, parse_config, parse_partitions

ASK_S = 20.0

# Of the first line of `scontrol show config`; slurmctld fills it in as it answers (proc_req.c).
_SAID_AT = re.compile(r"data as of (\S+)")
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


@dataclass(frozen=True)
class Own:
    """What a job of a user gets that does not ask for it."""

    account: str = ""
    """Empty: not told."""
    qos: Mapping[str, str] = field(default_factory=dict)
    """Account -> its association's default, or the only one that it may use. Without what is not
    told: which of several without a default (22.05 to 26.05 gave `normal`), and by partition."""

    @property
    def default_qos(self) -> dict[str, str]:
        """`qos`, that of `account` under an empty name as well."""
        of_own = self.qos.get(self.account)
        return {**self.qos, **({"": of_own} if of_own else {})}


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


def read_own(cluster: str, user: str, *, run: Runner = run_command) -> Own:
    """Of jobs of `user`, by one question. Empty where accounting does not answer."""
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "user", user, "withassoc",
            f"cluster={cluster}",
            "format=DefaultAccount,Account,Partition,DefaultQOS,QOS"]  # fmt: skip
    try:
        told = checked(run, argv, ASK_S)
    except SchedulerError:
        return Own()
    rows = [line.split("|") for line in told.splitlines() if line.count("|") == 4]
    parted = {row[1] for row in rows if row[2]}
    found = {}
    for _, account, _, default_qos, allowed in rows:
        qos = default_qos or ("" if "," in allowed else allowed)
        if qos and account not in parted:
            found[account] = qos
    return Own(rows[0][0] if rows else "", found)


def read_ancestors(
    cluster: str, account: str, *, run: Runner = run_command
) -> Optional[tuple[str, ...]]:
    """Accounts above `account`, the nearest first; None when accounting does not tell."""
    argv = ["sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"cluster={cluster}", "user=",
            "format=Account,ParentName"]  # fmt: skip
    try:
        told = checked(run, argv, ASK_S)
    except SchedulerError:
        return None
    above = dict(line.split("|") for line in told.splitlines() if line.count("|") == 1)
    if account not in above:
        return None
    found: list[str] = []
    while above.get(account) and above[account] not in found:
        account = above[account]
        found.append(account)
    return tuple(found)


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
        default_qos=own_terms(config, run=run).default_qos,
    )


def own_terms(config: Mapping[str, str], *, run: Runner = run_command) -> Own:
    """read_own of whoever asks."""
    return read_own(config.get("ClusterName", ""), _user(), run=run)


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
    said_at = at(match[1]) if match else None
    if said_at is None:
        return None
    # Its seconds are cut off, and it was said between the question and the answer.
    return min(0.0, said_at + 1.0 - asked_at) + max(0.0, said_at - answered_at)


def _span_s(text: str) -> int:
    """Of sacctmgr's `1-00:02:00`."""
    match = _SPAN.fullmatch(text.strip())
    if match is None:
        return int(text) if text.strip().isdigit() else 0
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
