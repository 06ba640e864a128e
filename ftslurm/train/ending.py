"""How an attempt ends on disk and among its ranks. Only rank 0 writes, only what is durable."""

from __future__ import annotations

import logging
import math
import time
from datetime import timedelta

import torch.distributed as dist

from ftslurm.checkpoint.fence import refuse_superseded
from ftslurm.files import write_json
from ftslurm.replay.trace import read_trace
from ftslurm.run.attempts import FINISHED, STOPPED, Outcome, write_outcome
from ftslurm.run.layout import RunLayout
from ftslurm.train.stop import Word

log = logging.getLogger(__name__)

LAST_BARRIER_S = 60
"""How long a rank waits for the others before it leaves without them."""


def stopped(
    agreed: Word,
    step: int,
    committed_step: int | None,
    order: str | None,
    missed_s: float | None,
) -> Outcome:
    """The outcome of an attempt that was asked to leave; `missed_s`: the deadline that its save has
    missed, None: it has committed."""
    reason = ""
    if missed_s is not None:
        reason = f"the save of step {step} did not commit ({missed_s:.0f} s were left for it)"
    return Outcome(
        result=STOPPED,
        step=step,
        committed_step=committed_step,
        signal=agreed.stop_signal_name,
        order=order,
        reason=reason,
        written_at=time.time(),
    )


def settle(
    layout: RunLayout,
    attempt: int,
    outcome: Outcome,
    *,
    loss: float | None,
    parameter_digest: str | None,
) -> None:
    """Rank 0: say how the attempt ended, after all that is said is durable.

    DONE before the outcome: a kill in between leaves a run that is known to have finished. Once a
    newer attempt has been claimed this one says nothing: its last step may not be the run's.
    """
    refuse_superseded(layout, attempt)
    if outcome.result == FINISHED:
        assert parameter_digest is not None, "a run that finished has its digest"
        write_done(
            layout,
            attempt=attempt,
            step=outcome.step,
            loss=loss,
            parameter_digest=parameter_digest,
        )
    write_outcome(layout.attempt(attempt), outcome)


def write_done(
    layout: RunLayout, *, attempt: int, step: int, loss: float | None, parameter_digest: str
) -> None:
    """The run has finished. `loss` is None when the attempt before had trained the last step and
    was cut off after it; it is then looked up."""
    if loss is None:
        last = read_trace(layout).get(step)
        loss = None if last is None else last.loss
    record = {
        "schema_version": 1,
        "step": step,
        "loss": loss if loss is not None and math.isfinite(loss) else None,
        "loss_hex": None if loss is None else loss.hex(),
        "parameter_digest": parameter_digest,
        "attempt": attempt,
        "finished_at": time.time(),
    }
    write_json(layout.done, record)


def leave_together(group: dist.ProcessGroup, *, timeout_s: float = LAST_BARRIER_S) -> None:
    """A barrier that ends: a rank that cannot come must not hold the others in their grace."""
    try:
        dist.monitored_barrier(group, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        log.warning("leaving without all other ranks: %s", error)
