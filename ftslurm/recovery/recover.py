"""`ftslurm recover RUN --attempt N --rc RC [--term]`: what follows an attempt.

Called by the batch script. Prints one word, `done`, `restart`, `requeued`, `paused`, `ended` or
`stop`, and on stderr why. The decision is durable in the attempt's decision.json before it is acted
on, unless the disk refuses: then it is acted on all the same. `requeued` is printed only once the
scheduler has taken the run's next job: on Slurm 22.05 a script that leaves before is final.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Callable, Optional

from ftslurm.errors import EXIT_OK, RANK_STOPPED, FtslurmError, SchedulerError, warn
from ftslurm.files import best_effort, write_json
from ftslurm.recovery.actions import DONE, ENDED, REQUEUED, RESTART, STOP
from ftslurm.recovery.ask_agents import tell_ended
from ftslurm.recovery.asked import EARLIEST_WARNING_S, was_asked, why_asked
from ftslurm.recovery.budgets import identity
from ftslurm.recovery.case import Decision, Evidence
from ftslurm.recovery.evidence import (
    ranks_were_started,
    read_evidence,
    read_history,
    with_finding,
)
from ftslurm.recovery.own_job import OwnJob, has_given_way, submit_from_job
from ftslurm.recovery.policy import (
    CAUSE_ASKED,
    CAUSE_FAILED,
    CAUSE_NEVER_RETRY,
    CAUSE_NOT_STARTED,
    decide,
    obey,
)
from ftslurm.run.attempts import Outcome, append_event, read_attempt, read_progress
from ftslurm.run.control import control_files
from ftslurm.run.layout import RunLayout
from ftslurm.run.planned import in_force
from ftslurm.run.record import read_record
from ftslurm.run.spec import ClusterSpec
from ftslurm.run.sweep_layout import parse_task_id
from ftslurm.run.trust import require_own
from ftslurm.scheduler import open_scheduler, read_end_time
from ftslurm.scheduler.protocol import CLOCKS_S, Scheduler

_REFUSAL = "Job is pending execution"
"""srun's words for a step of a job that waits (ESLURM_JOB_PENDING, 22.05 to 26.05)."""


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
    outlive_requeue()
    layout = RunLayout(options.run)
    require_own(layout)
    scheduler = open_scheduler(read_record(layout).scheduler, run_dir=layout.root)
    try:
        decision = recover(
            layout, scheduler, os.environ, attempt=options.attempt, rc=options.rc, term=options.term
        )
    except FtslurmError:
        # Nothing was decided: a successor would find the same, and the one after it.
        from ftslurm.recovery.successor import cancel_successors  # late: few attempts end so

        with contextlib.suppress(SchedulerError):
            cancel_successors(OwnJob.of(layout, read_record(layout), scheduler, os.environ))
        raise
    print(f"ftslurm: attempt {options.attempt}: {decision.reason}", file=sys.stderr)  # noqa: T201
    print(decision.action, flush=True)  # noqa: T201
    if decision.action in (DONE, ENDED, STOP) and parse_task_id(layout.root.name) is not None:
        _hand_on(layout)
    return EXIT_OK


def _hand_on(task: RunLayout) -> None:
    try:
        from ftslurm.sweep.hand_on import hand_on  # late: few runs are tasks of a sweep

        hand_on(task)
    except (ImportError, OSError) as error:
        # The file system may be away. A code of ours would have the batch script decide once more.
        warn(f"nothing is handed on to other tasks: {error}")


