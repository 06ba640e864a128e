"""`ftslurm recover RUN --attempt N --rc RC [--term]`: what follows an attempt.

Called by the batch script. Prints one word, `done`, `restart`, `requeued` or `stop`, and on stderr
why. The decision is durable in the attempt's decision.json before it is acted on, unless the disk
refuses: then it is acted on all the same. `requeued` is
printed only once the scheduler has accepted: on Slurm 22.05 a script that leaves before is final.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Callable, Optional

from ftslurm.errors import EXIT_OK, SchedulerError
from ftslurm.files import write_json
from ftslurm.recovery.evidence import ranks_were_started, read_evidence, read_history
from ftslurm.recovery.policy import (
    CAUSE_NOT_STARTED,
    REQUEUED,
    RESTART,
    STOP,
    Decision,
    Evidence,
    decide,
)
from ftslurm.run.attempts import append_event
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import read_record
from ftslurm.run.spec import ClusterSpec
from ftslurm.scheduler import open_scheduler, read_end_time
from ftslurm.scheduler.protocol import Scheduler

EARLIEST_WARNING_S = 70
"""How much before the asked lead Slurm may send the warn signal (8 s seen, up to 60 s by
sbatch(1)), and some seconds for a start that would be in vain."""


def main(argv: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ftslurm recover",
        description="Decide and start what follows an attempt (called by the batch script).",
        epilog='example: ftslurm recover "$FTSLURM_RUN_DIR" --attempt 3 --rc 137',
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--attempt", type=int, required=True, metavar="N")
    parser.add_argument("--rc", type=int, required=True, help="exit code of the launcher")
    parser.add_argument("--term", action="store_true", help="the batch shell got TERM")
    options = parser.parse_args(argv)
    # The end of grace and our own requeue TERM the shell's children too; what we start inherits
    # this, so that scontrol does not die of the requeue that it has just placed.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    layout = RunLayout(options.run)
    scheduler = open_scheduler(read_record(layout).scheduler, run_dir=layout.root)
    decision = recover(
        layout, scheduler, os.environ, attempt=options.attempt, rc=options.rc, term=options.term
    )
    print(f"ftslurm: attempt {options.attempt}: {decision.reason}", file=sys.stderr)  # noqa: T201
    print(decision.action)  # noqa: T201
    return EXIT_OK


def recover(
    layout: RunLayout,
    scheduler: Scheduler,
    environ: Mapping[str, str],
    *,
    attempt: int,
    rc: int,
    term: bool,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Decision:
    """Decide, write it down, act; the decision as it stands at the end."""
    paths = layout.attempt(attempt)
    with _best_effort():
        append_event(paths, "ranks_ended", now=now, rc=rc, term=term)
    evidence = read_evidence(layout, attempt, rc=rc, term=term)
    if rc != 0 and not term and not ranks_were_started(paths):
        away = not scheduler.controller_alive()
        evidence = dataclasses.replace(evidence, controller_away=away)
    spec = read_record(layout).spec
    history, max_failures = read_history(layout, attempt), spec.recovery.max_failures
    decision = decide(history, evidence, max_failures=max_failures)
    # Asked only where it matters: Slurm may take its time to answer, and grace may be running.
    if decision.action == RESTART and _limit_is_near(scheduler, environ, spec.cluster, now()):
        evidence = dataclasses.replace(evidence, limit_is_near=True)
        decision = decide(history, evidence, max_failures=max_failures)
    decision = _with_way_back(layout, decision)
    _write_decision(layout, evidence, decision, now=now)
    if decision.action == REQUEUED:
        decision = _requeue(layout, scheduler, environ, evidence, decision, now=now)
    elif decision.cause == CAUSE_NOT_STARTED:
        while not scheduler.controller_alive():
            sleep(2.0)
    return decision


def _requeue(
    layout: RunLayout,
    scheduler: Scheduler,
    environ: Mapping[str, str],
    evidence: Evidence,
    decision: Decision,
    *,
    now: Callable[[], float],
) -> Decision:
    """Place the requeue, for as long as it takes; refused for good or in vain it becomes a stop."""
    job_id = scheduler.own_job_id(environ)
    with _best_effort():
        append_event(layout.attempt(evidence.number), "requeue_asked", now=now, job_id=job_id)
    try:
        restart_count = int(environ.get("SLURM_RESTART_COUNT") or 0)
        if scheduler.requeue(job_id, restart_count=restart_count):
            return decision
        why = "the job ends for good (somebody cancelled it, or its time limit has passed)"
    except SchedulerError as error:
        why = str(error)
    refused = dataclasses.replace(
        decision,
        action=STOP,
        reason=f"{decision.reason}, but it is not queued again: {why}",
    )
    refused = _with_way_back(layout, refused)
    _write_decision(layout, evidence, refused, now=now)
    return refused


def _with_way_back(layout: RunLayout, decision: Decision) -> Decision:
    """A stop also says how the same run goes on: with its code and configuration as frozen."""
    command = layout.sbatch_command
    if decision.action != STOP or not command.exists():
        return decision
    way = f"`bash {shlex.quote(str(command))}` lets this run go on from its newest committed step"
    return dataclasses.replace(decision, reason=f"{decision.reason}; {way}")


def _limit_is_near(
    scheduler: Scheduler, environ: Mapping[str, str], cluster: ClusterSpec, now_s: float
) -> bool:
    end_at = read_end_time(scheduler, environ)
    return end_at is not None and end_at - now_s <= cluster.signal_lead_s + EARLIEST_WARNING_S


@contextlib.contextmanager
def _best_effort() -> Iterator[None]:
    """A journal that cannot be written (disk full, I/O error) must not cost the run its requeue."""
    try:
        yield
    except OSError as error:
        print(f"ftslurm: warning: not in the journal: {error}", file=sys.stderr)  # noqa: T201


def _write_decision(
    layout: RunLayout, evidence: Evidence, decision: Decision, *, now: Callable[[], float]
) -> None:
    failure = evidence.first_failure
    record = {
        "schema_version": 1,
        **dataclasses.asdict(decision),
        "rc": evidence.rc,
        "term": evidence.term,
        "committed_step": evidence.committed_step,
        "first_failure": dataclasses.asdict(failure) if failure else None,
        "decided_at": now(),
    }
    paths = layout.attempt(evidence.number)
    with _best_effort():
        write_json(paths.decision_json, record)
        append_event(
            paths,
            "decided",
            now=now,
            action=decision.action,
            cause=decision.cause,
            reason=decision.reason,
        )
