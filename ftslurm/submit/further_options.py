"""cluster.sbatch and cluster.srun: options that no key stands for, refused by name where one does.

Pure. An option that would make ranks unequal, take the batch loop's step away from it or name what
a key names is refused with the reason. getopt_long takes any beginning of a name that fits one
option only, so a beginning of a refused name is refused too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Optional

from ftslurm.errors import SpecError

_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(?:=(.*))?", re.DOTALL)

_HET = "heterogeneous jobs are not supported: every node of a run is like the others"
_UNEQUAL = "every node runs the same number of ranks: cluster.nodes x cluster.tasks_per_node"
_LOG = "the logs are in the run directory"
_ONE_JOB = "a run is one job: submit several runs, or an array of them with submitit's executor"
_CONTAINER = "the batch loop stays outside of containers: use cluster.container"
_NOT_ITS_OWN = "the batch script and its ranks start in the run's frozen code"


def _key(name: str) -> str:
    return f"use cluster.{name}"


# What both commands take, name -> why not, and what to do.
_BOTH = {
    "account": _key("account"),
    "comment": _key("comment"),
    "constraint": _key("constraint"),
    "cpu-bind": _key("cpu_bind"),
    "cpus-per-task": _key("cpus_per_task"),
    "exclude": _key("exclude"),
    "export": _key("export"),
    "gpu-bind": _key("gpu_bind"),
    "gpus": _key("gpus_per_node"),
    "gpus-per-node": _key("gpus_per_node"),
    "gpus-per-task": _key("gpus_per_task"),
    "gpus-per-socket": _key("gpus_per_node"),
    "cpus-per-gpu": _key("cpus_per_task"),
    "job-name": _key("job_name"),
    "licenses": _key("licenses"),
    "mail-type": _key("mail_type"),
    "mail-user": _key("mail_user"),
    "mem": _key("mem"),
    "nodes": _key("nodes"),
    "partition": _key("partition"),
    "qos": _key("qos"),
    "reservation": _key("reservation"),
    "signal": _key("signal and cluster.signal_lead_s"),
    "switches": _key("switches"),
    "time": _key("time"),
    "time-min": _key("time"),
    "ntasks": _UNEQUAL,
    "ntasks-per-node": _key("tasks_per_node"),
    "ntasks-per-core": _UNEQUAL,
    "ntasks-per-gpu": _UNEQUAL,
    "ntasks-per-socket": _UNEQUAL,
    "tasks-per-node": _key("tasks_per_node"),
    "nodefile": _UNEQUAL,
    "use-min-nodes": _UNEQUAL,
    "het-group": _HET,
    "pack-group": _HET,
    "hetjob": _HET,
    "packjob": _HET,
    "no-kill": "a job that outlives a lost node hangs, or idles without its batch script",
    "chdir": _NOT_ITS_OWN,
    "container": _CONTAINER,
    "container-id": _CONTAINER,
    "output": _LOG,
    "error": _LOG,
    "input": "ranks read nothing from a terminal or a file",
    "quiet": "what sbatch and srun say is read, or kept in the log",
    "help": "it asks for a text",
    "usage": "it asks for a text",
    "version": "it asks for a text",
}

_SBATCH = {
    **_BOTH,
    "array": _ONE_JOB,
    "clusters": "ftslurm asks Slurm of this cluster only: submit on the other one",
    "export-file": _key("env"),
    "no-requeue": "use recovery.continue_by",
    "requeue": "use recovery.continue_by",
    "open-mode": _LOG,
    "parsable": "it is given already",
    "test-only": "use `ftslurm submit --dry-run`",
    "wait": "use `ftslurm submit --wait`",
    "wrap": "the batch script is ftslurm's own",
    "ignore-pbs": "the batch script is ftslurm's own",
}

_SRUN = {
    **_BOTH,
    "container-image": _key("container_image"),
    "container-mounts": _key("mounts"),
    "container-workdir": _NOT_ITS_OWN,
    "jobid": "ranks run in the job of their batch script",
    "kill-on-bad-exit": "it is on: the peers of a dead rank would hang in their collective",
    "label": _LOG,
    "mpi": _key("mpi"),
    "multi-prog": "all ranks run the same program",
    "nodelist": "ranks run on the job's first nodes: rank 0 has to be where the batch script is",
    "pty": "ranks read nothing from a terminal or a file",
    "relative": "ranks run on the job's first nodes: rank 0 has to be where the batch script is",
    "unbuffered": "ranks are unbuffered already",
    "wait": _key("wait_s"),
}

# Whole names that begin a refused one.
_TAKEN_AS_WRITTEN = {"gres", "exclusive", "nodelist"}


def check_sbatch(options: Sequence[str]) -> None:
    """SpecError for an entry of cluster.sbatch that is none, or that a key stands for."""
    _check("cluster.sbatch", "sbatch", options, _SBATCH)


def check_srun(options: Sequence[str]) -> None:
    _check("cluster.srun", "srun", options, _SRUN)


def _check(key: str, command: str, options: Sequence[str], refused: Mapping[str, str]) -> None:
    for option in options:
        if option.strip() in (":", "hetjob", "packjob"):
            raise SpecError(f"{key} has `{option}`; {_HET}")
        match = _OPTION.fullmatch(option)
        if match is None:
            raise SpecError(
                f"{key} has `{_shown(option)}`; give each option of {command} as an entry of its "
                "own, with two dashes and `=`, e.g. `--gres=gpu:h100:8`"
            )
        reason = _reason(match[1], match[2], refused)
        if reason is not None:
            raise SpecError(f"{key} has `--{match[1]}`, which is not for here: {reason}")


def _reason(name: str, value: Optional[str], refused: Mapping[str, str]) -> Optional[str]:
    if name in refused:
        return refused[name]
    if "distribution".startswith(name):
        # Logs and records tell a rank's node by its number.
        is_block = (value or "").partition(":")[0] in ("block", "*")
        return None if is_block else "ranks fill one node after the other (`block`)"
    if name in _TAKEN_AS_WRITTEN:
        return None
    longer = next((other for other in refused if other.startswith(name)), None)
    return None if longer is None else f"it may be read as `--{longer}`: write it out"


def _shown(text: str) -> str:
    shown = ascii(text)[1:-1]
    return shown if len(shown) <= 60 else shown[:60] + "..."
