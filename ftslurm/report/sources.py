"""What a report is made of: the rows of accounting and the records of runs, read and joined.

Reads only. Runs are joined with accounting by the job ids that they have written down themselves.
Where accounting does not answer, slurmctld is asked, and that is said.
"""

from __future__ import annotations

import getpass
import re
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Optional

from ftslurm.errors import FtslurmError, SchedulerError
from ftslurm.report.drains import drains
from ftslurm.report.fleet import Fleet
from ftslurm.report.fold import fold, split_waiting
from ftslurm.report.jobs import JobReport, report_of, within
from ftslurm.report.joined import join
from ftslurm.report.logical import LogicalJob
from ftslurm.report.sweeps import Sweeps
from ftslurm.report.wanted import Wanted
from ftslurm.run.attempt_story import AttemptStory
from ftslurm.run.attempts import claimed_numbers, read_progress
from ftslurm.run.jobs import read_jobs
from ftslurm.run.layout import RunLayout
from ftslurm.run.story import read_story
from ftslurm.scheduler.hostlist import expand
from ftslurm.scheduler.job_table import JobRun
from ftslurm.scheduler.node_events import read_events
from ftslurm.scheduler.protocol import CLOCKS_S
from ftslurm.scheduler.sacct import (
    Query,
    jobs_without_accounting,
    open_table,
    sees_others,
    when_at,
)

DAMAGE = (FtslurmError, OSError, KeyError, TypeError, ValueError, AttributeError)
"""What a run whose records are damaged, or of a later version, comes to when they are read."""

FILE_TIMES_S = 86_400.0
"""How far the clock of a file server, which dates its files, may be off: nobody sets Slurm's by it.
"""

_NAMES_HELD = 1_000_000
_IDS_AT_ONCE = 1_000
"""Job ids of one sacct: an argument has 128 kB."""


@dataclass
class Source:
    """`accounting`: sacct, scontrol or none; `notes`: what that means for the figures."""

    accounting: str = "none"
    is_whole: bool = True
    """False: the table broke off."""
    notes: list[str] = field(default_factory=list)


