"""All that is on record of a run for its metrics, read by the functions of `status` and `report`.

Reads only. What the report tells costs more than the rest (a whole trace, the accounting), so it
is read anew when an attempt has begun or ended, and else once in a while. What the scheduler says
of a run that gives no sign, job_look.py asks and remembers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from ftslurm.checkpoint.published import step_folders
from ftslurm.files import list_folder
from ftslurm.metrics.job_look import JobLooks
from ftslurm.recovery.on_event import uncommitted_s
from ftslurm.report.fleet import Goodput
from ftslurm.report.jobs import JobReport
from ftslurm.report.sources import Reading
from ftslurm.report.wanted import Wanted
from ftslurm.run.attempts import Progress, read_events, read_progress
from ftslurm.run.jobs import read_jobs
from ftslurm.run.layout import RunLayout, parse_temporary_name
from ftslurm.run.planned import planned_interval_s
from ftslurm.run.record import read_record
from ftslurm.run.story import RunStory, read_story
from ftslurm.run.trace_tail import last_row, tokens_at
from ftslurm.scheduler.sacct import Query

REPORT_EVERY_S = 300.0
ANSWER_S = 20.0
"""sacct may be silent so long: the file of metrics waits for it."""
REPORT_SHARE = 0.01
"""Of the time, at most, that is spent on reading the report."""
QUICK_S = 5.0
CHANGED_SHARE = 0.1
"""And of what takes longer than that, where something has changed: each restart changes several
things one after the other, and a trace of a million steps takes half a minute."""


@dataclass(frozen=True)
class Report:
    """What `ftslurm report RUN` tells; `job` is None where the run is left out of it."""

    job: Optional[JobReport]
    goodput: Optional[Goodput]
    """None: no record says what was trained, or there was no time for it."""
    notes: list[str]


@dataclass(frozen=True)
class Facts:
    """Of one run, as read at `now`; None: no record tells."""

    now: float
    story: RunStory
    is_gone: bool
    """No job of it is left that could go on, as the scheduler says where it is asked."""
    user: str
    cluster: str
    report: Report
    events: list[dict[str, Any]] = field(default_factory=list)
    """Of all attempts, oldest first."""
    newest_events: list[dict[str, Any]] = field(default_factory=list)
    uncommitted_s: Optional[float] = None
    planned_s: Optional[float] = None
    under_way: int = 0
    unfinished: int = 0
    free_bytes: Optional[int] = None
    tokens: Optional[int] = None
    committed_tokens: Optional[int] = None
    """At the step that the run would go back to."""


class RunReader:
    """One run; remembers its report."""

    def __init__(
        self,
        layout: RunLayout,
        looks: JobLooks,
        *,
        environ: Mapping[str, str] = os.environ,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout = layout
        self._looks = looks
        self._environ, self._now, self._clock = environ, now, clock
        self._report: Optional[Report] = None
        self._told_of: object = None
        self._again_at = self._soon_at = 0.0

    def read(self, *, in_haste: bool = False) -> Facts:
        """OSError or FtslurmError where the run cannot be read. `in_haste`: by what is remembered
        of the report, however old it is."""
        layout, now = self.layout, self._now()
        record = read_record(layout)
        story = read_story(layout, now=now)
        report = self._report if in_haste and self._report else self._current_report(story)
        progress, newest, uncommitted = None, 0, None
        if story.attempts:
            newest = story.attempts[-1].number
            progress = read_progress(layout.attempt(newest))
            uncommitted = uncommitted_s(layout, newest, now_s=now)
        journals = {one.number: read_events(layout.attempt(one.number)) for one in story.attempts}
        planned_s = None
        if not story.program:
            step_s = report.job.step_s if report.job else None
            planned_s = planned_interval_s(record.spec.checkpoint, progress, step_s)
        tokens, committed_tokens = _tokens(layout, story)
        under_way, unfinished = _unfinished(layout, story, newest)
        jobs = read_jobs(layout)
        newest_job = jobs[-1].job_id if jobs else ""
        return Facts(
            now=now,
            story=story,
            is_gone=self._looks.is_gone(layout.root, story.state, newest_job),
            user=_owner(layout),
            cluster=self._environ.get("SLURM_CLUSTER_NAME", ""),
            report=report,
            events=[event for events in journals.values() for event in events],
            newest_events=journals.get(newest, []),
            uncommitted_s=uncommitted,
            planned_s=planned_s,
            under_way=under_way,
            unfinished=unfinished,
            free_bytes=_free_bytes(layout, progress),
            tokens=tokens,
            committed_tokens=committed_tokens,
        )

    def _current_report(self, story: RunStory) -> Report:
        told_of = (story.state, [(one.number, one.ended, one.timeline) for one in story.attempts])
        began_at = self._clock()
        has_changed = told_of != self._told_of and began_at >= self._soon_at
        if self._report is None or has_changed or began_at >= self._again_at:
            self._report, self._told_of = read_report(self.layout, now=self._now), told_of
            took_s = self._clock() - began_at
            self._soon_at = began_at + max(0.0, took_s - QUICK_S) / CHANGED_SHARE
            self._again_at = began_at + max(REPORT_EVERY_S, took_s / REPORT_SHARE)
        return self._report


def read_report(layout: RunLayout, *, now: Callable[[], float] = time.time) -> Report:
    """As `ftslurm report RUN` reads it."""
    query = Query(answer_s=ANSWER_S)
    reading = Reading(Wanted(runs=[layout.root], is_named=True), query, now=now)
    jobs = [job for job in reading.reports() if job.run_dir == str(layout.root)]
    goodput = reading.fleet.goodput
    is_told = bool(jobs) and not reading.fleet.runs_untold and goodput.allocated_s > 0
    return Report(
        job=jobs[0] if jobs else None,
        goodput=goodput if is_told else None,
        notes=reading.source.notes,
    )


def _owner(layout: RunLayout) -> str:
    try:
        return layout.root.owner()
    except KeyError:
        return str(layout.root.stat().st_uid)


def _tokens(layout: RunLayout, story: RunStory) -> tuple[Optional[int], Optional[int]]:
    """Consumed by now, and at the newest committed step."""
    rows = (last_row(layout.trace_file(one.number)) for one in reversed(story.attempts))
    row = next((row for row in rows if row and row.get("tokens") is not None), None)
    if row is None:
        return None, None
    if not story.committed_step:
        return int(row["tokens"]), 0
    return int(row["tokens"]), next(_tokens_at(layout, story, story.committed_step), None)


def _tokens_at(layout: RunLayout, story: RunStory, step: int) -> Iterator[int]:
    for one in reversed(story.attempts):
        found = tokens_at(layout.trace_file(one.number), step)
        if found is not None:
            yield found


def _unfinished(layout: RunLayout, story: RunStory, newest: int) -> tuple[int, int]:
    """Saves of the newest attempt that are under way; all versions without a commit."""
    try:
        names = list_folder(layout.steps)
    except FileNotFoundError:
        return 0, 0
    attempts = [named[1] for named in map(parse_temporary_name, names) if named]
    is_over = not story.attempts or story.attempts[-1].ended != "running"
    under_way = 0 if is_over else attempts.count(newest)
    torn = len(step_folders(layout)) - len(story.committed_steps)
    return under_way, len(attempts) + max(0, torn)


def _free_bytes(layout: RunLayout, progress: Optional[Progress]) -> Optional[int]:
    """For this user, whatever a quota leaves of it: statvfs(3) knows of none on most shared file
    systems. A program has no checkpoints of ours that would need it."""
    if progress is None:
        return None
    disk = os.statvfs(layout.root)
    return disk.f_bavail * disk.f_frsize
