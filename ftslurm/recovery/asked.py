"""Why an attempt was asked to leave: preempted, near its time limit, or by somebody's signal.

A requeue of our own makes accounting say REQUEUED whatever came before it, so this is asked while
the scheduler still has it. Whatever cannot be told is None: an operator's requeue and a lost node
end a job by the same signals, and a drained node sends none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

from ftslurm.diagnosis.causes import PREEMPTED, TIME_LIMIT
from ftslurm.errors import FormatError, SchedulerError
from ftslurm.files import read_records
from ftslurm.recovery.case import Evidence
from ftslurm.recovery.own_job import OwnJob
from ftslurm.run import deadline
from ftslurm.run.attempts import STOPPED, read_events
from ftslurm.scheduler import read_end_time

SIGNAL = "signal"
"""Of a job that goes on running: somebody sent it (`scancel --signal`)."""

EARLIEST_WARNING_S = 70
"""How much before the asked lead Slurm may send the warn signal (8 s seen, up to 60 s by
sbatch(1)), and some seconds for a start that would be in vain."""


def was_asked(evidence: Evidence) -> bool:
    """To leave, by a signal; an order and an eviction say by themselves who asked."""
    outcome = evidence.outcome
    if outcome is not None:
        stopped = outcome.result == STOPPED and outcome.order is None
        return stopped and not (evidence.evicted and not evidence.term)
    return evidence.term or evidence.ranks_signalled


def why_asked(job: OwnJob, environ: Mapping[str, str], evidence: Evidence) -> Optional[str]:
    """Two questions to the scheduler at most: none while it does not answer, nor where the agents'
    leader has asked it when the signal came (agent/deadline.py)."""
    outcome = evidence.outcome
    if outcome is not None and outcome.signal == "SIGALRM":
        return TIME_LIMIT  # by rank 0's own clock (train/stop.py)
    told, newest = _told_at_the_signals(job, evidence.number)
    knows = deadline.PREEMPTED in told or newest == deadline.TIME_LIMIT
    preempted = deadline.PREEMPTED in told if knows else _is_preempted(job)
    if preempted:
        return PREEMPTED
    if deadline.TIME_LIMIT in told:
        stop_at = told[deadline.TIME_LIMIT] - job.record.spec.cluster.signal_lead_s
    else:
        stop_at = _warned_at(job, environ, is_ending=preempted is None or evidence.term)
    if stop_at and _asked_at(job, evidence) >= stop_at - EARLIEST_WARNING_S:
        return TIME_LIMIT
    if preempted is None or evidence.term:
        return None
    return SIGNAL


def _told_at_the_signals(job: OwnJob, number: int) -> tuple[dict[str, float], Optional[str]]:
    """(By what the job was to end -> when, as Slurm had it then; by what it was at the newest
    signal). A job that is being torn down does not say why, and None: nobody could say."""
    try:
        events = read_records(job.layout.attempt(number).agents_jsonl)
        told = [event for event in events if event["kind"] == "deadline"]
    except (OSError, FormatError):
        return {}, None
    ends = (deadline.PREEMPTED, deadline.TIME_LIMIT)
    known = {event["by"]: float(event["end_at"]) for event in told if event.get("by") in ends}
    return known, told[-1].get("by") if told else None


def _is_preempted(job: OwnJob) -> Optional[bool]:
    try:
        return job.scheduler.is_preempted(job.job_id) if job.scheduler.controller_alive() else None
    except SchedulerError:
        return None


def _warned_at(job: OwnJob, environ: Mapping[str, str], *, is_ending: bool) -> float:
    """When the warning of the time limit was due; 0: there is no limit that is known. As it is now:
    root may have moved it since the attempt began. Of a job that is being ended Slurm names that
    end instead, so that what it said at the beginning has to do."""
    end_at = None if is_ending else read_end_time(job.scheduler, environ)
    if end_at is not None:
        return end_at - job.record.spec.cluster.signal_lead_s
    return float(environ.get("FTSLURM_STOP_AT") or 0)


def _asked_at(job: OwnJob, evidence: Evidence) -> float:
    """When the ranks agreed on it, or now."""
    events = read_events(job.layout.attempt(evidence.number))
    noted = [float(event["at"]) for event in events if event["kind"] in ("signal", "asked")]
    return noted[-1] if noted else job.now()
