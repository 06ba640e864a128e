"""A run of ours: what its own records say, with what Slurm says of its jobs.

Reads the run directory; the accounting rows are the caller's. Where both tell of the same, the
run's records say why and Slurm says how long: the time of a Slurm run is divided among the attempts
that began in it, and one that no attempt came of is an attempt without a number, so that nothing is
counted twice and nothing is left over. Where no trace tells of the steps, how much was lost is not
known, and neither is the goodput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Optional

from ftslurm.diagnosis import causes
from ftslurm.files import read_json
from ftslurm.recovery.actions import ENDED
from ftslurm.report.attempt_end import blamed_of, ending_of
from ftslurm.report.fleet import Goodput
from ftslurm.report.jobs import AttemptReport, JobReport, queued_s, report_of, within
from ftslurm.report.logical import Ending, LogicalJob, ending
from ftslurm.report.phases import Phases, phases
from ftslurm.report.step_times import StepTimes, read_step_times
from ftslurm.run.attempt_story import AttemptStory, overlap, tokens_between, trained
from ftslurm.run.attempts import read_decision, read_events
from ftslurm.run.layout import RunLayout
from ftslurm.run.story import RunStory
from ftslurm.run.sweep_record import format_numbers
from ftslurm.run.trained_twice import read_twice
from ftslurm.scheduler.accounting import nearest_run
from ftslurm.scheduler.job_table import JobRun
from ftslurm.scheduler.protocol import CLOCKS_S

_CANCELLED = (causes.CANCELLED_USER, causes.CANCELLED_ADMIN)


@dataclass
class _Share:
    """An attempt's part of a run of a job by Slurm; None: accounting does not know of it."""

    run: Optional[JobRun]
    start_at: Optional[float]
    end_at: Optional[float]
    is_first: bool
    is_last: bool

    @property
    def row_end(self) -> Optional[Ending]:
        """Slurm's word on how the attempt ended: of the last in a row alone."""
        return ending(self.run) if self.run is not None and self.is_last else None

    @property
    def part(self) -> float:
        """Of the row."""
        whole_s = self.run.elapsed_s if self.run is not None else 0.0
        return min(1.0, self.elapsed_s / whole_s) if whole_s else 0.0

    @property
    def elapsed_s(self) -> float:
        if self.start_at is None or self.end_at is None:
            return 0.0
        return max(0.0, self.end_at - self.start_at)


def join(
    layout: RunLayout,
    story: RunStory,
    jobs: Sequence[LogicalJob],
    *,
    now: float,
    window: tuple[Optional[float], Optional[float]] = (None, None),
) -> tuple[JobReport, Optional[Goodput]]:
    """`jobs`: all of the run, oldest first; none where accounting has nothing. No goodput where the
    records do not say what was trained. `window`: only attempts within it count."""
    story = replace(story, committed_step=_verified_step(story))
    story = replace(story, attempts=_with_last_loss(layout, story))
    shares = _shares(story, jobs, now)
    times = [read_step_times(layout.trace_file(one.number)) for one in story.attempts]
    attempts = [
        _attempt(layout, story, one, share, its)
        for one, share, its in zip(story.attempts, shares, times)
    ]  # fmt: skip
    attempts += _without_attempt(jobs, shares)
    report = _report(layout, story, jobs, attempts, times)
    report.notes += _without_row(story, shares)
    whole_s = {one.number: one.elapsed_s for one in attempts if one.number}
    report = _as_of(within(report, *window), layout, story, shares, window[1])
    report.attempts.sort(key=lambda one: one.start_at or now)
    kept = {one.number: one for one in report.attempts if one.number}
    told = [one for one in zip(story.attempts, shares, times) if one[0].number in kept]
    spent = {one.number: _phases(layout, one, share, its) for one, share, its in told}
    for number, attempt in kept.items():
        if attempt.lost_s and attempt.elapsed_s < whole_s[number]:
            attempt.lost_s = spent[number].within(*window).lost_s
    if any(_is_untold(story, one, its) for one, _, its in told):
        return report, None
    # The end of an attempt that trained for longer is not known.
    if any(its.total_s > share.elapsed_s + CLOCKS_S for _, share, its in told):
        return report, None
    return report, _goodput(report.attempts, spent, window)


