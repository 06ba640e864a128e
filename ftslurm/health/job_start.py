"""What a node was like when a job began: kept from its prolog to its epilog, of this boot only.

Counters count by their change since then. A file a job, so that what many jobs on one node begin
and end with does not meet; its name has the boot, the job and its user's number, so that those of
other jobs need not be read.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import NamedTuple, Optional

from ftslurm.errors import FormatError
from ftslurm.health.job import JobFacts
from ftslurm.health.signals import Reading, parse_reading, reading_record
from ftslurm.health.state_dir import StateDir

SCHEMA_VERSION = 1

_PREFIX = "baseline-"
_MOST = 256
"""More jobs at once have no node; these have had no epilog."""


@dataclass(frozen=True)
class JobStart:
    """`reading` has the job and its user. It may be of before `at`, where the prolog's own look
    could not read all."""

    at: float
    reading: Reading


class JobHere(NamedTuple):
    job_id: str
    uid: Optional[int]
    name: str


def write_start(state: StateDir, job: JobFacts, start: JobStart) -> None:
    """And remove those of earlier boots, and of jobs of long ago, that had no epilog."""
    prefix = _prefix(start.reading.boot_id)
    uid = "" if job.uid is None else job.uid
    record = {
        "schema_version": SCHEMA_VERSION,
        "at": start.at,
        "reading": reading_record(start.reading),
    }
    state.write_json(f"{prefix}{job.job_id}-{uid}.json", record)
    names = [name for name in state.names() if name.startswith(_PREFIX)]
    here = [name for name in names if name.startswith(prefix)][:_MOST]
    for name in set(names) - set(here):
        state.remove(name)


def jobs_here(state: StateDir, boot_id: str) -> list[JobHere]:
    """That are on the node, the latest first."""
    form = re.compile(rf"{_prefix(boot_id)}(\d+)-(\d*)\.json\Z")
    matches = [match for match in map(form.match, state.names()) if match]
    return [
        JobHere(match.group(1), int(match.group(2)) if match.group(2) else None, match.group())
        for match in matches
    ]


def read_start(state: StateDir, job: JobHere) -> Optional[JobStart]:
    """None where its epilog was faster; FormatError for what is none."""
    record = state.read_json(job.name)
    if record is None:
        return None
    with contextlib.suppress(KeyError, TypeError):
        if isinstance(record["at"], (int, float)):
            return JobStart(record["at"], parse_reading(record["reading"]))
    raise FormatError(f"`{state.path / job.name}` is no beginning of a job")


def _prefix(boot_id: str) -> str:
    tag = re.sub(r"[^0-9A-Za-z]", "", boot_id)[:12]
    return f"{_PREFIX}{tag}-"
