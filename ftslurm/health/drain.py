"""Acts on what a look has found: drains the node, takes that back, lifts it when the cause is gone.

Promises: no call of Slurm for a healthy node; for a sick one at most three, each bounded (read the
node, drain it, count all drains), and a fourth only to take a drain back. Never touches a node that
is in other hands, and never lifts what it has not set itself. What it is about to do is written
down before, so that a probe which is killed on the way is finished by the next one.

The exit code is for the Prolog and the Epilog. On 1 Slurm drains the node itself and keeps the
reason that is there (node_mgr.c, drain_nodes; seen on 22.05, 24.11 and 26.05), and the breaker can
neither count such a drain nor take it back. So 1 is given only where the node is drained already,
by whomever, and where the breaker would let it. From the Epilog it also lets an expedited requeue
go elsewhere at once, where 0 leaves the job held (26.05).

Where Slurm cannot be asked nothing is drained, however sick the node: slurmctld that is slow or
fails over is slow for all nodes at once, and one false verdict would take them all. What has FAILED
is to be tried again by the next probe, that of the next job's Prolog at the latest. (slurmd gives
up after 9 s to tell of a failed Epilog, and the node comes back IDLE: seen on all three.)
"""

from __future__ import annotations

import random as chance
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Optional

from ftslurm.errors import FormatError, SchedulerError
from ftslurm.health import latch, resume
from ftslurm.health.breaker import decide, is_hardware_xid
from ftslurm.health.latch import Latch
from ftslurm.health.node_state import (
    Drain,
    NodeState,
    first_drained_at,
    has_note_of_another,
    may_drain,
)
from ftslurm.health.reason import reason_of
from ftslurm.health.restored import had_before, lacking
from ftslurm.health.resume import Drains, OwnDrain
from ftslurm.health.settings import SHADOW_MODE, HealthSettings
from ftslurm.health.signals import Reading
from ftslurm.health.slurm_node import Runner, SlurmNode, run_slurm
from ftslurm.health.state_dir import StateDir
from ftslurm.health.verdict import HARD, Verdict, rank
from ftslurm.health.xid_table import DRAIN

NONE, DRAINED, ALREADY, FOREIGN, UNDONE, SHADOW, FAILED, RESUMED = (
    "none", "drained", "already", "foreign", "undone", "shadow", "failed", "resumed",
)  # fmt: skip
"""Nothing to do | drained by this call | by us before | in other hands, untouched | drained, and
taken back by the breaker | would have drained, but only reports | Slurm did not do it | lifted."""

_MEMORY = "drain.json"
_CLOCK_S = 1.1
"""Slurm's stamps are whole seconds: after so long no later drain has one that sorts before ours."""


@dataclass(frozen=True)
class Action:
    word: str
    reason: str = ""
    """That stands on the node now, as far as we know."""
    exit_code: int = 0
    calls: int = 0
    sentence: str = ""


def act(
    verdicts: Sequence[Verdict],
    settings: HealthSettings,
    node: str,
    state: StateDir,
    *,
    context: str,
    boot_id: str,
    looked_at: float,
    reading: Optional[Reading] = None,
    baseline: Optional[Reading] = None,
    runner: Runner = run_slurm,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    random: Callable[[], float] = chance.random,
) -> Action:
    """`context`: prolog, epilog or periodic; `looked_at`: when the verdicts were found, in
    `reading` as compared with `baseline`."""
    acting = _Acting(
        verdicts=verdicts,
        reading=reading,
        baseline=baseline,
        settings=settings,
        context=context,
        boot_id=boot_id,
        looked_at=looked_at,
        slurm=SlurmNode(node, settings.slurm_call_s, runner),
        store=_Store(state, clock()),
        clock=clock,
        sleep=sleep,
        random=random,
    )
    return acting.act()


