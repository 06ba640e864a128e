"""Why an attempt of ours ended: by its own records, and by Slurm's row where they do not say. Pure.

The policy writes words of its own beside those of `diagnosis.causes`: that it was asked to leave
says nothing of why, and that somebody ordered it is no failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from ftslurm.diagnosis import causes
from ftslurm.diagnosis.stragglers import STRAGGLER
from ftslurm.recovery import policy
from ftslurm.recovery.allocation import CAUSE_NO_PLACE
from ftslurm.report.jobs import FAILURES, FREE
from ftslurm.report.logical import Ending
from ftslurm.run.attempt_story import AttemptStory

MEANS: dict[str, Optional[str]] = {
    policy.CAUSE_FINISHED: None,
    policy.CAUSE_ORDERED: None,
    policy.CAUSE_NOT_STARTED: None,
    policy.CAUSE_FORGOTTEN: None,
    policy.CAUSE_NEVER_RETRY: causes.CODE,
    policy.CAUSE_STANDSTILL: causes.HANG,
}
"""The policy's words that say all; None: nothing has failed."""
ASK_SLURM = frozenset(
    {policy.CAUSE_ASKED, policy.CAUSE_FAILED, CAUSE_NO_PLACE, causes.UNKNOWN, None}
)
"""Of an attempt that was asked to leave, of one that nobody could say anything of, and of one whose
own word was written over when the run found no place any more."""
_BY_EXIT = frozenset({causes.CODE, causes.UNKNOWN})
"""Of a row: what its batch script exited with, which is our own and says nothing of the ranks."""


def blamed_of(story: AttemptStory) -> Mapping[str, Any]:
    """`node` and `rank`, as far as known; of one that was slow and given up for it the agents'
    finding tells, as nothing had failed that could have been looked into."""
    if story.blamed is not None or story.cause != causes.STRAGGLER:
        return story.blamed or {}
    slow = [one for one in story.findings if one.get("kind") == STRAGGLER and one.get("acted")]
    found = slow[-1] if slow else {}
    return {key: next(iter(found.get(f"{key}s") or []), None) for key in ("node", "rank")}


def ending_of(
    story: AttemptStory, row: Optional[Ending], *, asked_by: Optional[str] = None
) -> Ending:
    """`row`: by Slurm's row, of the attempt that was the last in it; None: there is none.
    `asked_by`: why it was asked to leave, as Slurm said before the run's own requeue hid it."""
    word, node = story.cause, blamed_of(story).get("node")
    if word not in ASK_SLURM:
        # A word of a later version than this one is nothing that can be counted on.
        cause = word if word in causes.MEANING else MEANS.get(str(word), causes.UNKNOWN)
        if node is None and row is not None and row.cause == cause:
            node = row.node
        return Ending(cause, story.reason or causes.MEANING.get(cause or "", ""), node)
    return _by_slurm(story, row, node, asked_by)


def _by_slurm(
    story: AttemptStory, row: Optional[Ending], node: Optional[str], asked_by: Optional[str]
) -> Ending:
    word, ended = story.cause, story.ended
    if ended == "finished":
        return Ending(None, story.reason)
    by_exit = row is not None and row.cause in _BY_EXIT
    has_failed = ended == "failed" or word in (policy.CAUSE_FAILED, causes.UNKNOWN)
    if word is None and ended in ("killed", "running"):
        has_failed = by_exit or (row is None and ended == "killed")
    if word == policy.CAUSE_ASKED and asked_by in FREE and (row is None or row.cause is None):
        return Ending(asked_by, story.reason)
    if row is not None and not by_exit and (row.cause in FAILURES or not has_failed):
        return Ending(row.cause, story.reason or row.sentence, node or row.node)
    if has_failed:
        return Ending(causes.UNKNOWN, story.reason or causes.MEANING[causes.UNKNOWN], node)
    return Ending(None, story.reason)
