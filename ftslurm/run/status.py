"""`ftslurm status RUN`: where a run stands and what happened to it, attempt by attempt.

Reads the run directory only: no Slurm command, nothing written, so that it may be asked at any time
from anywhere. What only Slurm knows (is the job still queued?) it does not guess.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ftslurm.checkpoint.published import published_steps
from ftslurm.errors import EXIT_OK, RunError
from ftslurm.files import read_json
from ftslurm.run.acts import STATE_AFTER, Act, newest_act
from ftslurm.run.attempts import (
    Attempt,
    Outcome,
    Progress,
    numbers,
    read_attempt,
    read_events,
    read_outcome,
    read_progress,
)
from ftslurm.run.layout import RunLayout
from ftslurm.run.trouble import storage_trouble

QUIET_S = 120.0
"""A run that gave no sign for so long is called quiet instead of running."""

_TAIL_BYTES = 65_536


@dataclass(frozen=True)
class AttemptStory:
    """One attempt, as a person would tell it."""

    number: int
    job_id: str
    restart_count: int
    nodes: list[str]
    claimed_at: Optional[float]
    restored_step: Optional[int]
    """None: it began at step 0, or never got so far."""
    last_step: Optional[int]
    """Steps applied when it ended, or by now."""
    committed_step: Optional[int]
    """Newest step it committed itself."""
    ended: str
    """finished | stopped | failed | killed | running"""
    signal: Optional[str]
    order: Optional[str]
    """stop | pause: an operator's, which it obeyed."""
    action: Optional[str]
    """Word of the decision that followed; None: there was none (yet)."""
    reason: str
    steps_lost: int
    """Trained here and trained again by the next attempt."""


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
    committed_step: Optional[int]
    steps_lost: int
    loss: Optional[float]
    tokens_per_s: Optional[float]
    last_sign_at: Optional[float]
    committed_steps: list[int]
    quarantined: list[str]
    attempts: list[AttemptStory]
    storage: Optional[str] = None
    """What is wrong with the run's storage, as far as can be seen now."""


def main(argv: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ftslurm status",
        description="Where a run stands and what happened to it.",
        epilog="example: ftslurm status runs/gpt-20260301-120000 --json",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--json", action="store_true", help="for programs; schema_version 1")
    options = parser.parse_args(argv)
    story = read_story(RunLayout(options.run), now=time.time())
    if options.json:
        record = {"schema_version": 1, **dataclasses.asdict(story)}
        print(json.dumps(record, indent=1, sort_keys=True))  # noqa: T201
    else:
        print(render_story(story, now=time.time()))  # noqa: T201
    return EXIT_OK


def read_story(layout: RunLayout, *, now: float) -> RunStory:
    run = _read_run(layout)
    attempts = [_read_attempt_story(layout, number) for number in numbers(layout)]
    attempts = _with_steps_lost(attempts)
    committed = sorted(item.step for item in published_steps(layout))
    last = read_progress(layout.attempt(attempts[-1].number)) if attempts else None
    last_sign_at = _last_sign_at(last, attempts)
    program = [str(word) for word in run["spec"].get("program") or []]
    if program:
        attempts = [dataclasses.replace(attempt, last_step=None) for attempt in attempts]
        last_sign_at = max(
            filter(None, (last_sign_at, _last_word_at(layout, attempts))), default=None
        )
    return RunStory(
        run_id=str(run.get("run_id", layout.root.resolve().name)),
        state=_state(layout.done.exists(), attempts, newest_act(layout), last_sign_at, now),
        program=program,
        steps=None if program else int(run["spec"]["steps"]),
        last_step=None
        if program
        else max((item.last_step or 0 for item in attempts), default=None),
        committed_step=committed[-1] if committed else None,
        steps_lost=sum(item.steps_lost for item in attempts),
        loss=last.loss if last else None,
        tokens_per_s=last.tokens_per_s if last else None,
        last_sign_at=last_sign_at,
        committed_steps=committed,
        quarantined=_names(layout.quarantine),
        attempts=attempts,
        storage=storage_trouble(layout, attempts[-1].number) if attempts else None,
    )


def render_story(story: RunStory, *, now: float) -> str:
    lines = [f"{story.run_id}: {_headline(story, now)}"]
    if story.storage:
        lines.append(f"storage: {story.storage}")
    if story.program:
        return "\n".join([*lines, *_program_lines(story)])
    committed = "nothing committed yet"
    if story.committed_step is not None:
        kept = ", ".join(str(step) for step in story.committed_steps[-5:])
        committed = f"newest committed step {story.committed_step} (kept: {kept})"
    lines.append(f"step {story.last_step or 0} of {story.steps}, {committed}")
    if story.loss is not None:
        speed = f", {story.tokens_per_s:.0f} tokens/s" if story.tokens_per_s else ""
        lines.append(f"loss {story.loss:.4f}{speed}")
    for attempt in story.attempts:
        lines.extend(_attempt_lines(attempt))
    lines.append(f"{_attempts(story)}, {story.steps_lost} steps trained twice")
    if story.quarantined:
        lines.append(f"quarantined: {', '.join(story.quarantined)}")
    return "\n".join(lines)


def _program_lines(story: RunStory) -> Iterator[str]:
    """What is known of a program: how its attempts ended."""
    yield f"program: {shlex.join(story.program)}"
    for attempt in story.attempts:
        yield f"  {_attempt_name(attempt)}: {attempt.ended}{_asked(attempt)}"
        if attempt.action:
            yield f"    {attempt.action}: {attempt.reason}"
    yield _attempts(story)


def _asked(attempt: AttemptStory) -> str:
    """Who asked it to leave."""
    if attempt.order:
        return f" by the order `{attempt.order}`"
    return f" on {attempt.signal}" if attempt.signal else ""


def _attempts(story: RunStory) -> str:
    count = len(story.attempts)
    return f"{count} attempt{'' if count == 1 else 's'}"


def _attempt_name(attempt: AttemptStory) -> str:
    restart = f" restart {attempt.restart_count}" if attempt.restart_count else ""
    return f"attempt {attempt.number} (job {attempt.job_id}{restart}, {','.join(attempt.nodes)})"


def _headline(story: RunStory, now: float) -> str:
    if story.last_sign_at is None or story.state in ("done", "never started"):
        return story.state
    return f"{story.state}, last sign {_span(now - story.last_sign_at)} ago"


def _attempt_lines(attempt: AttemptStory) -> list[str]:
    begun = "step 0" if attempt.restored_step is None else f"step {attempt.restored_step}"
    reached = "no step" if attempt.last_step is None else f"step {attempt.last_step}"
    asked = _asked(attempt)
    lost = f", {attempt.steps_lost} steps lost" if attempt.steps_lost else ""
    lines = [f"  {_attempt_name(attempt)}: from {begun} to {reached}, {attempt.ended}{asked}{lost}"]
    if attempt.action:
        lines.append(f"    {attempt.action}: {attempt.reason}")
    return lines


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _read_run(layout: RunLayout) -> dict[str, Any]:
    try:
        return read_json(layout.run_json)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"`{layout.root}` is no run directory, it has no run.json; name the folder that "
            "`ftslurm submit` printed, e.g. runs/RUN_ID"
        ) from None