def _as_of(
    report: JobReport,
    layout: RunLayout,
    story: RunStory,
    shares: Sequence[_Share],
    until: Optional[float],
) -> JobReport:
    """With how far the run was by then: of an attempt in whose midst that is, the journal dates the
    saves, and nothing dates the steps."""
    if until is None or all(share.end_at is not None and share.end_at < until for share in shares):
        return report
    begun = [
        (one, share)
        for one, share in zip(story.attempts, shares)
        if share.start_at is not None and share.start_at < until
    ]
    saved = [
        int(event["step"])
        for one, _ in begun
        for event in read_events(layout.attempt(one.number))
        if event["kind"] == "committed" and float(event["at"]) < until
    ]
    is_over = all(share.end_at is not None and share.end_at < until for _, share in begun)
    trained_to = [one.last_step for one, _ in begun if one.last_step is not None]
    return replace(
        report,
        committed_step=saved[-1] if saved else None,
        last_step=trained_to[-1] if is_over and trained_to else None,
    )


def _phases(layout: RunLayout, one: AttemptStory, share: _Share, its: StepTimes) -> Phases:
    return phases(
        share.start_at,
        share.elapsed_s,
        its,
        read_events(layout.attempt(one.number)),
        steps_lost=one.steps_lost,
        last_step=one.last_step or 0,
    )


