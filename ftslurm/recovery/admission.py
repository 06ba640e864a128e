"""Whether a job that begins may go on with its run, asked by the claim before a number is taken.

One that may not leaves nothing behind it in the queue, and does not come back. What a person has
queued always begins.
"""

from __future__ import annotations

from collections.abc import Mapping

from ftslurm.errors import RANK_STOPPED, RunError
from ftslurm.files import best_effort, write_json
from ftslurm.recovery.actions import STOP
from ftslurm.recovery.own_job import OwnJob, has_given_way
from ftslurm.recovery.successor import (
    is_persons_word,
    note_own_job,
    order_to_act_on,
    reason_to_leave,
)
from ftslurm.run.attempts import append_event, claimed_numbers, read_decision


def admit(job: OwnJob, environ: Mapping[str, str]) -> None:
    """RunError: the job must leave, and all that the run's end asks for is done."""
    note_own_job(job)
    if has_given_way(job):
        raise RunError(f"job {job.job_id} has given way to the run's next job, and leaves")
    if is_persons_word(job):
        return
    # Not loaded for a run's first claim, which needs nothing that decides.
    from ftslurm.recovery.next_job import leave
    from ftslurm.recovery.policy import CAUSE_STANDSTILL
    from ftslurm.recovery.recover import outlive_requeue, recover
    from ftslurm.recovery.standstill import why_it_stands_still

    newest = claimed_numbers(job.layout)[-1]
    why = reason_to_leave(job)
    if why is not None and order_to_act_on(job.layout, newest):
        # What the attempt's own batch shell did not live to do: held, or ended for good.
        outlive_requeue()
        recover(
            job.layout, job.scheduler, environ,
            attempt=newest, rc=RANK_STOPPED, term=False,
            submit=job.submit, now=job.now, sleep=job.sleep,
        )  # fmt: skip
    elif why is not None:
        leave(job, STOP)
    else:
        why = why_it_stands_still(job)
        if why is None:
            return
        put_on_record(job, newest, CAUSE_STANDSTILL, why)
        leave(job, STOP)
    raise RunError(f"{why}; this job leaves, `ftslurm resume` lets the run go on")


def put_on_record(job: OwnJob, number: int, cause: str, reason: str) -> None:
    """The run stops, and it is told with its newest attempt, and to whom recovery.on_event says."""
    paths = job.layout.attempt(number)
    decided = {"action": STOP, "cause": cause, "reason": reason}
    with best_effort("not in the journal"):
        record = {**read_decision(paths), "schema_version": 1, **decided, "decided_at": job.now()}
        write_json(paths.decision_json, record)
        append_event(paths, "decided", now=job.now, **decided)
    rules = job.record.spec.recovery
    if rules.on_event or rules.on_event_url:
        from ftslurm.recovery.on_event import STOPPED, tell

        tell(job.layout, job.record, number, [STOPPED], decided, now=job.now)
