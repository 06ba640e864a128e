"""What was decided is done: the run's next job is queued, held or cancelled.

Nothing here decides whether the run goes on; but where the scheduler refuses, the decision changes,
and says so. A way that fails is followed by the next one: requeue, then a successor, then staying
to be killed where Slurm itself queues a killed job again. Never leaves politely in a preemption
without a next job: on Slurm 22.05 that is final, and later versions count it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Callable, Optional

from ftslurm import faults
from ftslurm.diagnosis.causes import NODE
from ftslurm.errors import SchedulerError, warn
from ftslurm.files import best_effort, is_listed
from ftslurm.recovery.actions import DONE, ENDED, PAUSED, REQUEUED, RESTART, STOP
from ftslurm.recovery.ask_agents import look
from ftslurm.recovery.case import Decision, Evidence
from ftslurm.recovery.keep_out import (
    keep_out_of_waiting,
    kill_wait_s,
    known_exclusions,
    placement,
    remember,
    settle_exclusions,
)
from ftslurm.recovery.node_kinds import known_kinds
from ftslurm.recovery.own_job import GAVE_WAY, OwnJob
from ftslurm.recovery.policy import CAUSE_FORGOTTEN
from ftslurm.recovery.successor import cancel_successors, ensure_successor, queue_beside
from ftslurm.run.attempts import STOPPED, append_event, claimed_numbers
from ftslurm.run.jobs import BY_BATCH, read_jobs
from ftslurm.run.record import REQUEUE
from ftslurm.scheduler.protocol import Site
from ftslurm.scheduler.sbatch import RefusedError

STAY_POLL_S = 1.0
STAY_MARGIN_S = 60.0
"""Real grace is GraceTime plus some seconds, and Slurm looks at its clock every 30 s."""
UNKNOWN_GRACE_S = 300.0

_ENDS_FOR_GOOD = "the job ends for good (somebody cancelled it, or its time limit has passed)"

Amend = Callable[[Decision], Decision]
"""Puts a decision that has changed on record; as it stands there."""


def act(
    job: OwnJob,
    environ: Mapping[str, str],
    evidence: Evidence,
    decision: Decision,
    amend: Amend,
) -> Decision:
    """Do it; the decision as it stands then."""
    remember(job.layout, evidence.number, dataclasses.asdict(decision))
    if decision.action == RESTART:
        decision = _unless_it_cannot_serve(job, environ, decision, amend)
    if decision.action == REQUEUED:
        decision = _queue_again(job, environ, evidence, decision, amend)
    elif decision.action == PAUSED:
        decision = _pause(job, evidence, decision, amend)
    if decision.action in (DONE, ENDED, STOP):
        leave(job, decision.action)
    return decision


def _unless_it_cannot_serve(
    job: OwnJob, environ: Mapping[str, str], decision: Decision, amend: Amend
) -> Decision:
    """A restart in place is none where too few nodes of this allocation may still be used."""
    excluded = known_exclusions(job)
    if not excluded:
        return decision
    nodes = job.scheduler.nodes(environ)
    kinds = known_kinds(job, nodes, look(job, 0).kinds if job.record.spec.cluster.spares else {})
    if placement(job, nodes, excluded, kinds=kinds).serves:
        return decision
    here = placement(job, nodes, settle_exclusions(job), kinds=kinds)
    if here.serves:  # there are too few nodes for another job
        return decision
    said = f"this allocation cannot serve: {here.why_not}"
    return _changed(decision, REQUEUED, said, amend)


def _queue_again(
    job: OwnJob,
    environ: Mapping[str, str],
    evidence: Evidence,
    decision: Decision,
    amend: Amend,
) -> Decision:
    lost = sorted(look(job, 0).unreachable) if decision.cause == NODE else []
    if lost or decision.cause == CAUSE_FORGOTTEN:
        with contextlib.suppress(SchedulerError):
            return _move_on_told(job, decision, amend, without=lost)
    why = _requeue(job, evidence, hold=False)
    if why == "":
        return decision
    if _was_cancelled(job, evidence, refused=why is not None):
        return _changed(decision, STOP, "but somebody has cancelled the job", amend)
    try:
        successor = ensure_successor(job)
    except RefusedError as error:
        failed = f"{why}; {error}" if why else str(error)
        return _stay(job, environ, evidence, decision, failed, amend)
    if why is None:
        return _changed(decision, REQUEUED, f"job {successor} is next", amend)
    said = f"the job is not requeued ({why}), job {successor} follows it"
    decision = _changed(decision, REQUEUED, said, amend)
    _give_way(job)
    return decision


def _requeue(job: OwnJob, evidence: Evidence, *, hold: bool) -> Optional[str]:
    """Empty: the job is queued again. Else why it is not; None: the run has a new job each time."""
    if job.record.continue_by != REQUEUE:
        return None
    names = list(settle_exclusions(job))  # asked before the requeue: then every second counts
    with best_effort("not in the journal"):
        paths = job.layout.attempt(evidence.number)
        append_event(paths, "requeue_asked", now=job.now, job_id=job.job_id)
    try:
        queued = job.scheduler.requeue(job.job_id, restart_count=job.restart_count, hold=hold)
    except SchedulerError as error:
        return str(error)
    if not queued:
        return _ENDS_FOR_GOOD
    faults.point("requeued", job_id=job.job_id)
    keep_out_of_waiting(job, job.job_id, names, for_s=kill_wait_s(job))
    return ""


def _was_cancelled(job: OwnJob, evidence: Evidence, *, refused: bool) -> bool:
    """A person's word is obeyed; asked only where the job may have been told to end."""
    if not (refused or evidence.term):
        return False
    cancelled = job.scheduler.was_cancelled(job.job_id)
    if cancelled is not None:
        return cancelled
    # Nobody can say (no accounting, or it lags). What ends a job that nobody preempts is its time
    # limit or a person. Of a limit that is not known only a refused requeue tells the person.
    if evidence.limit_passed or (evidence.limit_passed is None and not refused):
        return False
    return job.scheduler.is_preempted(job.job_id) is False


