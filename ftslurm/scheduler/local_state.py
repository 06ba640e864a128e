"""What the local scheduler knows of its job, in small files under RUN/submit, for any process.

local.json is written by the process that runs the batch script, local-ranks.json by the one that
runs the ranks; requests are left by whoever asks. A record outlives its process and is then told by
the process's start time.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ftslurm.files import read_json, write_json
from ftslurm.run.layout import RunLayout
from ftslurm.scheduler.process import ProcessName

REQUEUE = "requeue"
CANCEL = "cancel"
HOLD = "hold"


@dataclass(frozen=True)
class LocalJob:
    """local.json"""

    job_id: str
    word: str
    """As Slurm says it: PENDING RUNNING COMPLETING COMPLETED FAILED TIMEOUT CANCELLED."""
    restart_count: int
    runner_pid: int
    runner_started: int
    reason: str = ""
    """Why it waits (BeginTime), or what it will be once it has ended (while COMPLETING)."""
    started_at: Optional[float] = None
    ends_at: Optional[float] = None
    """When the time limit ends it, or, in a final state, when it ended."""
    rc: Optional[int] = None

    @property
    def runner(self) -> ProcessName:
        return ProcessName(self.runner_pid, self.runner_started)


def write_job(layout: RunLayout, job: LocalJob) -> None:
    record = {"schema_version": 1, **dataclasses.asdict(job)}
    write_json(layout.submit / "local.json", record, durable=False)


def read_job(layout: RunLayout) -> Optional[LocalJob]:
    try:
        record = read_json(layout.submit / "local.json")
    except FileNotFoundError:
        return None
    names = {item.name for item in dataclasses.fields(LocalJob)}
    return LocalJob(**{key: value for key, value in record.items() if key in names})


def write_ranks(layout: RunLayout) -> None:
    """Say that this process passes signals on to the ranks; its handlers have to be in place."""
    name = ProcessName.of(os.getpid())
    assert name is not None
    record = {"schema_version": 1, "pid": name.pid, "started": name.started}
    write_json(layout.submit / "local-ranks.json", record, durable=False)


def signal_ranks(layout: RunLayout, number: int) -> bool:
    """False when no ranks run."""
    try:
        record = read_json(layout.submit / "local-ranks.json")
    except FileNotFoundError:
        return False
    return ProcessName(record["pid"], record["started"]).send(number)


def write_request(layout: RunLayout, kind: str, job: LocalJob) -> None:
    """Ask for REQUEUE, CANCEL or HOLD of this very start of the job; asking again changes
    nothing."""
    record = {"schema_version": 1, "job_id": job.job_id, "restart_count": job.restart_count}
    write_json(_request(layout, kind), record, durable=False)


def is_requested(layout: RunLayout, kind: str, job: LocalJob) -> bool:
    try:
        record = read_json(_request(layout, kind))
    except FileNotFoundError:
        return False
    if record["job_id"] != job.job_id:
        return False
    # A cancel holds for good, a hold until it is taken back, a requeue for the start that asked.
    return kind != REQUEUE or bool(record["restart_count"] == job.restart_count)


def take_back(layout: RunLayout, kind: str) -> None:
    _request(layout, kind).unlink(missing_ok=True)


def _request(layout: RunLayout, kind: str) -> Path:
    return layout.submit / f"local-{kind}.json"
