"""What a report is made of: the arguments of a person turned into runs and jobs, and both read.

Reads only. A run is found by its directory; a job by its number; a log by the number in its name,
or by the run it lies in. Runs below the folders given (`runs/` by default) are joined with
accounting by the job ids that they have written down themselves.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Optional

from ftslurm.errors import FtslurmError, SchedulerError, UsageError
from ftslurm.report.fleet import Fleet
from ftslurm.report.fold import fold
from ftslurm.report.jobs import JobReport, report_of, within
from ftslurm.report.joined import join
from ftslurm.report.logical import LogicalJob
from ftslurm.run.attempt_story import AttemptStory
from ftslurm.run.attempts import read_progress
from ftslurm.run.jobs import read_jobs
from ftslurm.run.layout import RunLayout
from ftslurm.run.story import read_story
from ftslurm.scheduler.hostlist import expand
from ftslurm.scheduler.job_table import JobRun
from ftslurm.scheduler.protocol import CLOCKS_S
from ftslurm.scheduler.sacct import Query, jobs_without_accounting, open_table, when_at

_JOB = re.compile(r"\d{1,10}(?:_\d{1,9}|\+\d{1,4})?\Z")
_LOG_NUMBER = re.compile(r"(\d{1,10}(?:_\d{1,9})?)(?=\D*\.(?:out|err|log)\Z|\D*\Z)")
_NAMES_HELD = 1_000_000
_IDS_AT_ONCE = 1_000
"""Job ids of one sacct: an argument has 128 kB."""


@dataclass
class Wanted:
    """`jobs` and `runs` that were named; without any of them, all."""

    jobs: list[str] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)
    is_named: bool = False
    notes: list[str] = field(default_factory=list)
    """What could not be looked into."""


@dataclass
class Source:
    """`accounting`: sacct, scontrol or none; `notes`: what that means for the figures."""

    accounting: str = "none"
    notes: list[str] = field(default_factory=list)


def wanted_of(words: Sequence[str], roots: Sequence[Path]) -> Wanted:
    """UsageError for a word that is neither run, job, log nor a folder of runs."""
    wanted = Wanted(is_named=bool(words))
    for word in words:
        path = Path(word)
        if _is_run(path):
            wanted.runs.append(path)
        elif path.is_dir():
            below = runs_below(path, wanted.notes)
            if not below:
                raise UsageError(
                    f"`{word}` is neither a run directory nor a folder of runs: there is no"
                    " run.json in it or right below it; name what `ftslurm submit` printed"
                )
            wanted.runs += below
        elif _JOB.match(word):
            wanted.jobs.append(word)
        elif path.is_file():
            _take_log(wanted, path)
        else:
            raise UsageError(
                f"`{word}` is no run directory, no job id (like 4711 or 4711_3) and no log file"
            )
    if not words:
        for root in roots:
            wanted.runs += runs_below(root, wanted.notes)
    return wanted


def _is_run(path: Path) -> bool:
    try:
        return (path / "run.json").is_file()
    except OSError as error:
        raise UsageError(
            f"`{path}` may not be read ({error.strerror}); a run is its owner's alone: ask for"
            " `ftslurm report` there, or name its job"
        ) from None


def _take_log(wanted: Wanted, path: Path) -> None:
    """A log of a run belongs to the run; any other is named after its job."""
    for folder in path.resolve().parents:
        if (folder / "run.json").is_file():
            wanted.runs.append(folder)
            return
    found = _LOG_NUMBER.search(path.name)
    if found is None:
        raise UsageError(
            f"`{path}` has no job id in its name (slurm-4711.out, 4711_3.log) and lies in no run"
        )
    wanted.jobs.append(found[1])


def runs_below(root: Path, notes: list[str]) -> list[Path]:
    """Run directories right below it. One that may not be looked into is noted: they are their
    owners' alone, and others lie beside them."""
    found, closed = [], 0
    try:
        folders = sorted(root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"the runs below `{root}` are left out: {error.strerror}")
        return []
    for folder in folders:
        try:
            if (folder / "run.json").is_file():
                found.append(folder)
        except OSError:
            closed += 1
    if closed:
        notes.append(f"{closed} folders below `{root}` may not be read and are left out")
    return found


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
        self.found_nothing = False
        """None of what was named is known."""
        self._window = (None, None) if wanted.is_named else self._bounds()
        self._nodes = NodeNames()

    def reports(self) -> Iterator[JobReport]:
        """Foreign jobs as they come, then the runs."""
        runs = {folder: _queued_at(folder, self.source) for folder in self._wanted.runs}
        owner = {job_id: folder for folder, ids in runs.items() for job_id in ids}
        if not self._wanted.is_named:
            seen: set[Path] = set()
            for job in fold(self._rows(self._query)):
                folder = _owner(job, owner)
                if folder is not None:
                    seen.add(folder)
                else:
                    yield from self._counted(within(report_of(job), *self._window))
            runs = {one: ids for one, ids in runs.items() if one in seen or self._is_within(one)}
        # All rows of a run, also those outside the window: its attempts are told by them.
        ids = sorted({*self._wanted.jobs, *(job_id for known in runs.values() for job_id in known)})
        missing = set(self._wanted.jobs)
        held: dict[Path, list[LogicalJob]] = {folder: [] for folder in runs}
        for job in self._jobs_of(ids):
            missing -= {job.job_id, job.newest.raw_id, re.split(r"[_+]", job.job_id)[0]}
            folder = _owner(job, owner)
            if folder in held:
                held[folder].append(job)
            elif self._wanted.is_named:
                yield from self._counted(report_of(job))
        for folder, jobs in held.items():
            yield from self._of_run(folder, _its_own(jobs, runs[folder]))
        for job_id in sorted(missing):
            self.source.notes.append(f"nothing is known of job {job_id}")
        self.found_nothing = bool(missing) and not self.fleet.jobs

    def _bounds(self) -> tuple[Optional[float], Optional[float]]:
        now, told = self._now(), []
        for text in (self._query.since, self._query.until):
            told.append(when_at(text, now))
            if told[-1] is None:
                self.source.notes.append(
                    f"`{text}` is understood by sacct alone: it does not bound the hours of jobs"
                    " and the runs of which accounting has no row"
                )
        return told[0], told[1]

    def _is_within(self, folder: Path) -> bool:
        """Of a run of which accounting has shown no row: by its own records, and whose it is."""
        since, until = self._window
        try:
            if self._query.user not in ("", folder.owner()):
                return False
            attempts = read_story(RunLayout(folder), now=self._now()).attempts
        except (FtslurmError, OSError, KeyError) as error:
            self.source.notes.append(f"run `{folder}` is left out: {error}")
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
            yield from fold(self._rows(Query(jobs=tuple(ids[place : place + _IDS_AT_ONCE]))))

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
            self.source.notes.append(f"the table broke off, more jobs may follow: {why}")
            return
        try:
            runs = jobs_without_accounting(query)
        except SchedulerError as error:
            self._note_once(f"no accounting ({why}), and no slurmctld ({error})")
            return
        self.source.accounting = "scontrol"
        self._note_once(f"{why}; only jobs of the last minutes are known, by their newest attempt")
        yield from runs

    def _note_once(self, note: str) -> None:
        if note not in self.source.notes:
            self.source.notes.append(note)

    def _of_run(self, folder: Path, jobs: Sequence[LogicalJob]) -> Iterator[JobReport]:
        layout, now = RunLayout(folder), self._now()
        try:
            story = read_story(layout, now=now)
            report, goodput = join(layout, story, jobs, now=now, window=self._window)
        except (FtslurmError, OSError) as error:
            self.source.notes.append(f"run `{folder}` is left out: {error}")
            return
        if goodput is None:
            self.fleet.runs_untold += 1
        else:
            self.fleet.goodput.add(goodput)
        yield from self._counted(report)

    def _counted(self, report: JobReport) -> Iterator[JobReport]:
        if report.attempts or self._wanted.is_named:
            self.fleet.add(report, expand=self._nodes.of)
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


def _owner(job: LogicalJob, owner: Mapping[str, Path]) -> Optional[Path]:
    return owner.get(job.job_id) or owner.get(job.newest.raw_id)


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
    except (FtslurmError, OSError) as error:
        source.notes.append(f"the jobs of run `{folder}` are not known: {error}")
        return {}
    return {job.job_id: job.queued_at for job in jobs if job.scheduler == "slurm"}