def _report(
    layout: RunLayout,
    story: RunStory,
    jobs: Sequence[LogicalJob],
    attempts: list[AttemptReport],
    times: Sequence[StepTimes],
) -> JobReport:
    base = report_of(jobs[-1]) if jobs else None
    all_s = [seconds for its in times for seconds in its.seconds]
    return JobReport(
        job_id=base.job_id if base else (story.attempts[-1].job_id if story.attempts else ""),
        name=base.name if base else story.run_id,
        user=base.user if base else "",
        account=base.account if base else "",
        partition=base.partition if base else "",
        state=_state(story, base, attempts),
        attempts=attempts,
        run_dir=str(layout.root),
        committed_step=story.committed_step,
        last_step=story.last_step,
        step_s=sorted(all_s)[len(all_s) // 2] if all_s else None,
        twice=read_twice(layout) if len(times) > 1 and all_s else None,
    )


def _without_row(story: RunStory, shares: Sequence[_Share]) -> list[str]:
    """What has to be said where accounting is away, or has forgotten."""
    missing = [one.number for one, share in zip(story.attempts, shares) if share.run is None]
    if not missing:
        return []
    which = "it" if len(missing) == len(shares) else f"attempt {format_numbers(missing)}"
    return [
        f"accounting has no row of {which}: times are by the run's own records, GPUs by what it"
        " asks for, and what nobody saw is unknown"
    ]


def _asked_gpus(layout: RunLayout) -> int:
    """Of each node."""
    asked = read_json(layout.run_json)["spec"].get("cluster") or {}
    tasks = int(asked.get("tasks_per_node") or 1)
    return int(asked.get("gpus_per_node") or int(asked.get("gpus_per_task") or 0) * tasks)


def _without_attempt(jobs: Sequence[LogicalJob], shares: Sequence[_Share]) -> list[AttemptReport]:
    """Runs that ended before an attempt was claimed (in the prolog, say), or that wait."""
    taken = {id(share.run) for share in shares}
    return [
        told
        for job in jobs
        for run, told in zip(job.attempts, report_of(job).attempts)
        if id(run) not in taken
    ]


def _is_untold(story: RunStory, attempt: AttemptStory, times: StepTimes) -> bool:
    """It may have trained, and no trace says what."""
    if times.seconds:
        return False
    if story.program:
        return True
    return (attempt.last_step or 0) > (attempt.restored_step or 0)


def _verified_step(story: RunStory) -> Optional[int]:
    """None where the run was given up as nothing that it had saved could be restored."""
    last = story.attempts[-1] if story.attempts else None
    if last is None or story.state != "stopped" or last.cause != causes.CHECKPOINT:
        return story.committed_step
    has_begun = last.restored_step is not None or bool(last.last_step)
    return story.committed_step if has_begun else None


def _with_last_loss(layout: RunLayout, story: RunStory) -> list[AttemptStory]:
    """Of a run that has ended for good, what was trained past the last checkpoint is lost as well,
    though nobody trains it again; also of attempts before the last, which may have trained nothing.
    """
    if story.state not in ("stopped", "cancelled") or not story.attempts:
        return story.attempts
    last = max(one.last_step or 0 for one in story.attempts)
    uncommitted = range((story.committed_step or 0) + 1, last + 1)
    told = []
    for place, one in enumerate(story.attempts):
        later = [trained(item) for item in story.attempts[place + 1 :]]
        lost = overlap(trained(one), [*later, uncommitted])
        if lost > one.steps_lost:
            end = one.last_step or 0
            tokens = tokens_between(layout, story.attempts, end - lost, end)
            one = replace(one, steps_lost=lost, tokens_lost=tokens)
        told.append(one)
    return told


def _state(story: RunStory, base: Optional[JobReport], attempts: Sequence[AttemptReport]) -> str:
    """A run that is done is done, whatever its last job came to."""
    words = {"done": "completed", "stopped": "failed", "cancelled": "cancelled",
             "running": "running", "quiet": "running", "waiting": "waiting", "paused": "waiting",
             "never started": "waiting"}  # fmt: skip
    if story.state == "stopped" and story.attempts:
        cause = next((one.cause for one in reversed(attempts) if one.number), None)
        if story.attempts[-1].action == ENDED or cause in _CANCELLED:
            return "cancelled"  # by an operator's order, or with scancel
    if story.state in ("done", "stopped", "cancelled") or base is None:
        return words.get(story.state, "unknown")
    return base.state


def _attempt(
    layout: RunLayout, whole: RunStory, story: AttemptStory, share: _Share, times: StepTimes
) -> AttemptReport:
    run = share.run
    decision = read_decision(layout.attempt(story.number))
    asked_by = "time_limit" if decision.get("limit_passed") else decision.get("asked_by")
    end = ending_of(story, share.row_end, asked_by=asked_by)
    lost_s = times.last_s(min(story.steps_lost, len(times.seconds)))
    return AttemptReport(
        state=story.ended,
        cause=end.cause,
        sentence=end.sentence,
        start_at=share.start_at,
        end_at=share.end_at,
        wait_s=queued_s(run) if run is not None and share.is_first else None,
        elapsed_s=share.elapsed_s,
        num_nodes=(run.num_nodes if run else 0) or len(story.nodes),
        gpus=run.gpus if run else _asked_gpus(layout) * len(story.nodes),
        nodes=",".join(story.nodes),
        node=end.node,
        number=story.number,
        rank=_rank(story),
        evidence=list(story.evidence),
        committed_step=story.committed_step,
        steps_lost=story.steps_lost,
        tokens_lost=story.tokens_lost,
        lost_s=None if _is_untold(whole, story, times) else lost_s,
        mttd_s=story.timeline.mttd_s,
        rto_s=story.timeline.rto_s,
        is_requeued=story.action in ("requeued", "restart"),
        more_node_s=run.more_node_s * share.part if run else 0.0,
        more_gpu_s=run.more_gpu_s * share.part if run else 0.0,
    )


def _rank(story: AttemptStory) -> Optional[int]:
    """That failed first; one that hangs says nothing, and is known by those that wait for it."""
    if story.first_failure is not None:
        return story.first_failure.rank
    rank = blamed_of(story).get("rank")
    return rank if isinstance(rank, int) else None


def _shares(story: RunStory, jobs: Sequence[LogicalJob], now: float) -> list[_Share]:
    """From the start of its Slurm run, or its claim, to the next claim in it, or its end."""
    attempts = story.attempts
    runs = [_run_of(one, jobs) for one in attempts]
    shares = []
    for place, one in enumerate(attempts):
        run = runs[place]
        is_first = place == 0 or runs[place - 1] is not run or run is None
        following = attempts[place + 1] if place + 1 < len(attempts) else None
        same_next = following is not None and run is not None and runs[place + 1] is run
        start_at = (run.start_at if run is not None and is_first else None) or one.claimed_at
        if same_next and following is not None:
            end_at = following.claimed_at
        elif run is not None:
            end_at = run.end_at or now
        elif following is None and story.state == "running":
            end_at = now
        else:
            line = one.timeline
            last_sign_at = story.last_sign_at if following is None else None
            end_at = line.gone or line.decided or last_sign_at
        shares.append(_Share(run, start_at, end_at, is_first, not same_next))
    return shares


def _run_of(attempt: AttemptStory, jobs: Sequence[LogicalJob]) -> Optional[JobRun]:
    """By its time, too: below 24.11 no row says which restart it is; and a number comes back with
    another job, with a restart count that begins anew."""
    runs = [
        run
        for job in jobs
        for run in job.attempts
        if attempt.job_id in (run.job_id, run.raw_id)
        and run.restarts in (None, attempt.restart_count)
    ]
    if attempt.claimed_at is None:
        return next((run for run in runs if run.restarts is not None), None)
    return nearest_run(runs, attempt.claimed_at)


def _goodput(
    attempts: Sequence[AttemptReport],
    spent: Mapping[int, Phases],
    window: tuple[Optional[float], Optional[float]],
) -> Goodput:
    """Of all that was allocated in the window, in node-seconds."""
    found = Goodput()
    for one in attempts:
        node_s = 3600.0 * one.node_hours
        if one.number is None:  # a start that no attempt came of
            found.restart_s += node_s
        elif one.elapsed_s:
            its = spent[one.number].within(*window)
            # Nodes on the average: a job that was resized had more of them before.
            for name, value in vars(its).items():
                setattr(its, name, value * node_s / one.elapsed_s)
            found.add(its)
        found.queue_s += (one.wait_s or 0.0) * one.num_nodes
    return found
