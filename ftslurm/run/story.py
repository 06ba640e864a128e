"""What happened to a run and where it stands, read from its directory alone.

Reads only; no Slurm command, so what only Slurm knows (is the job still queued?) is not told. What
no record says is None. Of a run's attempts only what is small is read here; all that is on record
of one of them is `run/account.py`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ftslurm.checkpoint.published import published_steps
from ftslurm.errors import FormatError, RunError
from ftslurm.files import read_json
from ftslurm.run.acts import STATE_AFTER, Act, newest_act
from ftslurm.run.attempt_story import AttemptStory, read_attempt_stories
from ftslurm.run.attempts import Progress, read_progress
from ftslurm.run.jobs import read_jobs
from ftslurm.run.layout import RunLayout
from ftslurm.run.node_memory import read_node_events
from ftslurm.run.trouble import storage_trouble
from ftslurm.run.wording import format_span

QUIET_S = 120.0
"""A run that gave no sign for so long is called quiet instead of running."""

_QUARANTINED_TOLD = 5


@dataclass(frozen=True)
class Quarantined:
    """A step that was put aside."""

    name: str
    reason: str


@dataclass(frozen=True)
class RunStory:
    run_id: str
    state: str
    """done | running | quiet | waiting | paused | stopped | cancelled | never started"""
    program: list[str]
    """Command of a program of the user's own; none: a loop of ftslurm's."""
    steps: Optional[int]
    """None: a program's, which nobody knows."""
    last_step: Optional[int]
    """Of the run's history: what a later attempt trains again does not count."""
    committed_step: Optional[int]
    steps_lost: int
    tokens_lost: int
    loss: Optional[float]
    tokens_per_s: Optional[float]
    last_sign_at: Optional[float]
    committed_steps: list[int]
    quarantined: list[str]
    attempts: list[AttemptStory]
    storage: Optional[str] = None
    """What is wrong with the run's storage, as far as can be seen now."""
    put_aside: list[Quarantined] = dataclasses.field(default_factory=list)
    """The newest of `quarantined`, with the reason."""
    excluded: dict[str, str] = dataclasses.field(default_factory=dict)
    """Node -> why the run keeps off it."""
    job_id: Optional[str] = None
    """Queued last; None: none is on record."""
    queued_at: Optional[float] = None


def read_story(layout: RunLayout, *, now: float) -> RunStory:
    run = _read_run(layout)
    program = [str(word) for word in run["spec"].get("program") or []]
    attempts = read_attempt_stories(layout, is_program=bool(program))
    committed = sorted(item.step for item in published_steps(layout))
    last = read_progress(layout.attempt(attempts[-1].number)) if attempts else None
    last_sign_at = _last_sign_at(last, attempts)
    if program:
        words = (last_sign_at, _last_word_at(layout, attempts))
        last_sign_at = max(filter(None, words), default=None)
    quarantined = _names(layout.quarantine)
    job = next(iter(read_jobs(layout)[-1:]), None)
    return RunStory(
        run_id=str(run.get("run_id", layout.root.resolve().name)),
        state=_state(layout.done.exists(), attempts, newest_act(layout), last_sign_at, now),
        program=program,
        steps=None if program else int(run["spec"]["steps"]),
        last_step=None if program else _last_step(attempts),
        committed_step=committed[-1] if committed else None,
        steps_lost=sum(item.steps_lost for item in attempts),
        tokens_lost=sum(item.tokens_lost for item in attempts),
        loss=last.loss if last else None,
        tokens_per_s=last.tokens_per_s if last else None,
        last_sign_at=last_sign_at,
        committed_steps=committed,
        quarantined=quarantined,
        attempts=attempts,
        storage=storage_trouble(layout, attempts[-1].number) if attempts else None,
        put_aside=[_put_aside(layout, name) for name in quarantined[-_QUARANTINED_TOLD:]],
        excluded=_excluded(layout, run, now),
        job_id=job.job_id if job else None,
        queued_at=job.queued_at if job else None,
    )


def queued_words(story: RunStory, now: float) -> str:
    """Of a run that has not begun; empty where it has, or no job of it is on record."""
    if story.state != "never started" or story.queued_at is None:
        return ""
    return f"job {story.job_id} was queued {format_span(now - story.queued_at)} ago"


def _read_run(layout: RunLayout) -> dict[str, Any]:
    try:
        return read_json(layout.run_json)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"`{layout.root}` is no run directory, it has no run.json; name the folder that "
            "`ftslurm submit` printed, e.g. runs/RUN_ID"
        ) from None


def _last_step(attempts: Sequence[AttemptStory]) -> Optional[int]:
    """Where the newest attempt is that has trained: one thought dead may have trained on."""
    for attempt in reversed(attempts):
        if attempt.last_step is not None:
            return attempt.last_step
    return 0 if attempts else None


def _state(
    done: bool,
    attempts: list[AttemptStory],
    act: Optional[Act],
    last_sign_at: Optional[float],
    now: float,
) -> str:
    if done:
        return "done"
    claimed_at = (attempts[-1].claimed_at or 0.0) if attempts else 0.0
    if act is not None and act.at > claimed_at:
        return STATE_AFTER[act.result]
    if not attempts:
        return "never started"
    last = attempts[-1]
    known = {"stop": "stopped", "ended": "stopped", "paused": "paused", "requeued": "waiting"}
    if last.action in known:
        return known[last.action]
    return "running" if last_sign_at and now - last_sign_at < QUIET_S else "quiet"


def _last_sign_at(progress: Optional[Progress], attempts: list[AttemptStory]) -> Optional[float]:
    claimed = attempts[-1].claimed_at if attempts else None
    written = progress.written_at if progress else None
    return max((at for at in (claimed, written) if at), default=None)


def _last_word_at(layout: RunLayout, attempts: Sequence[AttemptStory]) -> Optional[float]:
    """When a rank of the newest attempt last wrote to its log."""
    logs = layout.attempt(attempts[-1].number).logs.glob("rank-*.log") if attempts else ()
    return max((path.stat().st_mtime for path in logs), default=None)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _put_aside(layout: RunLayout, name: str) -> Quarantined:
    try:
        reason = str(read_json(layout.quarantine / name / "reason.json").get("reason", "unknown"))
    except (OSError, FormatError):
        reason = "unknown"
    return Quarantined(name, reason)


def _excluded(layout: RunLayout, run: dict[str, Any], now: float) -> dict[str, str]:
    events = read_node_events(layout)
    # A run on this machine has no other to go to.
    if not events or run.get("scheduler") == "local":
        return {}
    # Late: most runs have had no bad node.
    from ftslurm.recovery.exclusion import excluded_now, still_counting

    rules = run["spec"].get("recovery", {})
    counting = still_counting(events, fault_days=rules.get("node_fault_days", 7.0), now=now)
    found = excluded_now(counting, max_node_faults=rules.get("max_node_faults", 1))
    return {one.node: f"since attempt {one.attempt}, {one.why}" for one in found}
