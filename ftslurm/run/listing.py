"""`ftslurm status` without a name: the newest runs and sweeps of a folder, a line each.

Reads only, and no more than a screenful, whatever the folder holds. Slurm is not asked: of a run
that waits or is quiet, and of a sweep's tasks, `ftslurm status NAME` tells more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import FtslurmError
from ftslurm.run.layout import RunLayout
from ftslurm.run.neighbours import newest_folders
from ftslurm.run.story import RunStory, queued_words, read_story
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.run.sweep_record import read_tasks
from ftslurm.run.wording import format_count, format_span

MOST = 20
_LONGEST_REASON = 60
_DAMAGE = (FtslurmError, OSError, KeyError, TypeError, ValueError, AttributeError)
"""What records that are damaged, or of a later version, come to when they are read."""


@dataclass(frozen=True)
class Listed:
    """One run, one sweep, or a folder that is one of both and cannot be read."""

    name: str
    kind: str
    """run | sweep"""
    state: str
    """A run's (`ftslurm.run.story`), `unreadable`, or none: a sweep's is not looked up."""
    step: Optional[int] = None
    steps: Optional[int] = None
    committed_step: Optional[int] = None
    attempts: Optional[int] = None
    tasks: Optional[int] = None
    last_sign_at: Optional[float] = None
    """Unix time."""
    reason: str = ""
    """Why it stands as it does, where somebody has said so."""


def list_runs(runs_dir: Path, *, now: float, most: int = MOST) -> list[Listed]:
    """The newest first."""
    return [_look(folder, is_sweep, now) for folder, is_sweep in newest_folders(runs_dir, most)]


def _look(folder: Path, is_sweep: bool, now: float) -> Listed:
    try:
        if is_sweep:
            return Listed(folder.name, "sweep", "", tasks=len(read_tasks(SweepLayout(folder))))
        return _of_run(read_story(RunLayout(folder), now=now), folder, now)
    except _DAMAGE as error:
        is_told = isinstance(error, (FtslurmError, OSError))
        reason = str(error) if is_told else f"damaged or of a later version: {error!r}"
        return Listed(folder.name, "sweep" if is_sweep else "run", "unreadable", reason=reason)


def _of_run(story: RunStory, folder: Path, now: float) -> Listed:
    newest = story.attempts[-1] if story.attempts else None
    is_over = story.state in ("done", "running", "never started")
    return Listed(
        folder.name,
        "run",
        story.state,
        step=story.last_step,
        steps=story.steps,
        committed_step=story.committed_step,
        attempts=len(story.attempts),
        last_sign_at=story.last_sign_at,
        reason=queued_words(story, now) if newest is None or is_over else newest.reason or "",
    )


def as_record(runs_dir: Path, listed: Sequence[Listed]) -> dict[str, Any]:
    return {"runs_dir": str(runs_dir), "listed": [asdict(one) for one in listed]}


def render_list(runs_dir: Path, listed: Sequence[Listed], *, now: float) -> str:
    if not listed:
        return (
            f"no run below {runs_dir}/; name one, or go to the folder you submitted from "
            "(`ftslurm submit` begins one)"
        )
    rows = [(one.name, one.state or one.kind, _where(one), _when(one, now)) for one in listed]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{name:{widths[0]}}  {state:{widths[1]}}  {where:{widths[2]}}  {when}".rstrip()
        for name, state, where, when in rows
    ]
    if len(listed) == MOST:
        lines.append(f"the newest {MOST}; `ftslurm report --runs` has all")
    return "\n".join([*lines, "`ftslurm status NAME` tells all of one"])


def _where(one: Listed) -> str:
    if one.kind == "sweep":
        return "" if one.tasks is None else format_count(one.tasks, "task")
    if one.attempts is None:
        return ""
    attempts = format_count(one.attempts, "attempt")
    if one.steps is None:
        return attempts
    kept = "" if one.committed_step is None else f", {one.committed_step} committed"
    return f"step {one.step or 0}/{one.steps}{kept}, {attempts}"


def _when(one: Listed, now: float) -> str:
    ago = "" if one.last_sign_at is None else f"{format_span(now - one.last_sign_at)} ago"
    # It may hold anything, line breaks and control characters of a terminal too.
    reason = "".join(sign for sign in " ".join(one.reason.split()) if sign.isprintable())
    if len(reason) > _LONGEST_REASON:
        reason = reason[: _LONGEST_REASON - 3] + "..."
    return ": ".join(filter(None, (ago, reason)))
