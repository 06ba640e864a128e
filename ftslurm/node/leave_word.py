"""The word that a step before the ranks leaves when it is asked to leave: as ranks that stopped.

Nothing is decided here; whoever leaves this word exits with RANK_STOPPED.
"""

from __future__ import annotations

import contextlib
import time

from ftslurm.errors import RunError
from ftslurm.run.attempts import STOPPED, Outcome, read_attempt, write_outcome
from ftslurm.run.layout import RunLayout


def leave_word(layout: RunLayout, attempt: int, signal_name: str) -> None:
    """No step was trained and none is lost: what stopped ranks would have left."""
    adopted = read_attempt(layout, attempt).adopted
    step = max((item.step for item in adopted), default=0)
    outcome = Outcome(STOPPED, step, step, signal_name, written_at=time.time())
    # Several nodes may leave at once: one word is enough, and of two in one moment, which each
    # replace the file as a whole, either will do.
    with contextlib.suppress(RunError):
        write_outcome(layout.attempt(attempt), outcome)
