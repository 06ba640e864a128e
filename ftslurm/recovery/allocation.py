"""The allocation that a job has been given: where in it the next attempt runs, or, where it cannot
serve, how the run gets another one.

Looked at by every claim, so that an excluded node is never used, whatever became of the list that
Slurm was to keep. An allocation is given back a few times at most, then the run stops and says so.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Optional

from ftslurm.diagnosis.causes import GPU, NODE
from ftslurm.errors import RunError, SchedulerError, warn
from ftslurm.files import best_effort
from ftslurm.recovery.actions import STOP
from ftslurm.recovery.admission import put_on_record
from ftslurm.recovery.ask_agents import Word, look
from ftslurm.recovery.exclusion import Placement, returns_in_a_row
from ftslurm.recovery.keep_out import (
    given_up_since,
    keep_out_of_waiting,
    kill_wait_s,
    known_exclusions,
    placement,
    settle_exclusions,
)
from ftslurm.recovery.likeness import Kind
from ftslurm.recovery.node_kinds import known_kinds
from ftslurm.recovery.own_job import OwnJob
from ftslurm.recovery.successor import ensure_successor
from ftslurm.run.attempts import claimed_numbers
from ftslurm.run.jobs import BY_PERSON, read_jobs
from ftslurm.run.node_memory import FAULT, RETURNED, note_node, read_node_events
from ftslurm.run.record import REQUEUE

CAUSE_NO_PLACE = "no_place"
"""Of a decision: no allocation that Slurm gave could be used."""

MOST_RETURNS = 3
"""Allocations in a row that are given back."""


def find_place(job: OwnJob, environ: Mapping[str, str]) -> Placement:
    """Where the next attempt's ranks run."""
    nodes = job.scheduler.nodes(environ)
    if job.scheduler.name == "local":
        return Placement(nodes)
    newest = max(claimed_numbers(job.layout), default=0)
    word = look(job, newest)
    kinds = known_kinds(job, nodes, word.kinds)
    here = _place(job, nodes, known_exclusions(job), word, kinds)
    if not here.serves and word.is_hasty:
        word = look(job, newest)
        here = _place(job, nodes, known_exclusions(job), word, kinds)
    for node in sorted(word.unreachable):
        with best_effort(f"the loss of node {node} is not on record"):
            why = f"it did not answer when the attempt after {newest} was claimed"
            note_node(job.layout, FAULT, node, attempt=newest, cause=NODE, why=why, now=job.now)
    for node, what in sorted(word.held.items()):
        with best_effort(f"the GPUs of node {node} are not on record"):
            why = f"when the attempt after {newest} was claimed, {what}"
            note_node(job.layout, FAULT, node, attempt=newest, cause=GPU, why=why, now=job.now)
    if here.serves:
        return here
    # Another job is needed, and there may be too few nodes for one.
    return _place(job, nodes, settle_exclusions(job), word, kinds)


def _place(
    job: OwnJob,
    nodes: Sequence[str],
    excluded: Mapping[str, str],
    word: Word,
    kinds: Optional[Mapping[str, Kind]],
) -> Placement:
    unusable = {**excluded, **word.lost}
    return placement(job, nodes, unusable, doubtful=word.doubtful, kinds=kinds)


def tell_of_given_up(job: OwnJob, environ: Mapping[str, str]) -> None:
    """Whoever recovery.on_event names, of the nodes that were given up since the newest attempt was
    decided on; those of its decision are told with that."""
    rules = job.record.spec.recovery
    newest = max(claimed_numbers(job.layout), default=0)
    if not newest or not (rules.on_event or rules.on_event_url):
        return
    from ftslurm.recovery.on_event import EXCLUDED, tell  # late: few runs tell

    given_up = given_up_since(job, newest)
    if given_up:
        told = "; ".join(f"node {node}: {why}" for node, why in given_up.items())
        facts = {"reason": told, "excluded": list(given_up)}
        tell(job.layout, job.record, newest, [EXCLUDED], facts, environ=environ, now=job.now)


def give_back(job: OwnJob, here: Placement) -> None:
    """Queue the run's next job, away from the nodes that must not be used; RunError: it has been
    tried often enough, or there is no way. On return the batch script has to leave."""
    from ftslurm.recovery.recover import outlive_requeue  # late, as next_job: few are given back

    newest = max(claimed_numbers(job.layout), default=0)
    asked_at = [one.queued_at for one in read_jobs(job.layout) if one.queued_by == BY_PERSON]
    events = read_node_events(job.layout)
    before = returns_in_a_row(events, newest, since=max(asked_at, default=0.0))
    if before >= MOST_RETURNS:
        raise _stopped(
            job,
            newest,
            f"Slurm has given this run {before + 1} allocations in a row that it cannot use (in "
            f"this one {here.why_not}); free or repair nodes, or let the run use one again "
            "(`--readmit NODE`)",
        )
    node = next(iter(here.left_out), "")
    with best_effort("not on record"):
        note_node(job.layout, RETURNED, node, attempt=newest, why=here.why_not, now=job.now)
    warn(f"this allocation is given back: {here.why_not}")
    outlive_requeue()
    try:
        _queue_next(job, is_first=before == 0)
    except SchedulerError as error:
        why = f"{here.why_not}, and no other job can be queued ({error}); mend that"
        raise _stopped(job, newest, why) from None


def _stopped(job: OwnJob, newest: int, why: str) -> RunError:
    """The run ends here, on record where there is an attempt to put it to."""
    from ftslurm.recovery.next_job import leave

    why = f"{why}, then `ftslurm resume {shlex.quote(str(job.layout.root))}`"
    if newest:
        put_on_record(job, newest, CAUSE_NO_PLACE, why)
    leave(job, STOP)
    return RunError(why)


def _queue_next(job: OwnJob, *, is_first: bool) -> None:
    from ftslurm.recovery.next_job import move_on

    lost = sorted(look(job, 0).unreachable)
    if lost:
        try:
            move_on(job, without=lost)
        except SchedulerError as error:
            warn(f"{error}; this job is queued again in its place")
        except OSError as error:
            warn(f"{error}; the job ends by itself")
            return
        else:
            return
    # A second time the list was not kept by the requeued job: a new one brings its own.
    if job.record.continue_by == REQUEUE and is_first:
        names = list(settle_exclusions(job))
        try:
            queued = job.scheduler.requeue(job.job_id, restart_count=job.restart_count)
        except SchedulerError as error:
            warn(f"{error}; a new job is queued in its place")
        else:
            # Not queued: somebody has cancelled it in this moment, and is obeyed.
            if queued:
                keep_out_of_waiting(job, job.job_id, names, for_s=kill_wait_s(job))
            return
    ensure_successor(job)