def outlive_requeue() -> None:
    """The end of grace and our own requeue TERM the shell's children too; what we start inherits
    this, so that scontrol does not die of the requeue that it has just placed."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def recover(
    layout: RunLayout,
    scheduler: Scheduler,
    environ: Mapping[str, str],
    *,
    attempt: int,
    rc: int,
    term: bool,
    submit: Callable[[Sequence[str]], str] = submit_from_job,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Decision:
    """Decide, write it down, act, wait; the decision as it stands at the end."""
    record = read_record(layout)
    own_job = OwnJob.of(layout, record, scheduler, environ)
    own_job = dataclasses.replace(own_job, submit=submit, now=now, sleep=sleep)
    if has_given_way(own_job):
        # By another's decision, which is on record; and what ends the job now is no person's word.
        return Decision(REQUEUED, CAUSE_ASKED, "the job has given way to the run's next one")
    with best_effort("not in the journal"):
        append_event(layout.attempt(attempt), "ranks_ended", now=now, rc=rc, term=term)
    tell_ended(own_job, attempt, rc=rc, in_grace=term or rc == RANK_STOPPED)
    evidence, decision = _decide(own_job, environ, attempt, rc=rc, term=term)

    def put_on_record(decided: Decision) -> Decision:
        told = _with_way_back(layout, decided)
        _write_decision(layout, evidence, told, now=now)
        return told

    decision = put_on_record(decision)
    if decision.cause == CAUSE_NOT_STARTED:
        while _is_away(scheduler):
            sleep(2.0)
        if not _start_is_forgotten(own_job, attempt):
            return decision
        evidence = dataclasses.replace(evidence, controller_away=False, start_forgotten=True)
        decision = put_on_record(decide([], evidence, record.spec.recovery))
    from ftslurm.recovery.next_job import act  # late: what is decided is on record the sooner

    decision = act(own_job, environ, evidence, decision, put_on_record)
    if term and was_asked(evidence):
        evidence = dataclasses.replace(evidence, asked_by=why_asked(own_job, environ, evidence))
        with best_effort("why the job was asked to end is not on record"):
            _write_record(layout, evidence, decision, now=now)
    _tell_people(own_job, environ, evidence, decision)
    if decision.action == RESTART and decision.wait_s > 0:
        decision = _wait(own_job, environ, evidence, decision, put_on_record)
    # Only now: of a batch node that dies before, the run's next job finds the order and obeys it.
    if decision.action not in (RESTART, REQUEUED):
        with best_effort("the order is not taken away"):
            control_files(layout, record).take_away_leaving()
    return decision


def _decide(
    job: OwnJob, environ: Mapping[str, str], attempt: int, *, rc: int, term: bool
) -> tuple[Evidence, Decision]:
    """What is dear to ask for is asked only where it could change the decision: Slurm may take its
    time to answer, and grace may be running."""
    layout, spec, scheduler = job.layout, job.record.spec, job.scheduler
    rules = spec.recovery
    if scheduler.name == "local":  # one machine: there is no other to go to
        rules = dataclasses.replace(rules, max_node_faults=0, evict="report")
    settled = _settled_program(layout, attempt, rc=rc, now=job.now) if spec.program else None
    evidence = dataclasses.replace(
        read_evidence(layout, job.record, attempt, rc=rc, term=term, settled=settled, now=job.now),
        limit_passed=_limit_has_passed(environ, spec.cluster, job.now()),
    )
    if rc != 0 and not term and not ranks_were_started(layout.attempt(attempt)):
        is_away = _is_away(scheduler)
        evidence = dataclasses.replace(
            evidence,
            controller_away=is_away,
            start_forgotten=not is_away and _start_is_forgotten(job, attempt),
        )
    history = read_history(layout, job.record, attempt)
    decision = decide(history, evidence, rules)
    failed = decision.cause in (CAUSE_FAILED, CAUSE_NEVER_RETRY)
    if (failed or (evidence.evicted and spec.health.probe == "always")) and not term:
        from ftslurm.diagnosis.find import DEADLINE_S, IN_GRACE_S, find  # late: failures only

        in_grace = failed and evidence.ranks_signalled  # an eviction signals them as well
        finding, why_none = find(
            layout,
            attempt,
            scheduler=None if in_grace else scheduler,
            rc=rc,
            deadline_s=IN_GRACE_S if in_grace else DEADLINE_S,
        )
        told = with_finding(evidence, finding, why_none)
        evidence = told if failed else dataclasses.replace(evidence, sick=told.sick)
        decision = decide(history, evidence, rules)
    if decision.action == RESTART and _limit_is_near(scheduler, environ, spec.cluster, job.now()):
        evidence = dataclasses.replace(evidence, limit_is_near=True)
        decision = decide(history, evidence, rules)
    # At the end of grace, or of the limit, the next job goes before.
    if was_asked(evidence) and not term:
        evidence = dataclasses.replace(evidence, asked_by=why_asked(job, environ, evidence))
        decision = decide(history, evidence, rules)
    return evidence, decision


def _wait(
    job: OwnJob,
    environ: Mapping[str, str],
    evidence: Evidence,
    decision: Decision,
    amend: Callable[[Decision], Decision],
) -> Decision:
    """Before the restart. The end of the job may come nearer meanwhile: by a signal, or without any
    in a preemption whose first signal goes to ranks alone; or an operator ends the wait."""
    from ftslurm.recovery.backoff import wait  # late: most attempts are not waited for

    files = control_files(job.layout, job.record)
    told = wait(
        decision.wait_s, sleep=job.sleep, called_off=lambda: files.read_leaving() is not None
    )
    order = files.read_leaving()
    if told or _limit_is_near(job.scheduler, environ, job.record.spec.cluster, job.now()):
        said = "told to end" if told else "about to end"
        reason = f"{decision.reason}; while it waited, the job was {said}"
        decision = dataclasses.replace(decision, action=REQUEUED, reason=reason)
    if order is not None:
        decision = obey(decision, order)
    if decision.action == RESTART:
        return decision
    from ftslurm.recovery.next_job import act  # late, as above

    return act(job, environ, evidence, amend(decision), amend)


def _tell_people(
    job: OwnJob, environ: Mapping[str, str], evidence: Evidence, decision: Decision
) -> None:
    rules, attempt = job.record.spec.recovery, evidence.number
    if not (rules.on_event or rules.on_event_url):
        return
    from ftslurm.recovery.on_event import events_of, tell, uncommitted_s  # late: few runs tell

    progress = None
    with contextlib.suppress(OSError, FtslurmError):
        progress = read_progress(job.layout.attempt(attempt))
    kinds = events_of(
        decision,
        in_force(job.record.spec.checkpoint, progress),
        uncommitted_s=uncommitted_s(job.layout, attempt, now_s=job.now()),
        uncommitted_steps=(evidence.step or 0) - (evidence.committed_step or 0),
    )
    facts = {
        "action": decision.action,
        "cause": decision.cause,
        "reason": decision.reason,
        "failures_in_a_row": decision.failures_in_a_row,
        "excluded": list(decision.exclude),
    }
    tell(job.layout, job.record, attempt, kinds, facts, environ=environ, now=job.now)


def _is_away(scheduler: Scheduler) -> bool:
    """False also where nobody can say: then no start may wait for it."""
    try:
        return not scheduler.controller_alive()
    except SchedulerError:
        return False


def _start_is_forgotten(job: OwnJob, attempt: int) -> bool:
    """Whether slurmctld takes our job for one that waits, or took it for one when our srun asked:
    it may have tried to start it again since, and mostly fails in that (`Duplicate jobid`)."""
    if job.scheduler.job_state(job.job_id).is_waiting:
        return True
    from ftslurm.diagnosis.launcher_lines import launcher_lines  # late: most ranks are started

    _, lines = launcher_lines(job.layout, attempt, read_attempt(job.layout, attempt))
    return any(_REFUSAL in text for _, text, _ in lines)


def _with_way_back(layout: RunLayout, decision: Decision) -> Decision:
    """A stop also says how the same run goes on: with its code and configuration as frozen."""
    if decision.action != STOP:
        return decision
    way = f"`ftslurm resume {shlex.quote(str(layout.root))}` lets this run go on"
    return dataclasses.replace(decision, reason=f"{decision.reason}; {way}")


def _limit_is_near(
    scheduler: Scheduler, environ: Mapping[str, str], cluster: ClusterSpec, now_s: float
) -> bool:
    end_at = read_end_time(scheduler, environ)
    return end_at is not None and end_at - now_s <= cluster.signal_lead_s + EARLIEST_WARNING_S


def _settled_program(
    layout: RunLayout, attempt: int, *, rc: int, now: Callable[[], float]
) -> Optional[Outcome]:
    from ftslurm.program.ending import settle  # late: other runs need nothing of it

    return settle(layout, attempt, rc=rc, now=now)


def _limit_has_passed(
    environ: Mapping[str, str], cluster: ClusterSpec, now_s: float
) -> Optional[bool]:
    """By what the claim was told: of a job that is being ended Slurm names that end."""
    stop_at = float(environ.get("FTSLURM_STOP_AT") or 0)
    return now_s >= stop_at + cluster.signal_lead_s - CLOCKS_S if stop_at else None


def _write_record(
    layout: RunLayout, evidence: Evidence, decision: Decision, *, now: Callable[[], float]
) -> None:
    failure = evidence.first_failure
    signature, step = identity(evidence)
    record = {
        "schema_version": 1,
        **dataclasses.asdict(decision),
        "rc": evidence.rc,
        "term": evidence.term,
        "limit_passed": evidence.limit_passed,
        "asked_by": evidence.asked_by,
        "committed_step": evidence.committed_step,
        "committed_digest": evidence.committed_digest,
        "signature": signature,
        "step": step,
        "program_fault": evidence.finding.program_fault if evidence.finding else "",
        "first_failure": dataclasses.asdict(failure) if failure else None,
        "decided_at": now(),
    }
    write_json(layout.attempt(evidence.number).decision_json, record)


def _write_decision(
    layout: RunLayout, evidence: Evidence, decision: Decision, *, now: Callable[[], float]
) -> None:
    with best_effort("not in the journal"):
        _write_record(layout, evidence, decision, now=now)
        append_event(
            layout.attempt(evidence.number),
            "decided",
            now=now,
            action=decision.action,
            cause=decision.cause,
            reason=decision.reason,
        )
