"""sbatch, run here and nowhere else: for a first job, for a successor, for a resumed run.

An answer is one of three: a job id; RefusedError, there is certainly no job; or UnclearError, there
may be one. Which job, and whether, is the caller's to decide.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Optional

from ftslurm.errors import RunError, SchedulerError
from ftslurm.run.layout import RunLayout
from ftslurm.scheduler.hostlist import expand

SBATCH_TIMEOUT_S = 150.0
"""Above the 20 s for which sbatch blocks while slurmctld is away (26.05, seen), and the 15 pauses
of 1 to 15 s after which it gives up when there are MaxJobCount jobs (sbatch.c)."""

# A user's SBATCH_* beat the script's lines, SLURM_* of an outer job bind CPUs and count tasks.
_FOREIGN = ("SBATCH_", "SLURM_", "SRUN_", "PMIX_", "SUBMITIT_")

# Set by Slurm for the GPUs of one job (gres.c); the next job has GPUs of its own, or none.
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
            "ZE_AFFINITY_MASK")  # fmt: skip
# Exported by the batch script (train.sbatch.j2): of this job and attempt, whoever of it asks.
_SCRIPTS = ("FTSLURM_RUN_DIR", "FTSLURM_TASKS_PER_NODE", "FTSLURM_JOB_ID", "FTSLURM_ATTEMPT",
            "FTSLURM_STOP_AT", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip

# What Slurm says when the answer to a request that went out is lost (slurm_errno.c): the controller
# may have taken the job. `connect failure` is not among them: nothing went out.
_LOST_ANSWER = re.compile(
    r"timed out|zero bytes|(send|receive|recv|shutdown) failure|unexpected message|insane message|"
    r"connection reset|broken pipe",
    re.IGNORECASE,
)

_NOT_REACHED = re.compile(r"connect failure|connection refused", re.IGNORECASE)

# `AssocMaxSubmitJobLimit`, `QOSMaxSubmitJobPerUserLimit` come at once, for the whole array where
# only a part of it is too much; the others when MaxJobCount is reached (22.05, seen).
_TOO_MANY = re.compile(r"Submit\w*Limit", re.IGNORECASE)
_FULL = re.compile(r"temporarily un(able to accept job|available)|job queue full", re.IGNORECASE)

_EXCLUDE = "--exclude="


class RefusedError(SchedulerError):
    """There is certainly no job."""


class NotReachedError(RefusedError):
    """There is no job because slurmctld was not reached: the same command may work later."""


class LimitError(RefusedError):
    """There is no job because there are as many as Slurm lets be queued: fewer may be taken, and
    the same later."""


class FullError(LimitError):
    """MaxJobCount is reached, whoever's jobs these are: sbatch has waited two minutes to say so."""


class UnclearError(SchedulerError):
    """There may be a job: its id is not known."""


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for sbatch, and so for the job: nothing that would steer either."""
    return {
        name: value
        for name, value in environ.items()
        if name == "SLURM_CONF" or not name.startswith(_FOREIGN)
    }


def environment_of_job(pid: int) -> dict[str, str]:
    """What the process `pid` of this job was started with, for the run's next job: the batch shell,
    as the first job had it, or what the shell has started, less what it exports itself."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        pairs = [os.fsdecode(word).partition("=") for word in words if b"=" in word]
        found = {name: value for name, _, value in pairs}
    except OSError:
        found = dict(os.environ)
    return {name: value for name, value in found.items() if name not in _DEVICES + _SCRIPTS}


def submit(arguments: Sequence[str], *, environ: Optional[Mapping[str, str]] = None) -> str:
    """Run `sbatch ARGUMENTS`, `--parsable` and the script among them; the job's id."""
    argv = ["sbatch", *arguments]
    try:
        done = subprocess.run(
            argv,
            env=scrubbed(os.environ if environ is None else environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SBATCH_TIMEOUT_S,
            check=False,
        )
    except (FileNotFoundError, PermissionError):
        raise RefusedError(
            "`sbatch` is not on PATH; submit where Slurm is, or choose cluster=local"
        ) from None
    except subprocess.TimeoutExpired:
        raise _unclear(f"gave no answer for {SBATCH_TIMEOUT_S:g} s", arguments) from None
    said = " ".join(done.stderr.split()) or "it printed nothing"
    if done.returncode < 0:
        raise _unclear(f"was ended by signal {-done.returncode} ({said})", arguments)
    if done.returncode and _LOST_ANSWER.search(said):
        raise _unclear(f"lost its connection ({said})", arguments)
    if done.returncode:
        raise _kind(said)(f"sbatch refused the job (code {done.returncode}): {said}")
    return parse_job_id(done.stdout)


def _kind(said: str) -> type[RefusedError]:
    if _NOT_REACHED.search(said):
        return NotReachedError
    if _FULL.search(said):
        return FullError
    return LimitError if _TOO_MANY.search(said) else RefusedError


def parse_job_id(output: str) -> str:
    """Job id from `sbatch --parsable`: `ID` or `ID;CLUSTER`, last, below what a site may print."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    job_id = lines[-1].split(";")[0] if lines else ""
    if not re.fullmatch(r"\d+", job_id):
        raise UnclearError(
            f"sbatch ended well but printed no job id (`{output.strip()[-200:]}`); look for "
            "the job with squeue before you submit again"
        )
    return job_id


def frozen_arguments(layout: RunLayout) -> list[str]:
    """Arguments of the sbatch command that was frozen with the run, to be used once more."""
    command = layout.sbatch_command
    try:
        return shlex.split(command.read_text())[1:]
    except FileNotFoundError:
        raise RunError(
            f"`{command}` is not there, so how this run was submitted is not known; submit again"
        ) from None


def with_excluded(arguments: Sequence[str], nodes: Sequence[str]) -> list[str]:
    """sbatch's arguments with these nodes among the excluded."""
    if not nodes:
        return list(arguments)
    given = [word[len(_EXCLUDE) :] for word in arguments if word.startswith(_EXCLUDE)]
    names = {name for text in given for name in expand(text)} | set(nodes)
    others = [word for word in arguments if not word.startswith(_EXCLUDE)]
    return [_EXCLUDE + ",".join(sorted(names)), *others]


def _unclear(what: str, arguments: Sequence[str]) -> UnclearError:
    """The job may well be there: the run directory has to stay."""
    names = [word.partition("=")[2] for word in arguments if word.startswith("--job-name=")]
    name = shlex.quote(f"--name={names[-1]}") if names else ""
    return UnclearError(
        f"sbatch {what}, so it is unclear whether there is a job; look with `squeue --me {name}` "
        f"before you submit again, `{arguments[-1]}` is kept"
    )
