"""The reference loop on data one batch of which, `spec.user["bad_batch"]`, makes the loss NaN."""

import math
from typing import Any

from ftslurm.train import reference
from ftslurm.train.session import Session


def train(session: Session) -> None:
    end_step, bad = session.end_step, session.spec.user["bad_batch"]

    def end_step_of_bad_batch(*, loss: float, **facts: Any) -> None:
        cursor = session._cursor
        assert cursor is not None
        batch = cursor.begin_of(cursor.samples) // cursor.global_batch_size
        end_step(loss=math.nan if batch == bad else loss, **facts)

    session.end_step = end_step_of_bad_batch  # type: ignore[method-assign]
    reference.train(session)
