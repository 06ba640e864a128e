"""What the environment of a prolog, an epilog or a job step says of its job.

Slurm's own values only, and nothing of them is trusted to have a form: what has none is left out.
What an epilog is told of exit codes and restarts is wrong for a job that was requeued (seen with
22.05, 24.11 and 26.05), so it is not here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Optional

from ftslurm.health.signals import Gpu
from ftslurm.health.verdict import Verdict

_NUMBER = re.compile(r"\d{1,20}\Z")
_WORD = re.compile(r"[\w.@-]{1,120}\Z", re.ASCII)
_GPUS = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?\Z")
_MOST_GPUS = 256


@dataclass(frozen=True)
class JobFacts:
    """`job_id` is empty where there is no job, as in HealthCheckProgram."""

    job_id: str = ""
    user: str = ""
    uid: Optional[int] = None
    gpus: tuple[int, ...] = ()
    """As the node numbers them; empty where the job asked for none, or where it is not said."""
    node: str = ""
    partition: str = ""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> JobFacts:
        uid = _matching(_NUMBER, environ.get("SLURM_JOB_UID", ""))
        return cls(
            job_id=_matching(_NUMBER, environ.get("SLURM_JOB_ID", "")),
            user=_matching(_WORD, environ.get("SLURM_JOB_USER", "")),
            uid=int(uid) if uid else None,
            gpus=_indices(environ.get("SLURM_JOB_GPUS", "")),
            node=_matching(_WORD, environ.get("SLURMD_NODENAME", "")) or os.uname().nodename,
            partition=_matching(_WORD, environ.get("SLURM_JOB_PARTITION", "")),
        )


def _matching(form: re.Pattern[str], text: str) -> str:
    return text if form.match(text) else ""


def _indices(text: str) -> tuple[int, ...]:
    """Of `0,2,4-7`; none at all where a part is something else, such as the name of a MIG slice."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        match = _GPUS.match(part)
        if match is None:
            return ()
        first = int(match.group(1))
        last = int(match.group(2) or first)
        found.update(range(first, min(last, first + _MOST_GPUS) + 1))
    return tuple(sorted(found))


def of_job(verdicts: Sequence[Verdict], job: JobFacts, gpus: Sequence[Gpu]) -> Iterator[Verdict]:
    """As they are for the job's run: what a program has done to a GPU of another job is not its own
    fault. `gpus`: those that NVML shows, in a job's cgroup the job's own only."""
    is_shared = len(gpus) > len(job.gpus) > 0
    own = {gpu.bus for gpu in gpus if not is_shared or gpu.index in job.gpus}
    for verdict in verdicts:
        is_of_other = bool(own) and verdict.gpu is not None and verdict.gpu.bus not in own
        yield replace(verdict, hands_to_run=False) if is_of_other else verdict
