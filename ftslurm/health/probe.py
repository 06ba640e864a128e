"""One look at a node: what was read, what it means, and what is kept for the look after it.

A look ends within its part of the context's budget, whatever the hardware does; the rest is for
what is done about it. There is one at a time on a node: who comes second waits for a while, and
then takes the result of the last minute, or says that it could not tell. Nothing here changes the
node. What a look finds is kept before anything is done about it, and is found again by those after
it until `settle` has been told that it was dealt with.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Optional

from ftslurm.errors import FormatError
from ftslurm.health.history import History
from ftslurm.health.job import JobFacts, of_job
from ftslurm.health.job_start import JobHere, JobStart, jobs_here, read_start, write_start
from ftslurm.health.kernel_counted import Begin, complaints_of, counted, first_begin
from ftslurm.health.kernel_line import KernelEvent
from ftslurm.health.kernel_log import SOURCE as KERNEL_LOG
from ftslurm.health.kernel_log import Cursor, signals_of
from ftslurm.health.memory import (
    LOG_KINDS,
    Memory,
    after_look,
    hardware_of,
    left_by_jobs,
    memory_record,
    of_boot,
    parse_memory,
    settled,
)
from ftslurm.health.second_look import wait_for_second_look, without_haste
from ftslurm.health.settings import HealthSettings, thresholds_of
from ftslurm.health.signals import Failure, Gpu, Reading, Signal
from ftslurm.health.sources import DRIVER, Budget, Hardware, Scope, read_hardware, read_log
from ftslurm.health.state_dir import StateDir
from ftslurm.health.sysfs import read_boot_id
from ftslurm.health.unread import as_counted_before, too_long
from ftslurm.health.verdict import HARD, Verdict, rank
from ftslurm.health.verdicts import judge, remember

PROLOG, EPILOG, PERIODIC, PROBE = "prolog", "epilog", "periodic", "probe"

MEMORY = "memory.json"
STORED_S = 60.0
"""How old a result may be that stands in for a look of one's own."""

_LOOK_SHARE = 0.7
"""Of a budget; what is left of an epilog's is enough for three calls of Slurm."""
_PROBE_S = 8.0
_SECOND_LOOK_S = 1.5
_LOCK_SHARE = 0.2
_SETTLE_WAIT_S = 3.0
_NOT_SETTLED = "the next look finds the same again, since that it was settled is not kept:"


@dataclass(frozen=True)
class Probe:
    """`verdicts`: worst first, with those of earlier looks that nobody has settled."""

    reading: Reading
    baseline: Optional[Reading]
    verdicts: tuple[Verdict, ...]
    during: tuple[Verdict, ...] = ()
    """What earlier looks have found since the job of this epilog began: for its run to know, and
    nothing more to be done about. The look that found it has used up its kernel line."""
    history: History = field(default_factory=History)
    wall_s: float = 0.0
    notes: tuple[str, ...] = ()
    complaints: tuple[str, ...] = ()
    """What somebody has to put right, for this node to be looked at as it should be."""
    is_stored: bool = False
    """Another look was under way; this is the result of the last."""