def _read_attempt_story(layout: RunLayout, number: int) -> AttemptStory:
    paths = layout.attempt(number)
    attempt = _read_claim(layout, number)
    outcome, progress = read_outcome(paths), read_progress(paths)
    events = read_events(paths)
    decision = _read_decision(paths.decision_json)
    committed = [int(event["step"]) for event in events if event["kind"] == "committed"]
    return AttemptStory(
        number=number,
        job_id=attempt.job_id if attempt else "?",
        restart_count=attempt.restart_count if attempt else 0,
        nodes=attempt.nodes if attempt else [],
        claimed_at=attempt.claimed_at if attempt else None,
        restored_step=_restored_step(events, progress),
        last_step=_last_step(layout.trace_file(number), outcome, progress),
        committed_step=max(committed, default=None),
        ended=_how_it_ended(outcome, decision),
        signal=_signal(events, outcome),
        order=outcome.order if outcome else None,
        action=decision.get("action"),
        reason=str(decision.get("reason", "")),
        steps_lost=0,
    )


def _read_claim(layout: RunLayout, number: int) -> Optional[Attempt]:
    """None for an attempt whose claim was cut short."""
    try:
        return read_attempt(layout, number)
    except FileNotFoundError:
        return None


def _read_decision(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}


def _restored_step(events: Sequence[dict[str, Any]], progress: Optional[Progress]) -> Optional[int]:
    for event in reversed(events):
        if event["kind"] == "restored" and event.get("step") is not None:
            return int(event["step"])
    return progress.restored_step if progress else None


def _last_step(
    trace: Path, outcome: Optional[Outcome], progress: Optional[Progress]
) -> Optional[int]:
    """The highest of what is on record: progress lags, an outcome may be missing."""
    known = [_last_traced_step(trace)]
    known.append(outcome.step if outcome else None)
    known.append(progress.step if progress else None)
    return max((step for step in known if step is not None), default=None)


def _last_traced_step(path: Path) -> Optional[int]:
    """Step of the last whole line; only the file's end is read, whatever its size."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _TAIL_BYTES))
            lines = stream.read().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue  # torn by a power cut, or cut by the window
    return None


def _how_it_ended(outcome: Optional[Outcome], decision: dict[str, Any]) -> str:
    if outcome is not None:
        return outcome.result
    if not decision:
        return "running"
    # Told to leave, its ranks were gone before they could say how far they had come.
    return "killed" if decision.get("cause") == "asked_to_leave" else "failed"


def _signal(events: Sequence[dict[str, Any]], outcome: Optional[Outcome]) -> Optional[str]:
    if outcome is not None and outcome.signal:
        return outcome.signal
    for event in events:
        if event["kind"] == "signal":
            return str(event.get("signal") or event.get("name") or "signal")
    return None


def _with_steps_lost(attempts: list[AttemptStory]) -> list[AttemptStory]:
    told = []
    for place, attempt in enumerate(attempts):
        following = attempts[place + 1 :]
        # Its batch shell was killed with it (end of grace, lost node): nobody decided.
        ended = "killed" if following and attempt.ended == "running" else attempt.ended
        lost = _overlap(_trained(attempt), [_trained(later) for later in following])
        told.append(dataclasses.replace(attempt, ended=ended, steps_lost=lost))
    return told


def _trained(attempt: AttemptStory) -> range:
    """Steps that the attempt trained, 1 for the first of a run."""
    return range((attempt.restored_step or 0) + 1, (attempt.last_step or 0) + 1)


def _overlap(steps: range, others: Sequence[range]) -> int:
    """How many of `steps` are in at least one of `others`."""
    count, position = 0, steps.start
    for other in sorted(others, key=lambda item: item.start):
        low, high = max(position, other.start), min(steps.stop, other.stop)
        if low < high:
            count += high - low
            position = high
    return count


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