def _give_way(job: OwnJob) -> None:
    """Leaving in its grace, a job that Slurm may requeue comes back beside its successor (24.05 and
    later), and the fifth time is held for an operator; ended by its own word it does not."""
    if not job.scheduler.is_preempted(job.job_id) or job.scheduler.may_requeue(job.job_id) is False:
        return
    try:
        _note_way(job)
        job.scheduler.cancel(job.job_id)
    except (OSError, SchedulerError) as error:
        warn(f"{error}; staying to be killed, Slurm then queues the job again")
        _wait_to_be_killed(job)


def move_on(job: OwnJob, *, without: Sequence[str]) -> str:
    """Queue a new job, kept off the nodes that are lost, and end ours: requeued, ours would stay
    COMPLETING on such a node until Slurm gives that up (SlurmdTimeout), and start two minutes after
    that. Its id; with a SchedulerError nothing has been done. OSError: it is queued, and ours goes
    on, since its end could not be put on record as no person's."""
    successor = queue_beside(job, without=without)
    _end_for(job)
    return successor


def _move_on_told(
    job: OwnJob, decision: Decision, amend: Amend, *, without: Sequence[str]
) -> Decision:
    successor = queue_beside(job, without=without)
    # A job whose start is forgotten is killed as soon as its nodes tell of it.
    why = "would wait for the node that is lost" if without else "cannot be relied on"
    said = f"job {successor} is next, this one {why}"
    decision = _changed(decision, REQUEUED, said, amend)
    try:
        _end_for(job)
    except OSError as error:
        warn(f"{error}; the job ends by itself")
    return decision


def _end_for(job: OwnJob) -> None:
    _note_way(job)
    try:
        job.scheduler.cancel(job.job_id)
    except SchedulerError as error:
        warn(f"{error}; the job ends by itself")