class Reading:
    """Reads all that is wanted; `fleet` is complete when `reports` has come to its end."""

    def __init__(
        self,
        wanted: Wanted,
        query: Query,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._wanted, self._query, self._now = wanted, query, now
        self.source = Source(notes=list(wanted.notes))
        self.fleet = Fleet()
        self.sweeps = Sweeps(self.source.notes)
        """Complete as `fleet` is."""
        self.found_nothing = False
        """None of what was named is known."""
        self._window = (None, None) if wanted.is_named else self._bounds()
        self._nodes = NodeNames()

    def reports(self) -> Iterator[JobReport]:
        """Foreign jobs as they come, then the runs."""
        runs = {folder: _queued_at(folder, self.source) for folder in self._wanted.runs}
        runs = {**self._near(), **runs}
        # Job ids begin anew where slurmctld has lost its state.
        owners: dict[str, list[Path]] = {}
        for folder, queued in runs.items():
            for job_id in queued:
                owners.setdefault(job_id, []).append(folder)
        if not self._wanted.is_named:
            seen: set[Path] = set()
            for job in split_waiting(fold(self._rows(self._query)), owners):
                folders = _owners(job, owners)
                seen.update(folders)
                if not folders:
                    yield from self._counted(within(report_of(job), *self._window))
            runs = {one: ids for one, ids in runs.items() if one in seen or self._is_within(one)}
            if self.source.accounting == "sacct":
                self._read_drains()
        # All rows of a run, also those outside the window: its attempts are told by them.
        # A het job whole, though a part of it was named: its numbers are those of all parts.
        named = {job_id.partition("+")[0] for job_id in self._wanted.jobs}
        ids = sorted({*named, *(job_id for known in runs.values() for job_id in known)})
        missing = set(named)
        held: dict[Path, list[LogicalJob]] = {folder: [] for folder in runs}
        for job in split_waiting(self._jobs_of(ids), owners.keys() | named):
            names = _names(job)
            missing -= names
            folders = [folder for folder in _owners(job, owners) if folder in held]
            for folder in folders:
                held[folder].append(job)
            if not folders and names & named:
                yield from self._counted(report_of(job))
        own = _of_each(held, runs)
        for folder in runs:
            for report in self._of_run(folder, own[folder], named):
                missing -= _named_by(runs[folder])
                yield report
        for job_id in sorted(missing):
            self.source.notes.append(f"nothing is known of job {job_id}")
        self._note_hidden(missing)
        self.found_nothing = bool(missing) and not self.fleet.jobs

    def _near(self) -> dict[Path, dict[str, float]]:
        """Runs below the folders of runs that a named job is of, which tell more of it than Slurm:
        when each of their jobs was noted. What cannot be read there was not asked for."""
        found = {}
        for folder in self._wanted.near:
            queued = _queued_at(folder, Source())
            if _named_by(queued) & {*self._wanted.jobs}:
                found[folder] = queued
        return found

    def _note_hidden(self, missing: Collection[str]) -> None:
        """Where jobs of others were asked for, or might be those that are missing."""
        if self.source.accounting != "sacct" or (self._wanted.is_named and not missing):
            return
        try:
            user = getpass.getuser()
        except (KeyError, OSError):
            return  # a number without a name has no jobs of its own to tell others' from
        if self._query.user == user:
            return
        try:
            sees = sees_others(user)
        except SchedulerError:  # no sacctmgr here, or it is silent
            sees = None
        if sees is False:
            self.source.notes.append(
                f"slurmdbd shows {user} no jobs of others (PrivateData=jobs), but for accounts that"
                " one coordinates: ask an operator for a report of all"
            )
        elif sees is None and not self.fleet.by["user"].keys() - {user}:
            self.source.notes.append(
                "no job of another user was found; it may be that slurmdbd hides them"
                " (PrivateData=jobs), which its sacctmgr does not tell: ask an operator"
            )

    def _bounds(self) -> tuple[Optional[float], Optional[float]]:
        now = self._now()
        told: list[Optional[float]] = []
        for text in (self._query.since, self._query.until):
            if text == "now":  # no bound: the clock of who asks may be behind Slurm's
                told.append(None)
                continue
            told.append(when_at(text, now))
            if told[-1] is None:
                self.source.notes.append(
                    f"`{text}` is understood by sacct alone: it does not bound the hours of jobs"
                    " and the runs of which accounting has no row"
                )
        return told[0], told[1]

    def _read_drains(self) -> None:
        try:
            events = read_events(self._query.since, self._query.until)
        except SchedulerError as error:
            self.source.notes.append(f"which nodes were out of service is not known: {error}")
            return
        since, until = self._window
        self.fleet.drains = drains(events, since=since, until=until, now=self._now())

    def _is_within(self, folder: Path) -> bool:
        """Of a run of which accounting has shown no row: by its own records, and whose it is."""
        since, until = self._window
        try:
            if self._query.user not in ("", folder.owner()):
                return False
            if since is not None and _written_at(folder) < since - FILE_TIMES_S:
                return False
            attempts = read_story(RunLayout(folder), now=self._now()).attempts
        except DAMAGE as error:
            self.source.notes.append(_left_out(folder, error))
            return False
        return any(
            one.claimed_at is not None
            and (until is None or one.claimed_at <= until)
            and (since is None or _last_sign_at(folder, one) >= since)
            for one in attempts
        )

    def _jobs_of(self, ids: Sequence[str]) -> Iterator[LogicalJob]:
        # Folded call by call: each begins with the oldest row again, and has all rows of a job.
        for place in range(0, len(ids), _IDS_AT_ONCE):
            some = tuple(ids[place : place + _IDS_AT_ONCE])
            yield from fold(self._rows(Query(jobs=some, answer_s=self._query.answer_s)))

    def _rows(self, query: Query) -> Iterator[JobRun]:
        try:
            with open_table(query) as (table, lines):
                for run in table.runs(lines):
                    self.source.accounting = "sacct"
                    yield run
                if table.left_out:
                    self.source.notes.append(f"{table.left_out} rows of sacct could not be read")
            self.source.accounting = "sacct"
            return
        except SchedulerError as error:
            why = str(error)
        if self.source.accounting == "sacct":
            self.source.is_whole = False
            self.source.notes.append(f"the table broke off, more jobs may follow: {why}")
            return
        try:
            runs = jobs_without_accounting(query)
        except SchedulerError as error:
            # Where there is no slurm.conf both say so, in the same words.
            is_same = str(error).rpartition(": ")[2] in why
            told = str(error) if is_same else f"{why}; {error}"
            self._note_once(f"neither accounting nor slurmctld answers: {told}")
            return
        self.source.accounting = "scontrol"
        self._note_once(f"{why}; only jobs of the last minutes are known, by their newest attempt")
        yield from runs

    def _note_once(self, note: str) -> None:
        if note not in self.source.notes:
            self.source.notes.append(note)

    def _of_run(
        self, folder: Path, jobs: Sequence[LogicalJob], named: Collection[str]
    ) -> Iterator[JobReport]:
        """One that cannot be read leaves the jobs that were `named` to what Slurm tells of them."""
        layout, now = RunLayout(folder), self._now()
        try:
            story = read_story(layout, now=now)
            report, goodput = join(layout, story, jobs, now=now, window=self._window)
            report.sweep = self.sweeps.task_of(folder)
        except DAMAGE as error:
            self.source.notes.append(_left_out(folder, error))
            for job in jobs:
                if _names(job) & {*named}:
                    yield from self._counted(report_of(job))
            return
        if goodput is None:
            self.fleet.runs_untold += 1
        else:
            self.fleet.goodput.add(goodput)
        yield from self._counted(report)

    def _counted(self, report: JobReport) -> Iterator[JobReport]:
        if report.attempts or self._wanted.is_named:
            self.fleet.add(report, expand=self._nodes.of)
            self.sweeps.count(report)
            yield report


class NodeNames:
    """Host lists as names, each name held once however many lists it is in."""

    def __init__(self) -> None:
        self._lists: dict[str, list[str]] = {}
        self._held = 0

    def of(self, hosts: str) -> list[str]:
        if hosts not in self._lists:
            try:
                names = [sys.intern(name) for name in expand(hosts)]
            except FtslurmError:
                names = []
            if self._held + len(names) > _NAMES_HELD:
                self._lists.clear()
                self._held = 0
            self._held += len(names)
            self._lists[hosts] = names
        return self._lists[hosts]


def _left_out(folder: Path, error: Exception) -> str:
    if isinstance(error, (FtslurmError, OSError)):
        return f"run `{folder}` is left out: {error}"
    return f"run `{folder}` is left out, its records are damaged or of a later version: {error!r}"


def _names(job: LogicalJob) -> set[str]:
    """By which a person may name it: the number of an array or a het job is of all its parts."""
    return {job.job_id, job.newest.raw_id, re.split(r"[_+]", job.job_id)[0]}


def _named_by(job_ids: Collection[str]) -> set[str]:
    """These, and the arrays that they are of."""
    return {*job_ids, *(one.partition("_")[0] for one in job_ids)}


def _owners(job: LogicalJob, owners: Mapping[str, list[Path]]) -> list[Path]:
    return owners.get(job.job_id) or owners.get(job.newest.raw_id) or []


def _of_each(
    held: Mapping[Path, Sequence[LogicalJob]], runs: Mapping[Path, Mapping[str, float]]
) -> dict[Path, list[LogicalJob]]:
    """No job is of two runs: of those with the same number the newer one takes its own first."""
    taken: set[int] = set()
    found = {}
    for folder in sorted(held, key=lambda one: -max(runs[one].values(), default=0.0)):
        found[folder] = _its_own(
            [job for job in held[folder] if id(job) not in taken], runs[folder]
        )
        taken.update(map(id, found[folder]))
    return found


def _its_own(jobs: Sequence[LogicalJob], queued_at: Mapping[str, float]) -> list[LogicalJob]:
    """Of all jobs that ever had a number the newest that was there when the run noted it, else the
    first after: numbers begin anew where slurmctld has lost its state, and a requeue sets the time
    of submission anew, also of a job of which no older row is left."""
    newest: dict[str, LogicalJob] = {}
    for job in jobs:
        first = job.attempts[0]
        begun_at = first.submit_at or first.start_at or 0.0
        job_id = job.job_id if job.job_id in queued_at else job.newest.raw_id
        if begun_at <= queued_at[job_id] + CLOCKS_S or job_id not in newest:
            newest[job_id] = job
    return sorted(newest.values(), key=lambda job: job.attempts[0].submit_at or 0.0)


def _written_at(folder: Path) -> float:
    """When something was last written of its newest attempt: no sign of it is younger. To read the
    records of thousands of old runs takes 2 ms each, to look at these a tenth."""
    layout, found = RunLayout(folder), [0.0]
    for number in claimed_numbers(layout)[-1:]:
        root = layout.attempt(number).root
        for file in [root, *root.iterdir()]:
            with suppress(FileNotFoundError):  # one that is replaced just now
                found.append(file.stat().st_mtime)
    return max(found)


def _last_sign_at(folder: Path, attempt: AttemptStory) -> float:
    """At least so late it was not over."""
    line = attempt.timeline
    known = (attempt.claimed_at, line.gone, line.decided)
    written = read_progress(RunLayout(folder).attempt(attempt.number))
    return max(*(at for at in known if at), written.written_at if written else 0.0, 0.0)


def _queued_at(folder: Path, source: Source) -> dict[str, float]:
    """Its jobs, and when each was noted."""
    try:
        jobs = read_jobs(RunLayout(folder))
    except DAMAGE as error:
        source.notes.append(f"the jobs of run `{folder}` are not known: {error}")
        return {}
    return {job.job_id: job.queued_at for job in jobs if job.scheduler == "slurm"}
