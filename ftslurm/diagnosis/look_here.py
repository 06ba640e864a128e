"""`python -m ftslurm.diagnosis.look_here RUN N`: this node looks at its own health, for attempt N.

Runs as the run's user on each of the attempt's nodes (ask_nodes.py) and needs no installation of
root's. Leaves attempts/N/evidence/health/NODE.json, with the GPUs whose memory has not come back;
changes nothing on the node and asks no Slurm.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from ftslurm.diagnosis.gpu_memory import DEADLINE_S, look_argv, parse
from ftslurm.diagnosis.kernel_clock import slack_s
from ftslurm.errors import EXIT_OK, FormatError
from ftslurm.files import read_json, write_json
from ftslurm.health.child import run_command
from ftslurm.health.job import JobFacts
from ftslurm.health.probe import PROBE, look_at
from ftslurm.health.report import report_of, report_record
from ftslurm.health.signals import DRIVER_HANG
from ftslurm.run.attempts import numbers, read_attempt
from ftslurm.run.layout import RunLayout
from ftslurm.run.rank import node_name
from ftslurm.run.record import read_record
from ftslurm.run.spec import RunSpec
from ftslurm.run.trust import require_own

_LOOKED_BACK = 3
"""Attempts: what those before them have heard is older than this one, whatever the clock."""


def main(argv: list[str]) -> int:
    layout, number = RunLayout(Path(argv[0])), int(argv[1])
    require_own(layout)
    look_here(layout, number, os.environ)
    return EXIT_OK


def look_here(layout: RunLayout, number: int, environ: Mapping[str, str]) -> None:
    node = node_name(environ)
    spec = read_record(layout).spec
    settings = spec.health
    heard_at = heard_before(layout, number, node)
    up_s = time.clock_gettime(time.CLOCK_MONOTONIC)
    since = since_when(layout, number, heard_at, up_s=up_s)
    probe = look_at(PROBE, settings, JobFacts.from_environ(environ), None, since=since)
    signals, path = probe.reading.signals, layout.attempt(number).looks / f"{node}.json"
    record: dict[str, Any] = {
        **report_record(report_of(probe, node=node)),
        "held": {},
        "kernel_at": max((one.at for one in signals if one.at), default=heard_at),
    }
    # First, as this step may be cut off while memory is waited for.
    write_json(path, record)
    hangs = any(one.kind == DRIVER_HANG for one in signals)
    held = {} if hangs else held_here(spec, environ)
    if held:
        write_json(path, {**record, "held": held})


def held_here(spec: RunSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """GPUs of this job, which this step has in its sight, whose memory has not come back."""
    job_id, library = environ.get("SLURM_JOB_ID", ""), spec.health.nvml_library
    argv = look_argv(job_id, spec.cluster.gpus_per_node, library)
    if argv:
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            return dict(parse(run_command(argv, deadline_s=DEADLINE_S).stdout).held)
    return {}


def since_when(layout: RunLayout, number: int, heard_at: Optional[float], *, up_s: float) -> float:
    """From when on a line of the kernel log is this attempt's: from its claim on, with what the
    log's clock may be off; but none twice that the attempt before has heard."""
    since = read_attempt(layout, number).claimed_at - slack_s(up_s)
    return since if heard_at is None else max(since, heard_at + 1e-3)


def heard_before(layout: RunLayout, number: int, node: str) -> Optional[float]:
    """Time of the newest line that an earlier look of this node for this run has heard. One look
    hands it on to the next, so that few are read: every node does it, of a shared file system."""
    for past in reversed([one for one in numbers(layout) if one < number][-_LOOKED_BACK:]):
        with contextlib.suppress(OSError, FormatError, KeyError):
            heard_at = read_json(layout.attempt(past).looks / f"{node}.json")["kernel_at"]
            return None if heard_at is None else float(heard_at)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