def look_at(
    context: str,
    settings: HealthSettings,
    job: JobFacts,
    state: Optional[StateDir],
    *,
    since: Optional[float] = None,
    installed_at: Optional[float] = None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Probe:
    """Look once, by the rules of `context`: prolog, epilog, periodic or probe.

    `state` None: a user's look, with nothing before it and nothing kept. `since`, in UTC seconds:
    the kernel's lines of before do not count. `installed_at`: when this code came to be where it
    is, if its file does not say it. A `probe` leaves nothing for the next look but what hangs.
    """
    began = time.monotonic()
    if installed_at is None:
        installed_at = Path(__file__).stat().st_ctime
    look = _Look(context, settings, job, state, since, installed_at, clock, sleep)
    with contextlib.ExitStack() as stack:
        is_alone = state is None or look.gets_lock(stack, state)
        probe = look.now() if is_alone else look.stored()
    wall_s = time.monotonic() - began
    return replace(probe, wall_s=wall_s, notes=tuple(look.notes), complaints=tuple(look.complaints))


def settle(state: StateDir, probe: Probe) -> str:
    """What `probe` has found was dealt with; `` or why that could not be kept. To be called after
    acting on it, unless that failed. Not called, the next look comes back to it."""
    if not any(verdict.word in HARD for verdict in probe.verdicts):
        return ""
    try:
        with state.lock(_SETTLE_WAIT_S) as is_held:
            if not is_held:
                return f"{_NOT_SETTLED} another look has not ended within {_SETTLE_WAIT_S:g} s"
            record = state.read_json(MEMORY)
            if record is not None:
                memory = settled(parse_memory(record), probe.verdicts)
                state.write_json(MEMORY, memory_record(memory))
    except (OSError, FormatError) as error:
        return f"{_NOT_SETTLED} {error}"
    return ""


def look_time_s(context: str, settings: HealthSettings) -> float:
    """How long a look may take."""
    budgets = {PROLOG: settings.prolog_s, EPILOG: settings.epilog_s, PERIODIC: settings.periodic_s}
    return _LOOK_SHARE * budgets[context] if context in budgets else _PROBE_S


@dataclass(frozen=True)
class _Read:
    """All that a look has read up to now: the kernel's lines of its first part too."""

    reading: Reading
    events: tuple[KernelEvent, ...]
    cursor: Optional[Cursor]
    abandoned: Mapping[str, tuple[int, str]]


@dataclass
class _Look:
    context: str
    settings: HealthSettings
    job: JobFacts
    state: Optional[StateDir]
    since: Optional[float]
    installed_at: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    notes: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        look_s = look_time_s(self.context, self.settings)
        is_short = self.context in (PROLOG, PROBE)
        self.budget = Budget(look_s, is_short)
        self.wait_s = _LOCK_SHARE * look_s
        in_job = self.context == PROBE and (os.geteuid() != 0 or bool(self.job.job_id))
        self.scope = Scope(self.settings, in_job)
        self.thresholds = thresholds_of(self.settings)
        self.boot_id = read_boot_id(Path(self.settings.sysfs_root)) or read_boot_id()
        self.jobs: list[JobHere] = []
        self.start: Optional[JobStart] = None
        """Of the job that this look is about: that of the epilog, or the latest that is here."""
        self.begin = Begin(self.since)

    def gets_lock(self, stack: contextlib.ExitStack, state: StateDir) -> bool:
        try:
            return stack.enter_context(state.lock(self.wait_s))
        except OSError as error:
            self.notes.append(f"another look may be under way: no lock can be had ({error})")
            return True

    def now(self) -> Probe:
        memory = self.recall()
        judged_by = self.start.reading if self.start else memory.baseline()
        read = self.read(memory)
        verdicts = self.judge(read, judged_by, memory.history)
        history = memory.history
        left_s = self.budget.left_s() - _SECOND_LOOK_S
        wait_s = wait_for_second_look(verdicts, is_short=self.budget.is_short, left_s=left_s)
        if wait_s and self.context != PERIODIC:  # there is another in some minutes
            history = _remember_hardware(history, read.reading, verdicts, judged_by)
            self.sleep(wait_s)
            read = self.read(memory, first=read)
            known = verdicts if read.reading.failures else []
            verdicts = _with_hard(self.judge(read, judged_by, history), known)
        after = after_look(memory, read.reading, verdicts, judged_by=judged_by)
        history = remember(history, read.reading, verdicts, baseline=judged_by)
        least = self.settings.unknown_probes
        self.complaints += too_long(
            verdicts, memory.history, history, boot_id=self.boot_id, least=least
        )
        # What a log says while it is skipped will not count later.
        is_read = self.scope.asks(KERNEL_LOG)
        after = replace(
            after,
            cursor=read.cursor,
            counts_from=memory.counts_from if is_read else read.reading.at,
            history=history,
            abandoned=read.abandoned,
        )
        self.keep(memory, after)
        return self.probe(after, read.reading, judged_by)

    def stored(self) -> Probe:
        """Without a look: the last one's result, where it is fresh."""
        memory = self.recall()
        last, age_s = memory.last, self.clock() - (memory.last.at if memory.last else 0.0)
        if last is not None and 0 <= age_s <= STORED_S:
            self.notes.append(f"another look is under way; this was found {age_s:.0f} s ago")
            probe = replace(self.probe(memory, last, None), is_stored=True)
            if last.job != self.job.job_id:
                verdicts = [replace(one, hands_to_run=False) for one in probe.verdicts]
                probe = replace(probe, verdicts=tuple(verdicts))
        else:
            text = f"another look at this node has not ended within {self.wait_s:.1f} s"
            reading = self.reading((), (), [Failure("probe", text)])
            verdicts = judge(reading, baseline=None, history=History(), thresholds=self.thresholds)
            memory = Memory(self.boot_id, verdicts=tuple(verdicts))
            probe = self.probe(memory, reading, None)
        self.mark_job(memory)
        return probe

    def recall(self) -> Memory:
        """What earlier looks have left. Where that cannot be read, the kernel's lines count from
        when it was written; where there is none, as in a first look."""
        first = first_begin(self.clock(), self.installed_at)
        memory = Memory(self.boot_id, counts_from=first.at)
        if self.state is not None:
            try:
                record = self.state.read_json(MEMORY)
                if record is not None:
                    memory = of_boot(parse_memory(record), self.boot_id)
            except (FormatError, OSError) as error:
                self.notes.append(f"what earlier looks have left is lost: {error}")
                written_at = self.state.changed_at(MEMORY)
                memory = replace(memory, counts_from=written_at or memory.counts_from)
            self.find_start(self.state)
        if self.since is None:
            self.begin = Begin(memory.counts_from, is_first=memory.cursor is None)
        return memory

    def find_start(self, state: StateDir) -> None:
        self.jobs = jobs_here(state, self.boot_id)
        about = self.jobs
        if self.context in (PROLOG, EPILOG):
            about = [one for one in self.jobs if one.job_id == self.job.job_id]
        if self.context != PROLOG and about:
            try:
                self.start = read_start(state, about[0])
            except (FormatError, OSError) as error:
                self.notes.append(f"the job's beginning is lost: {error}")

    def read(self, memory: Memory, first: Optional[_Read] = None) -> _Read:
        cursor = first.cursor if first else memory.cursor
        stuck = first.abandoned if first else memory.abandoned
        log = read_log(
            self.scope, cursor, boot_id=self.boot_id, now=self.clock(), budget=self.budget
        )
        hardware = read_hardware(
            self.scope,
            self.budget,
            stuck=stuck,
            leftovers_of=self.ended_job(),
            left=left_by_jobs(memory.last),
            is_last=first is not None,
        )
        self.notes += hardware.notes
        events, failures = first.events if first else (), hardware.failures
        if log is not None:
            cursor = log.cursor
            events += self.counting(log.events, hardware)
            if self.scope.in_job:  # most systems keep the log from users (dmesg_restrict)
                self.notes += [f"{one.source}: {one.text}" for one in log.failures]
            else:
                failures = [*log.failures, *failures]
        signals = [*signals_of(events, hardware.gpus), *hardware.signals]
        reading = self.reading(hardware.gpus, signals, failures)
        if self.context == PROLOG and DRIVER not in memory.abandoned:
            reading = without_haste(reading, memory.history)
        return _Read(reading, events, cursor, hardware.abandoned)

    def counting(
        self, events: Sequence[KernelEvent], hardware: Hardware
    ) -> tuple[KernelEvent, ...]:
        found = counted(events, self.begin, now=self.clock(), hardware=hardware.signals)
        self.notes += found.notes
        if self.begin.is_first and self.state is not None and found.old:
            self.complaints += complaints_of(self.hard_of(found.old, hardware))
        return found.kept

    def hard_of(self, events: Sequence[KernelEvent], hardware: Hardware) -> list[Verdict]:
        """Of the kernel's messages alone, as they would be judged."""
        signals = [*signals_of(events, hardware.gpus), *hardware.signals]
        reading = self.reading(hardware.gpus, signals, ())
        verdicts = judge(reading, baseline=None, history=History(), thresholds=self.thresholds)
        return [
            one
            for one in verdicts
            if one.word in HARD and one.signals and one.signals[0].kind in LOG_KINDS
        ]

    def ended_job(self) -> Optional[JobFacts]:
        """Whose processes should be gone. Where its user has another job here, only what is in the
        job's own cgroup is surely the job's."""
        if self.context != EPILOG or not self.job.job_id:
            return None
        others = {one.uid for one in self.jobs if one.job_id != self.job.job_id}
        return replace(self.job, uid=None) if self.job.uid in others else self.job

    def reading(
        self, gpus: Sequence[Gpu], signals: Sequence[Signal], failures: Sequence[Failure]
    ) -> Reading:
        job = self.job.job_id
        # On a node of several jobs a kernel line may be of any of them, in a prolog of none.
        is_alone = self.context != PROLOG and [one.job_id for one in self.jobs] == [job]
        user = self.job.user if is_alone else ""
        if not job and len(self.jobs) == 1 and self.start:
            job, user = self.start.reading.job, self.start.reading.user
        return Reading(
            self.boot_id, self.job.node, self.context, self.clock(),
            tuple(gpus), tuple(signals), tuple(failures), job, user,
        )  # fmt: skip

    def judge(self, read: _Read, baseline: Optional[Reading], history: History) -> list[Verdict]:
        return judge(read.reading, baseline=baseline, history=history, thresholds=self.thresholds)

    def keep(self, before: Memory, after: Memory) -> None:
        if self.state is None:
            return
        if self.context == PROBE:
            if after.abandoned == before.abandoned:
                return
            after = replace(before, abandoned=after.abandoned)
        try:
            self.state.write_json(MEMORY, memory_record(after))
        except (OSError, ValueError) as error:
            self.notes.append(
                f"what was found is not kept, and the next look finds it again: {error}"
            )
        self.mark_job(after)

    def mark_job(self, memory: Memory) -> None:
        """A prolog begins a job, an epilog ends it."""
        if self.state is None or not self.job.job_id:
            return
        baseline = memory.baseline()
        try:
            if self.context == EPILOG:
                for one in self.jobs:
                    if one.job_id == self.job.job_id:
                        self.state.remove(one.name)
            elif self.context == PROLOG and baseline is not None:
                reading = replace(baseline, job=self.job.job_id, user=self.job.user)
                write_start(self.state, self.job, JobStart(self.clock(), reading))
        except OSError as error:
            self.notes.append(f"the job's {self.context} is not kept: {error}")

    def probe(self, memory: Memory, reading: Reading, baseline: Optional[Reading]) -> Probe:
        verdicts = memory.told(self.thresholds.off)
        if self.context == PROLOG:  # no program of this job has run
            verdicts = [replace(one, hands_to_run=False) for one in verdicts]
        known = {verdict.key for verdict in verdicts}
        ended = self.start if self.context == EPILOG else None
        during = memory.found_since(ended.at) if ended else []
        return Probe(
            reading,
            baseline,
            tuple(of_job(verdicts, self.job, reading.gpus)),
            tuple(of_job([one for one in during if one.key not in known], self.job, reading.gpus)),
            memory.history,
        )


def _remember_hardware(
    history: History, reading: Reading, verdicts: Sequence[Verdict], baseline: Optional[Reading]
) -> History:
    """The first of two looks, without the kernel's lines, which the second one has as well, and
    without what it could not read, which is one time in both."""
    told = [one for one in verdicts if one.signals and one.signals[0].kind not in LOG_KINDS]
    after = remember(history, hardware_of(reading), told, baseline=baseline)
    return as_counted_before(after, history)


def _with_hard(verdicts: list[Verdict], before: Sequence[Verdict]) -> list[Verdict]:
    """With what a first look has found for sure, where the second could not read all."""
    known = {verdict.key for verdict in verdicts}
    lost = [one for one in before if one.word in HARD and one.key not in known]
    return sorted((*verdicts, *lost), key=lambda verdict: rank(verdict.word))