class _Store:
    """What outlives the process."""

    def __init__(self, state: StateDir, now: float) -> None:
        self.state = state
        self.notes: list[str] = []
        self.memory = self._read_memory()
        self.latch = latch.read_latch(state, now)

    def keep(self, memory: Drains) -> None:
        if memory != self.memory:
            self.memory = memory
            record = resume.drains_record(memory)
            self._try(f"`{_MEMORY}`", lambda: self.state.write_json(_MEMORY, record))

    def trip(self, because: str, at: float) -> None:
        self.latch = Latch(because, at)
        self._try("the breaker's latch", lambda: latch.trip(self.state, Latch(because, at)))

    def _read_memory(self) -> Drains:
        try:
            return resume.parse_drains(self.state.read_json(_MEMORY))
        except (FormatError, OSError) as error:
            self.notes.append(f"no drain of ours is remembered: {error}")
            return Drains()

    def _try(self, what: str, write: Callable[[], None]) -> None:
        """A full disk must not keep a sick node in service."""
        try:
            write()
        except OSError as error:
            self.notes.append(f"{what} could not be written: {error}")


@dataclass
class _Acting:
    verdicts: Sequence[Verdict]
    reading: Optional[Reading]
    baseline: Optional[Reading]
    settings: HealthSettings
    context: str
    boot_id: str
    looked_at: float
    slurm: SlurmNode
    store: _Store
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    random: Callable[[], float]
    is_urgent: bool = False
    """A job on this node is dead or wrong: none may begin on it."""

    def act(self) -> Action:
        own, latched = self.store.memory.drain, self.store.latch
        if self.settings.mode == SHADOW_MODE:
            return self._only_report("health.mode is shadow")
        if latched and own is not None and not own.is_counted and own.at <= latched.at:
            return self._finish_taking_back(own, latched.because)
        self.store.keep(resume.with_good_again(self.store.memory, self.verdicts))
        sick = self._sick(is_latched=latched is not None)
        if sick:
            return self._drain(sick)
        if own is not None:
            return self._watch(own) if self.context == "periodic" else self._meet_job(own)
        return self._only_report(self._why_not())

    def _sick(self, *, is_latched: bool) -> list[Verdict]:
        """What the node is to be drained for."""
        accepted, shadow = self.store.memory.accepted, self.settings.shadow
        return [
            one
            for one in self.verdicts
            if one.word in HARD
            and one.rule not in shadow
            and one.key not in accepted
            and (not is_latched or is_hardware_xid(one.code))
        ]

    def _why_not(self) -> str:
        if self.store.latch:
            return self.store.latch.sentence(self.clock())
        if self.store.memory.accepted:
            return "a person has lifted this drain twice, so it is taken to be meant"
        return "health.shadow names its rule"

    def _drain(self, sick: list[Verdict]) -> Action:
        worst, causes = min(sick, key=_how_bad), resume.causes_of(sick, self.boot_id)
        self.is_urgent = worst.word == DRAIN
        try:
            found = self.slurm.read()
        except SchedulerError as error:
            return self._failed(f"{worst.code}, and the node's state is not known: {error}")
        own = self.store.memory.drain
        if own is not None and not own.stands(found):
            self._end(found)
            sick = self._sick(is_latched=self.store.latch is not None)
            return self._drain_anew(sick, found) if sick else self._only_report(self._why_not())
        if own is None:
            return self._drain_anew(sick, found)
        may, why = may_drain(found, is_worse=resume.is_worse(causes, own))
        own = resume.with_causes(own, causes, had_before(sick, self.reading, self.baseline))
        if may:
            return self._replace(own, found, worst)
        self.store.keep(replace(self.store.memory, drain=own))
        if not own.is_counted:
            return self._count(own, why)
        return self._leave(found, f"{worst.code}, {why}")

    def _drain_anew(self, sick: list[Verdict], found: NodeState) -> Action:
        worst = min(sick, key=_how_bad)
        may, why = may_drain(found, is_worse=False)
        if may:
            return self._begin(worst, sick)
        if is_hardware_xid(worst.code) and has_note_of_another(found):
            return self._leave_to_slurm(worst, found)
        return self._leave(found, f"{worst.code}, {why}")

    def _leave_to_slurm(self, worst: Verdict, found: NodeState) -> Action:
        """Somebody's note is not to be written over; by the exit code Slurm drains the node and
        keeps it. Not beyond what the breaker would let stay."""
        if self.context == "periodic":  # no exit code: the next job's prolog or epilog has one
            return self._leave(found, f"{worst.code}, it has a note of another ({found.reason})")
        try:
            listing = self.slurm.listing()
        except SchedulerError as error:
            return self._failed(f"{worst.code}, and not counted: {error}")
        last = max((one.at for one in listing.drains), default=0.0)
        mine = Drain(self.slurm.node, worst.code, max(last, self.clock()))
        others = [one for one in listing.drains if one.node != mine.node]
        decision = decide([*others, mine], mine.node, listing.gpu_nodes, self.settings)
        if not decision.keeps:
            return self._done(FOREIGN, found.reason, f"left as it is: {decision.sentence}", False)
        told = f"{worst.sentence}; left to Slurm to drain, which keeps the node's note"
        return self._done(FOREIGN, found.reason, told, True)

    def _begin(self, worst: Verdict, sick: list[Verdict]) -> Action:
        now = self.clock()
        reason = reason_of(worst, boot_id=self.boot_id, at=now)
        causes = resume.causes_of(sick, self.boot_id)
        had = had_before(sick, self.reading, self.baseline)
        own = OwnDrain(self.slurm.node, reason, now, causes, had=had)
        self.store.keep(replace(self.store.memory, drain=own))
        try:
            self.slurm.drain(reason)
        except SchedulerError as error:
            return self._failed(f"{worst.code}, and the node could not be drained: {error}")
        return self._count(own, worst.sentence)

    def _replace(self, own: OwnDrain, found: NodeState, worst: Verdict) -> Action:
        """A milder reason of ours by a worse one. It is drained already: nothing to count anew."""
        since = first_drained_at(found)
        reason = reason_of(worst, boot_id=self.boot_id, at=self.clock(), since=since)
        own = replace(own, reason=reason, former=found.reason)
        self.store.keep(replace(self.store.memory, drain=own))
        try:
            self.slurm.drain(reason)
        except SchedulerError as error:
            return self._failed(f"{worst.code}, and the reason could not be changed: {error}")
        is_sure = own.is_counted or is_hardware_xid(worst.code)
        told = f"drained before, now for worse: {worst.sentence}"
        return self._done(DRAINED, reason, told, is_sure)

    def _count(self, own: OwnDrain, sentence: str) -> Action:
        """The breaker. Where it cannot be told, the drain stays, the next probe counts, and a job
        is held up for an Xid of the hardware alone."""
        self.sleep(_CLOCK_S + self.random())
        try:
            listing = self.slurm.listing()
        except SchedulerError as error:
            is_sure = any(is_hardware_xid(cause.code) for cause in own.causes)
            return self._done(DRAINED, own.reason, f"{sentence}; not counted yet: {error}", is_sure)
        mine = [one.reason for one in listing.drains if one.node == self.slurm.node]
        if len(mine) != 1 or mine[0] not in own.reasons:
            not_seen = "not counted yet, since sinfo does not show it"
            # A probe beside this one has taken it back, or somebody has other plans.
            return self._done(DRAINED, own.reason, f"{sentence}; {not_seen}", False)
        decision = decide(listing.drains, self.slurm.node, listing.gpu_nodes, self.settings)
        if not decision.keeps:
            self.store.trip(decision.sentence, self.clock())
            return self._take_back(own, decision.sentence)
        self.store.keep(replace(self.store.memory, drain=replace(own, is_counted=True)))
        return self._done(DRAINED, own.reason, sentence, True)

    def _finish_taking_back(self, own: OwnDrain, because: str) -> Action:
        """Of a probe that was killed, or whose last call failed."""
        try:
            found = self.slurm.read()
        except SchedulerError as error:
            return self._done(FAILED, own.reason, f"not taken back yet: {error}", False)
        may, why = resume.still_ours(own, found)
        if may:
            return self._take_back(own, because)
        self.store.keep(replace(self.store.memory, drain=None))
        return self._done(FOREIGN, found.reason, f"not taken back: {why}", False)

    def _take_back(self, own: OwnDrain, because: str) -> Action:
        """The verdict is false: no job is to be held for it, whatever comes of the call."""
        try:
            self.slurm.undrain()
        except SchedulerError as error:
            return self._done(FAILED, own.reason, f"not taken back yet: {error}", False)
        self.store.keep(replace(self.store.memory, drain=None))
        sentence = f"drained and taken back: {because}; for a day this node only reports"
        return self._done(UNDONE, "", sentence, False)

    def _meet_job(self, own: OwnDrain) -> Action:
        """Drained between two looks of one job: the cause may be a line that is read only once."""
        self.is_urgent = any(cause.word == DRAIN for cause in own.causes)
        try:
            found = self.slurm.read()
        except SchedulerError as error:
            return self._failed(f"the node was drained by us, and its state is not known: {error}")
        if not own.stands(found):
            return self._forget(found, "the drain of ours was ended by another")
        if not own.is_counted:
            return self._count(own, "counted late")
        return self._done(ALREADY, found.reason, "drained by us before", True)

    def _watch(self, own: OwnDrain) -> Action:
        """A look that found nothing, on a node that we have drained."""
        if not own.is_counted:
            return self._count(own, "counted late")
        gap_s, now = self.settings.resume_gap_s, self.clock()
        own = resume.with_look(
            own, self.verdicts, self.reading, at=self.looked_at, boot_id=self.boot_id, gap_s=gap_s
        )
        if self._sick(is_latched=False):  # it is not drained for this, nor is it well
            own = replace(own, passes=())
        memory = replace(self.store.memory, drain=own)
        self.store.keep(memory)
        may, why = resume.may_resume(memory, boot_id=self.boot_id, settings=self.settings, now=now)
        if not may:
            why = lacking(own.had, self.reading) or why
            return self._done(ALREADY, own.reason, f"stays drained: {why}", True)
        try:
            found = self.slurm.read()
            may, why = resume.still_ours(own, found)
            if may:
                self.slurm.undrain()
        except SchedulerError as error:
            return self._done(FAILED, own.reason, f"could not be lifted: {error}", True)
        if not may and own.stands(found):
            return self._leave(found, why)
        if not may:
            return self._forget(found, why)
        self.store.keep(resume.ended(memory, now=now, is_by_us=True))
        sentence = f"lifted after {len(own.passes)} healthy looks; it had been {own.reason}"
        return self._done(RESUMED, "", sentence, False)

    def _forget(self, found: NodeState, why: str) -> Action:
        self._end(found)
        return self._leave(found, why)

    def _end(self, found: NodeState) -> None:
        """Of a drain of ours that another has ended."""
        memory, now = self.store.memory, self.clock()
        was_seen = memory.drain is not None and memory.drain.is_counted
        in_service = was_seen and not found.is_drained
        self.store.keep(resume.ended(memory, now=now, is_by_us=False, is_in_service=in_service))

    def _leave(self, found: NodeState, why: str) -> Action:
        word = ALREADY if found.is_drained and found.is_ours else FOREIGN
        return self._done(word, found.reason, f"left as it is: {why}", found.is_drained)

    def _only_report(self, because: str) -> Action:
        found = [one for one in self.verdicts if one.word in HARD]
        if not found:
            return self._done(NONE, "", because if self.store.latch else "", False)
        worst = min(found, key=_how_bad)
        sentence = f"not drained for {worst.code} ({worst.sentence}), because {because}"
        return self._done(SHADOW, "", sentence, False)

    def _failed(self, sentence: str) -> Action:
        return self._done(FAILED, "", sentence, False)

    def _done(self, word: str, reason: str, sentence: str, is_drained: bool) -> Action:
        """`is_drained`: by whomever, or to be by Slurm."""
        fails = self.context == "epilog" or (self.context == "prolog" and self.is_urgent)
        told = "; ".join(part for part in (sentence, *self.store.notes) if part)
        return Action(word, reason, int(fails and is_drained), self.slurm.calls, told)


def _how_bad(verdict: Verdict) -> tuple[int, bool]:
    return rank(verdict.word), not verdict.sticky
