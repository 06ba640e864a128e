"""How a job is about to end, as slurmctld has it at this moment: one squeue.

Asked when a stop signal has come, which itself says neither why nor how much time is left. Parsing
is apart from asking, so that recorded outputs of any version can test it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

from ftslurm.errors import SchedulerError
from ftslurm.scheduler.job_id import id_alone, own_job_id
from ftslurm.scheduler.protocol import JobState
from ftslurm.scheduler.slurm import Runner, run_command
from ftslurm.scheduler.slurm_parse import at

TIMEOUT_S = 10.0
"""Less than the 18 s for which squeue blocks while slurmctld is away; most grace times are over by
then."""

FIELDS = ("State", "EndTime", "PreemptTime")
"""None holds a space. PreemptTime is set and EndTime moves when the grace begins, by GraceTime
apart; of a job that is being torn down EndTime says nothing (22.05 to 26.05, seen)."""
_WIDTH = 32


@dataclass(frozen=True)
class JobEnd:
    """UTC seconds by slurmctld's clock."""

    end_at: Optional[float]
    """None: no limit. Of no use where `is_ending`."""
    preempted_at: Optional[float]
    """When the grace began; None: the job is not to make room."""
    is_ending: bool
    """Its processes have got their last TERM, and KILL follows."""


def read_job_end(
    environ: Mapping[str, str], *, run: Runner = run_command, timeout_s: float = TIMEOUT_S
) -> Optional[JobEnd]:
    """Of the job whose environment this is. None: nobody can say just now."""
    form = ",".join(f"{name}:{_WIDTH}" for name in FIELDS)
    job_id = id_alone(own_job_id(environ), environ)
    argv = ["squeue", "--noheader", "--states=all", f"--jobs={job_id}", f"--Format={form}"]
    try:
        done = run(argv, timeout_s)
    except SchedulerError:
        return None
    return parse_job_end(done.stdout) if done.rc == 0 else None


def parse_job_end(text: str) -> Optional[JobEnd]:
    """The first line's; None when it is none of ours."""
    words = text.partition("\n")[0].split()
    if len(words) != len(FIELDS):
        return None
    state = JobState(words[0])
    return JobEnd(at(words[1]), at(words[2]), state.is_ending or state.is_ended)
