"""From what is on record of a run to its samples. Pure.

A figure that no record tells is left out, never given as 0: an alert on it stays silent, and one on
its absence speaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Optional

from ftslurm.metrics.families import FAMILIES, SUMMARY, TIER
from ftslurm.metrics.reading import Facts
from ftslurm.metrics.saves import QUANTILES, Saves, quantile, read_saves
from ftslurm.recovery.actions import STOP
from ftslurm.report.jobs import AttemptReport
from ftslurm.run.attempt_story import AttemptStory
from ftslurm.run.timeline import first_of

SHARED = "shared"
"""The one tier there is: the run directory's file system."""
ACTIVE = ("running", "quiet")
WAITING = ("waiting", "paused", "never started")


@dataclass(frozen=True)
class Sample:
    family: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)
    suffix: str = ""
    """_sum or _count, of a summary."""


def samples_of(facts: Facts) -> list[Sample]:
    """All that is known of one run, but for run_id, which each sample gets."""
    found: list[Sample] = []
    for name, value in _plain(facts):
        if value is not None:
            tier = {"tier": SHARED} if FAMILIES[name].labels == TIER else {}
            found.append(Sample(name, float(value), tier))
    saves = read_saves(facts.events)
    found += _summary("checkpoint_save_seconds", saves.took_s)
    found += _summary("checkpoint_load_seconds", saves.loads_s)
    job, goodput = facts.report.job, facts.report.goodput
    job_id = facts.story.attempts[-1].job_id if facts.story.attempts else ""
    labels = {"user": facts.user, "cluster": facts.cluster, "job_id": job_id}
    found.append(Sample("run_info", 1.0, labels))
    for cause, count in job.causes().items() if job else ():
        found.append(Sample("attempts_ended", float(count), {"cause": cause}))
    twice = job.twice if job else None
    if twice is not None:
        for state, steps in (("equal", twice.equal), ("differ", twice.differ)):
            found.append(Sample("fingerprint_steps", float(steps), {"state": state}))
    for part, seconds in asdict(goodput).items() if goodput else ():
        found.append(Sample("node_seconds", seconds, {"part": part.removesuffix("_s")}))
    return found


def _plain(facts: Facts) -> Iterator[tuple[str, Optional[float]]]:
    """Those that have one series a run, or one a tier."""
    story = facts.story
    yield from _state(facts)
    yield "step", story.last_step
    yield "steps_planned", story.steps
    newest = story.attempts[-1] if story.attempts else None
    yield "restored_step", newest.restored_step if newest else None
    yield "tokens_per_second", story.tokens_per_s if is_training(facts) else None
    yield from _checkpoints(facts)
    yield from _losses(facts)
    yield from _failure(facts)


def _state(facts: Facts) -> Iterator[tuple[str, Optional[float]]]:
    story = facts.story
    action = story.attempts[-1].action if story.attempts else None
    yield "metrics_timestamp_seconds", facts.now
    yield "run_active", _is_on(facts)
    # A program's steps nobody sees.
    yield "run_training", None if story.program else is_training(facts)
    yield "run_waiting", story.state in WAITING and not facts.is_gone
    yield "run_finished", story.state == "done"
    yield "run_needs_person", facts.is_gone or (story.state == "stopped" and action == STOP)
    yield "last_sign_timestamp_seconds", story.last_sign_at


def _is_on(facts: Facts) -> bool:
    return facts.story.state in ACTIVE and not facts.is_gone


def is_training(facts: Facts) -> bool:
    """The newest attempt has trained a step and has not ended. One that hangs trains, too."""
    attempts = facts.story.attempts
    if not attempts or attempts[-1].ended != "running":
        return False
    return _is_on(facts) and first_of(facts.newest_events, "first_step") is not None


