"""The fence as the run's journal has it: who may still write, and which steps are of its history.

Asking is not locking: a writer that is held up right after it asked can still publish. What it
publishes then is a stray, and the fence of the newer attempt keeps it out.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Optional

from ftslurm.checkpoint.choose import Fence, Rejected
from ftslurm.checkpoint.verification import Expectation, verify_heads
from ftslurm.errors import CheckpointError
from ftslurm.files import Patience
from ftslurm.run import attempts
from ftslurm.run.layout import RunLayout


def read_fence(layout: RunLayout, attempt: int) -> Fence:
    """The fence of `attempt`; none for 0, nor in a folder without a journal."""
    if attempt == 0:
        return Fence()
    try:
        return Fence(attempt, attempts.read_attempt(layout, attempt).adopted)
    except FileNotFoundError:
        return Fence()


def refuse_superseded(layout: RunLayout, attempt: int) -> None:
    """CheckpointError once a newer attempt has been claimed; `attempt` 0 is outside the run."""
    newest = max(attempts.numbers(layout), default=0)
    if attempt == 0 or newest <= attempt:
        return
    raise CheckpointError(
        f"attempt {attempt} has been superseded by attempt {newest}, claimed "
        f"{_claimed(layout, newest)}; it may neither publish nor remove steps of the run any more"
    )


def stray(
    path: Path, fence: Fence, *, expect: Expectation, patience: Optional[Patience] = None
) -> Optional[Rejected]:
    """What an older attempt published at `path` after the fence was set; None for all else."""
    heads = verify_heads(path, expect=expect, patience=patience)
    if heads.manifest is None or heads.misplaced:
        return None
    reason = fence.problem(heads.manifest, heads.committed_digest)
    if reason is None:
        return None
    return Rejected(heads.manifest.step, path, reason, is_damage=False)


def _claimed(layout: RunLayout, number: int) -> str:
    try:
        claimed_at = attempts.read_attempt(layout, number).claimed_at
    except FileNotFoundError:
        return "just now"  # its claim has taken the number and not written attempt.json yet
    return time.strftime("at %Y-%m-%d %H:%M:%S UTC", time.gmtime(claimed_at))
