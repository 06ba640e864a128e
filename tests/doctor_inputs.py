"""Recorded configurations of Slurm 22.05, 24.11 and 26.05, some of their lines changed."""

import time
from pathlib import Path

from ftslurm.doctor.command import slurm_lines
from ftslurm.scheduler.slurm import Completed

DATA = Path(__file__).parent / "data"
VERSIONS = ("22.05", "24.11", "26.05")
WELL_SET = {
    "KillWait": "30 sec", "UnkillableStepTimeout": "180 sec", "SlurmdTimeout": "300 sec",
    "ProctrackType": "proctrack/cgroup", "Prolog": "/opt/ftslurm/site/prolog.sh",
    "Epilog": "/opt/ftslurm/site/epilog.sh", "PrologFlags": "Alloc",
    "HealthCheckProgram": "/opt/ftslurm/site/healthcheck.sh", "HealthCheckInterval": "300 sec",
    "HealthCheckNodeState": "ANY,CYCLE", "PrologEpilogTimeout": "300",
    "SchedulerParameters": "bf_interval=30,nohold_on_prolog_fail",
}  # fmt: skip


GRES = "n1|gpu:h100:2(S:0-1)\nn2|gpu:h100:2(S:0,1)\nn3|(null)\n"


class Slurm:
    """Prints a recorded configuration, with some of its lines changed; `preempt` and `grace` are
    the partition's, `accounts` what `sacctmgr show qos` prints (None: it fails), `default_qos` that
    of the user's own account, `gres` what sinfo prints; `state`, `total`, `most`, `groups`: of each
    partition its state, its nodes, those that one job may have, and whom it is for; `lists`: its
    Allow and Deny lists of accounts and QOS; `user`, `tree`: what sacctmgr prints of its accounts
    and QOS, and of all accounts (empty: it fails)."""

    def __init__(
        self, version, *, grace="120", preempt="REQUEUE", accounts=None, gres=GRES, shared="NO",
        said_at="", default_qos="", state="UP", total="4", most="UNLIMITED", groups="ALL",
        lists="", user=None, tree="", **changed,
    ):  # fmt: skip
        lines = (DATA / f"slurm-{version}" / "config.txt").read_text().splitlines()
        settings = {**WELL_SET, **changed}
        numbered = {"Prolog", "Epilog"} if version != "22.05" else set()
        kept = [line for line in lines if line.partition("=")[0].strip() not in settings]
        for key, value in settings.items():
            values = value if isinstance(value, list) else [value]
            for number, one in enumerate(values):
                kept.append(f"{f'{key}[{number}]' if key in numbered else key:24}= {one}")
        if said_at:
            kept[0] = f"Configuration data as of {said_at}"
        self.config = "\n".join(kept)
        self.gres, self.accounts, self.asked = gres, accounts, []
        self.default_qos, self.user, self.tree = default_qos, user, tree
        partitions = (DATA / f"slurm-{version}" / "partitions.txt").read_text()
        self.partitions = (
            partitions.replace("GraceTime=15", f"GraceTime={grace}")
            .replace("PreemptMode=REQUEUE", f"PreemptMode={preempt}")
            .replace("OverSubscribe=NO", f"OverSubscribe={shared}")
            .replace("State=UP", f"State={state}")
            .replace("TotalNodes=4", f"TotalNodes={total}")
            .replace("MaxNodes=UNLIMITED", f"MaxNodes={most}")
            .replace("AllowGroups=ALL", f"AllowGroups={groups}")
        )
        for word in lists.split():  # a DenyX takes the place of AllowX
            kind = word.partition("=")[0].removeprefix("Allow").removeprefix("Deny")
            self.partitions = self.partitions.replace(f"Allow{kind}=ALL", word)

    def __call__(self, argv, timeout_s):
        assert timeout_s <= 30
        self.asked.append(argv[0])
        if argv[0] == "sacctmgr" and "assoc" in argv:
            return Completed(0 if self.tree else 1, self.tree, "")
        if argv[0] == "sacctmgr" and "user" in argv:
            rows = f"own|other||long|long\nown|own||{self.default_qos}|normal,low\n"
            return Completed(0, rows if self.user is None else self.user, "")
        if argv[0] in ("sinfo", "sacctmgr"):
            told = self.gres if argv[0] == "sinfo" else self.accounts
            return Completed(1, "", "x: error: no") if told is None else Completed(0, told, "")
        return Completed(0, self.config if "config" in argv else self.partitions, "")


def slurm(
    version="22.05", partition="low", qos="", nodes=1, account="", off_s=0.0, uid=None, **changed
):
    """The recorded slurmctld, whose clock is `off_s` ahead of this machine's."""
    run = Slurm(version, **changed)
    first = (DATA / f"slurm-{version}" / "config.txt").read_text().partition("\n")[0]
    then = time.mktime(time.strptime(first.rpartition(" ")[2], "%Y-%m-%dT%H:%M:%S"))
    return slurm_lines(
        partition, qos, nodes, account, uid=uid, run=run, clock=lambda: then + 0.5 - off_s
    )


def lines_of(version="22.05", **changed):
    return {one.name: one for one in slurm(version, **changed)}
