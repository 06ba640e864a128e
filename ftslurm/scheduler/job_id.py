"""Which job of Slurm's we are, told by the environment it has given us, and how to ask for it."""

from __future__ import annotations

from collections.abc import Mapping

from ftslurm.errors import SchedulerError


def own_job_id(environ: Mapping[str, str]) -> str:
    """`71`, and `70_1` for a task of an array: SLURM_JOB_ID of an array's last task is the id of
    the whole array, and naming the job by it would requeue every task. SchedulerError outside."""
    if "SLURM_ARRAY_JOB_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    if "SLURM_JOB_ID" not in environ:
        raise SchedulerError("SLURM_JOB_ID is not set; this runs inside a Slurm job only")
    return environ["SLURM_JOB_ID"]


def id_alone(job_id: str, environ: Mapping[str, str]) -> str:
    """The id by which slurmctld sends one record. Asked for `70_1` it sends the whole array, and a
    thousand tasks ask at once when they begin or are preempted; we know such a number of our own
    task only, and the array's last task has none."""
    own, array = environ.get("SLURM_JOB_ID"), environ.get("SLURM_ARRAY_JOB_ID")
    if own is None or array in (None, own) or job_id != own_job_id(environ):
        return job_id
    return own