def _checkpoints(facts: Facts) -> Iterator[tuple[str, Optional[float]]]:
    if facts.story.program:
        return  # what it keeps is its own
    saves, story = read_saves(facts.events), facts.story
    yield "checkpoint_last_success_timestamp_seconds", saves.committed_at
    yield "checkpoint_last_success_step", story.committed_step
    yield "checkpoint_planned_interval_seconds", facts.planned_s
    since = None if facts.uncommitted_s is None else facts.now - facts.uncommitted_s
    yield "checkpoint_uncommitted_since_timestamp_seconds", since if is_training(facts) else None
    yield "checkpoint_durability_lag_seconds", saves.last_took_s
    yield "checkpoint_bytes", saves.last_bytes
    yield "checkpoint_disk_free_bytes", facts.free_bytes
    if story.attempts:
        yield from _counts(facts, saves)


def _counts(facts: Facts, saves: Saves) -> Iterator[tuple[str, Optional[float]]]:
    """What is 0 as long as it has not happened, once there is a journal to say so."""
    yield "checkpoint_queue_depth", facts.under_way
    yield "checkpoint_unfinished", facts.unfinished
    yield "checkpoint_saves_failed_total", saves.failed
    yield "checkpoint_saves_failed_in_a_row", saves.failed_in_a_row
    yield "checkpoint_saves_skipped_total", saves.skipped
    yield "checkpoint_quarantined", len(facts.story.quarantined)
    yield "checkpoint_fallbacks_total", saves.fallbacks
    yield "checkpoint_last_fallback_timestamp_seconds", saves.fell_back_at


def _losses(facts: Facts) -> Iterator[tuple[str, Optional[float]]]:
    story, job = facts.story, facts.report.job
    if is_training(facts):
        newest = story.attempts[-1]
        back_to = max(story.committed_step or 0, newest.restored_step or 0)
        yield "rpo_steps", max(0, (newest.last_step or 0) - back_to)
        if facts.tokens is not None and facts.committed_tokens is not None:
            yield "rpo_tokens", max(0, facts.tokens - facts.committed_tokens)
    if job is None or story.program or not story.attempts:
        return
    yield "lost_steps_total", sum(one.steps_lost or 0 for one in job.attempts)
    yield "lost_tokens_total", sum(one.tokens_lost or 0 for one in job.attempts)


def _failure(facts: Facts) -> Iterator[tuple[str, Optional[float]]]:
    """The newest failure, and what came of it."""
    story, job, goodput = facts.story, facts.report.job, facts.report.goodput
    if story.attempts:
        yield "attempts_total", len(story.attempts)
    yield "goodput_ratio", goodput.share if goodput else None
    twice = job.twice if job else None
    yield "fingerprint_last_differ_timestamp_seconds", twice.differed_at or None if twice else None
    failures = [one for one in job.failures if one.number is not None] if job else []
    if not failures:
        return
    failure = failures[-1]
    line = next(one.timeline for one in story.attempts if one.number == failure.number)
    yield "last_failure_timestamp_seconds", line.failed
    yield "last_recovery_timestamp_seconds", line.first_step
    yield "mttd_seconds", failure.mttd_s
    yield "rto_seconds", failure.rto_s
    if not story.program:
        yield "last_failure_lost_steps", failure.steps_lost
        yield "last_failure_lost_tokens", failure.tokens_lost
        yield "down_since_timestamp_seconds", _down_since(facts, failures)


def _down_since(facts: Facts, failures: Sequence[AttemptReport]) -> Optional[float]:
    """The first failure since the last new step; None where the run trains or is over."""
    if facts.is_gone or facts.story.state not in (*ACTIVE, "waiting") or is_training(facts):
        return None
    failed = {one.number for one in failures}
    since: Optional[float] = None
    for one in reversed(facts.story.attempts):
        if one.number in failed:
            since = one.timeline.failed or since
        elif one.ended != "running":
            return since  # asked to leave: nothing has failed before that matters now
        if _has_trained(one):
            return since
    return since


def _has_trained(one: AttemptStory) -> bool:
    return (one.last_step or 0) > (one.restored_step or 0)


def _summary(name: str, values: Sequence[float]) -> Iterator[Sample]:
    assert FAMILIES[name].kind == SUMMARY
    if not values:
        return
    labels = {"tier": SHARED}
    for q in QUANTILES:
        yield Sample(name, quantile(values, q), {**labels, "quantile": str(q)})
    yield Sample(name, sum(values), labels, "_sum")
    yield Sample(name, float(len(values)), labels, "_count")