def _note_way(job: OwnJob) -> None:
    """With the newest attempt, of which who ends the job may not have been told."""
    newest = max(claimed_numbers(job.layout), default=0)
    if newest:
        facts = {"job_id": job.job_id, "restart_count": job.restart_count}
        append_event(job.layout.attempt(newest), GAVE_WAY, now=job.now, **facts)


def _stay(
    job: OwnJob,
    environ: Mapping[str, str],
    evidence: Evidence,
    decision: Decision,
    failed: str,
    amend: Amend,
) -> Decision:
    """No way is left but Slurm's own: it queues a preempted job again that it has to kill."""
    may_requeue = job.scheduler.may_requeue(job.job_id)
    if may_requeue is not False and _is_preempted(job, environ, evidence):
        said = f"nothing can be queued from here ({failed}), so the job stays to be killed, upon "
        decision = _changed(decision, REQUEUED, f"{said}which Slurm queues it again", amend)
        warn(decision.reason)
        _wait_to_be_killed(job)
    return _changed(decision, STOP, f"but it is not queued again: {failed}", amend)


def _is_preempted(job: OwnJob, environ: Mapping[str, str], evidence: Evidence) -> bool:
    told = job.scheduler.is_preempted(job.job_id)
    if told is not None:
        return told
    outcome = evidence.outcome
    asked = evidence.term or evidence.ranks_signalled
    asked = asked or (outcome is not None and outcome.result == STOPPED)
    warned_at = float(environ.get("FTSLURM_STOP_AT") or 0)
    return asked and (warned_at == 0 or job.now() < warned_at)


def _wait_to_be_killed(job: OwnJob) -> None:
    """For as long as grace can last."""
    site = Site.from_dict(job.record.site) if job.record.site else None
    longest_s = UNKNOWN_GRACE_S
    if site is not None:
        graces = [*site.grace_s.values(), *site.qos_grace_s.values()]
        longest_s = max(graces, default=0) + site.kill_wait_s
    deadline = job.now() + longest_s + STAY_MARGIN_S
    while job.now() < deadline:
        job.sleep(STAY_POLL_S)


def _pause(job: OwnJob, evidence: Evidence, decision: Decision, amend: Amend) -> Decision:
    why = _requeue(job, evidence, hold=True)
    if why == "":
        return decision
    try:
        successor = ensure_successor(job)
        job.scheduler.hold(successor)
    except SchedulerError as error:
        said = f"no job could be kept in the queue ({why or error}), `ftslurm resume` queues one"
        return _changed(decision, ENDED, said, amend)
    return _changed(decision, PAUSED, f"job {successor} is next, and held", amend)


def leave(job: OwnJob, action: str) -> None:
    """The run ends with this job: nothing of it may be left in the queue, or come back to it."""
    if action != DONE or _may_have_successor(job):
        try:
            cancel_successors(job)
        except SchedulerError as error:
            warn(f"a successor may be left, it leaves when it starts: {error}")
    # A finished run that Slurm queues once more finds DONE, and its job still ends COMPLETED, which
    # others may wait for (afterok).
    if action == DONE or job.record.continue_by != REQUEUE:
        return
    try:
        # Exit 1 is not always final: --requeue=expedite holds the job (26.05), leaving in grace
        # queues it again (24.05 and later), and on 24.11 so does the next exit of any job that was
        # ever preempted (all seen).
        job.scheduler.forbid_requeue(job.job_id)
    except SchedulerError as error:
        warn(f"Slurm may queue the job again, cancel it then: {error}")


def _may_have_successor(job: OwnJob) -> bool:
    """Most finished runs never asked for one, and what a person has queued finds DONE."""
    if any(one.queued_by == BY_BATCH for one in read_jobs(job.layout)):
        return True
    try:
        return is_listed(job.layout.successor_asked)
    except OSError:
        return True


def _changed(decision: Decision, action: str, said: str, amend: Amend) -> Decision:
    return amend(dataclasses.replace(decision, action=action, reason=f"{decision.reason}, {said}"))
