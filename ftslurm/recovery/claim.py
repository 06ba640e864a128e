"""`ftslurm claim RUN`: take the next attempt's number, for the batch script.

Prints `go ATTEMPT MASTER_ADDR MASTER_PORT STOP_AT`, or `done` when the run has finished. The steps
that are committed by now are recorded as adopted: one that an older attempt publishes later is
fenced.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Callable, Optional

from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.errors import EXIT_OK, RunError
from ftslurm.run.attempts import AdoptedStep, Attempt, append_event, claim, numbers, read_attempt
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import read_record
from ftslurm.run.spec import ClusterSpec
from ftslurm.scheduler import open_scheduler, read_end_time
from ftslurm.scheduler.protocol import Scheduler

# Below the ports that Linux gives to outgoing connections (ip_local_port_range: 32768 to 60999).
FIRST_PORT = 20_000
NUM_PORTS = 12_000


def main(argv: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ftslurm claim",
        description="Take the next attempt's number (called by the batch script).",
        epilog="example: read -r word attempt addr port stop_at < <(ftslurm claim RUN)",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    options = parser.parse_args(argv)
    print(claim_attempt(RunLayout(options.run), os.environ))  # noqa: T201
    return EXIT_OK


def claim_attempt(layout: RunLayout, environ: Mapping[str, str]) -> str:
    """Claim, and say the one line for the batch script."""
    if layout.done.exists():
        return "done"
    record = read_record(layout)
    scheduler = open_scheduler(record.scheduler, run_dir=layout.root)
    job_id = scheduler.own_job_id(environ)
    nodes = scheduler.nodes(environ)
    attempt = claim(
        layout,
        Attempt(
            number=0,  # given by the claim
            job_id=job_id,
            restart_count=int(environ.get("SLURM_RESTART_COUNT") or 0),
            nodes=nodes,
            claimed_at=time.time(),
            adopted=adoptable(layout),
        ),
    )
    port = choose_port(f"{job_id} {attempt.number}")
    append_event(
        layout.attempt(attempt.number),
        "claimed",
        job_id=job_id,
        restart_count=attempt.restart_count,
        nodes=nodes,
        port=port,
        adopted=[item.step for item in attempt.adopted],
    )
    stop_at = _stop_at(record.spec.cluster, scheduler, environ)
    return f"go {attempt.number} {scheduler.master_address(nodes)} {port} {stop_at}"


def _stop_at(cluster: ClusterSpec, scheduler: Scheduler, environ: Mapping[str, str]) -> int:
    """UTC seconds at which the warn signal is due; 0 when the end of the job is not known.

    Slurm sends it once, to the job steps that run then: between two attempts it reaches nobody.
    """
    end_at = read_end_time(scheduler, environ)
    return 0 if end_at is None else int(end_at - cluster.signal_lead_s)


def adoptable(layout: RunLayout) -> list[AdoptedStep]:
    """The committed steps that belong to the run's history by now, newest first.

    Not among them: what an attempt older than the newest one published after that was claimed. Its
    rank 0 may have died before it put such a step aside.
    """
    store = CheckpointStore(layout)
    steps = [AdoptedStep(item.step, item.committed_digest) for item in store.published()]
    # A claim that was killed half way leaves a folder without attempt.json, and no ranks.
    claimed = [n for n in numbers(layout) if layout.attempt(n).attempt_json.exists()]
    if not claimed:
        return steps
    newest = read_attempt(layout, claimed[-1])
    strays = {stray.step for stray in store.fence(newest.number, newest.adopted)}
    return [step for step in steps if step.step not in strays]


def is_free_here(port: int) -> bool:
    """Bindable on this machine now; the batch script runs on the node that hosts rank 0."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def choose_port(key: str, *, is_free: Callable[[int], bool] = is_free_here) -> int:
    """A free port, another one for every key: an older attempt's ranks may still hold theirs."""
    start = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    for offset in range(NUM_PORTS):
        port = FIRST_PORT + (start + offset) % NUM_PORTS
        if is_free(port):
            return port
    raise RunError(
        f"no port from {FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1} is free on this node; rank 0 "
        "needs one: look for processes left over there"
    )
