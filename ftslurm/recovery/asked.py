"""Why an attempt was asked to leave: preempted, near its time limit, or by somebody's signal.

A requeue of our own makes accounting say REQUEUED whatever came before it, so this is asked while
the scheduler still has it. Whatever cannot be told is None: an operator's requeue and a lost node
end a job by the same signals, and a drained node sends none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

from ftslurm.diagnosis.causes import PREEMPTED, TIME_LIMIT
from ftslurm.errors import SchedulerError
from ftslurm.recovery.case import Evidence
from ftslurm.recovery.own_job import OwnJob
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
    """Two questions to the scheduler at most, and none while it does not answer."""
    outcome = evidence.outcome
    if outcome is not None and outcome.signal == "SIGALRM":
        return TIME_LIMIT  # by rank 0's own clock (train/stop.py)
    preempted: Optional[bool] = None
    try:
        if job.scheduler.controller_alive():
            preempted = job.scheduler.is_preempted(job.job_id)
    except SchedulerError:
        pass
    if preempted:
        return PREEMPTED
    stop_at = _warned_at(job, environ, is_ending=preempted is None or evidence.term)
    if stop_at and _asked_at(job, evidence) >= stop_at - EARLIEST_WARNING_S:
        return TIME_LIMIT
    if preempted is None or evidence.term:
        return None
    return SIGNAL


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
