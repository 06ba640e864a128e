"""What is remembered of a drain of ours, and when it may be lifted again. Pure.

Lifted by us is only what we have drained, while exactly our reason stands; a person may do so at
any time. A fault that comes back under load looks gone on an idle node (NVSentinel#695), and a
drained node is given nothing to run: what needs a test under load waits for a person. So does what
shows only at work: a link that carries nothing neither flaps nor errs.

A person who has twice lifted a drain for something that is worse than it was (a port taken down on
purpose) is believed, until that thing was good again once. Once is not enough: a range of nodes is
lifted by accident (trixie#35).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Optional

from ftslurm.health.decision_table import (
    DECISION_TABLE,
    MEMORY,
    NVLINK,
    PER_MINUTE,
    RISEN,
)
from ftslurm.health.node_state import NodeState, in_other_hands
from ftslurm.health.restored import BY_BASELINE, Had, lacking, parse_had, with_had
from ftslurm.health.settings import HealthSettings
from ftslurm.health.signals import Reading, is_number
from ftslurm.health.verdict import HARD, Verdict, rank
from ftslurm.health.xid_table import NEEDS_REBOOT, NEEDS_RESET, RESET, UNKNOWN

_FORTNIGHT_S = 14 * 86400.0
_WEEK_S = 7 * 86400.0
_CAUSES, _EARLIER = 64, 64
_INSISTS = 2
_XIDS_UNDER_LOAD = frozenset(
    {48, 63, 64, 74, 92, 94, 95, 136, 140, *range(144, 151), *range(155, 162), 168, 171, 172}
)
"""Of memory and NVLink."""
_RULES_UNDER_LOAD = frozenset(
    {row.rule for row in (*MEMORY, *NVLINK) if not row.resumes}
    | {f"xid-{xid}" for xid in _XIDS_UNDER_LOAD}
)
_RULES_AT_WORK = frozenset(
    {row.rule for row in DECISION_TABLE if row.test in (RISEN, PER_MINUTE)} | {"trend"}
)
"""What rises; and an Xid that came again and again."""


@dataclass(frozen=True)
class Cause:
    """What a verdict said of lifting. `boot_id`: of the last look that found it."""

    rule: str
    code: str
    word: str
    place: str
    needs: str
    is_sticky: bool
    may_resume: bool
    boot_id: str
    key: str = ""
    """The verdict's: two ports of one node are two causes."""

    @property
    def is_at_work(self) -> bool:
        is_xid = self.rule.startswith(("xid-", "sxid-"))
        return not self.needs and (is_xid or self.rule in _RULES_AT_WORK)


@dataclass(frozen=True)
class OwnDrain:
    node: str
    reason: str
    at: float
    causes: tuple[Cause, ...] = ()
    former: str = ""
    """The milder reason that `reason` takes the place of, should that call have failed."""
    is_counted: bool = False
    """The breaker has let it stay."""
    passes: tuple[float, ...] = ()
    """When the node was found healthy since, in a row, in the boot `passes_boot`."""
    passes_boot: str = ""
    had: tuple[Had, ...] = ()
    """What a look has to have read again to count as healthy."""

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.reason, self.former)))

    def stands(self, state: NodeState) -> bool:
        return state.is_drained and state.is_ours and state.reason in self.reasons

    @property
    def worst(self) -> int:
        """Of the causes; 0 is the worst."""
        return min((_severity(cause.word, cause.is_sticky) for cause in self.causes), default=99)


@dataclass(frozen=True)
class Drains:
    """All that is remembered of drains on this node. It outlives a reboot."""

    drain: Optional[OwnDrain] = None
    resumes: tuple[float, ...] = ()
    """When we have lifted one."""
    earlier: tuple[tuple[float, str], ...] = ()
    """When, and for which place, a drain that is over had to wait for a reset or a reboot."""
    overruled: tuple[str, ...] = ()
    """Keys of verdicts that compare with before, each as often as a person has lifted its drain."""

    @property
    def accepted(self) -> frozenset[str]:
        """Keys of what a person insists on."""
        return frozenset(key for key in self.overruled if self.overruled.count(key) >= _INSISTS)


def causes_of(verdicts: Iterable[Verdict], boot_id: str) -> tuple[Cause, ...]:
    return tuple(
        Cause(
            rule=one.rule,
            code=one.code,
            word=one.word,
            place=one.gpu.place if one.gpu else "",
            needs=one.needs,
            is_sticky=one.sticky,
            may_resume=one.auto_resume,
            boot_id=boot_id,
            key=one.key,
        )
        for one in verdicts
        if one.word in HARD
    )


def with_causes(drain: OwnDrain, new: Iterable[Cause], had: Iterable[Had] = ()) -> OwnDrain:
    """A look found it sick (again): what was healthy since does not count."""
    merged = {(cause.rule, cause.place, cause.key): cause for cause in (*drain.causes, *new)}
    causes = tuple(merged.values())[-_CAUSES:]
    return replace(drain, causes=causes, passes=(), had=with_had(drain.had, had))


def with_look(
    drain: OwnDrain,
    verdicts: Sequence[Verdict],
    reading: Optional[Reading],
    *,
    at: float,
    boot_id: str,
    gap_s: float,
) -> OwnDrain:
    """After a look that drains nothing. One that could not tell, or has not read all that was there
    as good as it was, is no pass, and ends the row."""
    if any(one.word == UNKNOWN for one in verdicts) or lacking(drain.had, reading):
        return replace(drain, passes=())
    before = drain.passes if drain.passes_boot == boot_id else ()
    if before and 0 <= at - before[-1] < gap_s:
        return drain
    if before and at < before[-1]:  # the clock was set back
        before = ()
    return replace(drain, passes=(*before, at)[-100:], passes_boot=boot_id)


def is_worse(new: Iterable[Cause], drain: OwnDrain) -> bool:
    return any(_severity(cause.word, cause.is_sticky) < drain.worst for cause in new)


def ended(memory: Drains, *, now: float, is_by_us: bool, is_in_service: bool = False) -> Drains:
    """The drain is over; what the next one has to know of it. `is_in_service`: somebody has lifted
    it, and not only put another one in its place."""
    drain = memory.drain
    places = {cause.place for cause in drain.causes if cause.needs} if drain else set()
    earlier = [one for one in memory.earlier if now - one[0] <= _FORTNIGHT_S]
    earlier += [(drain.at, place) for place in sorted(places)] if drain else []
    resumes = [at for at in memory.resumes if now - at <= _WEEK_S]
    lifted = (
        sorted({cause.key for cause in drain.causes if cause.rule in BY_BASELINE}) if drain else []
    )
    overruled = memory.overruled + (tuple(lifted) if is_in_service and not is_by_us else ())
    return Drains(
        drain=None,
        resumes=tuple(resumes + ([now] if is_by_us else [])),
        earlier=tuple(earlier[-_EARLIER:]),
        overruled=overruled[-_EARLIER:],
    )


def with_good_again(memory: Drains, verdicts: Sequence[Verdict]) -> Drains:
    """After a look: what a person had insisted on, and that is as it was again, is watched anew."""
    if not memory.overruled or any(one.word == UNKNOWN for one in verdicts):
        return memory
    still = {one.key for one in verdicts}
    return replace(memory, overruled=tuple(key for key in memory.overruled if key in still))


def may_resume(
    memory: Drains, *, boot_id: str, settings: HealthSettings, now: float
) -> tuple[bool, str]:
    """Whether nothing on this node speaks against lifting the drain, and what does."""
    drain = memory.drain
    if drain is None:
        return False, "there is no drain of ours"
    if not settings.resume:
        return False, "health.resume is off"
    if not drain.causes:
        return False, "its cause is not known any more; a person has to lift it"
    for cause in drain.causes:
        why = _stays(cause, memory, boot_id=boot_id, now=now)
        if why:
            return False, f"{cause.code}: {why}"
    resumes = [at for at in memory.resumes if now - at <= _WEEK_S]
    if len(resumes) >= settings.resumes_per_week:
        return False, f"{len(resumes)} drains were lifted by us within a week; a person has to look"
    passes = len(drain.passes) if drain.passes_boot == boot_id else 0
    if passes < settings.resume_passes:
        return False, f"healthy in {passes} looks of this boot, {settings.resume_passes} are needed"
    return True, ""


def still_ours(drain: OwnDrain, state: NodeState) -> tuple[bool, str]:
    """Whether what stands on the node is this very drain, and nobody has other plans with it."""
    held = in_other_hands(state)
    if held:
        return False, held
    if not drain.stands(state):
        return False, f"the drain that stands is another ({state.reason or 'none'})"
    if "NOT_RESPONDING" in state.flags:
        return False, "the node does not answer slurmctld"
    return True, ""


def _stays(cause: Cause, memory: Drains, *, boot_id: str, now: float) -> str:
    """Why this cause keeps the node drained; empty where it does not."""
    if cause.is_sticky:
        return "never lifted but by a person"
    if not cause.may_resume:
        return "not lifted without a person"
    if cause.word == RESET or cause.rule in _RULES_UNDER_LOAD:
        return "test the node under load, then lift the drain by hand"
    if cause.is_at_work:
        return "it shows only at work: test the node under load, then lift the drain by hand"
    has_rebooted = boot_id != cause.boot_id
    if cause.needs in (NEEDS_RESET, NEEDS_REBOOT) and not has_rebooted:
        return "waits for a reboot"
    if cause.needs not in ("", NEEDS_RESET, NEEDS_REBOOT):
        return f"waits for {cause.needs}, which only a person can tell"
    again = [at for at, place in memory.earlier if place == cause.place]
    if cause.needs and any(now - at <= _FORTNIGHT_S for at in again):
        return "for the second time in 14 days; a person has to look"
    return ""


def _severity(word: str, is_sticky: bool) -> int:
    return 2 * rank(word) + (0 if is_sticky else 1)


def drains_record(memory: Drains) -> dict[str, Any]:
    return {"schema_version": 1, **asdict(memory)}


def parse_drains(record: Any) -> Drains:
    """An empty one of what is no record of one: then nothing is ours to lift."""
    try:
        drain = record["drain"]
        if drain is not None:
            causes = tuple(Cause(**cause) for cause in drain["causes"])
            lists = {"causes": causes, "passes": tuple(drain["passes"])}
            drain = OwnDrain(**{**drain, **lists, "had": parse_had(drain["had"])})
        memory = Drains(
            drain,
            tuple(record["resumes"]),
            tuple((at, place) for at, place in record["earlier"]),
            tuple(record["overruled"]),
        )
        return memory if _is_whole(memory) else Drains()
    except (TypeError, KeyError, AttributeError, ValueError):
        return Drains()


def _is_whole(memory: Drains) -> bool:
    numbers = [*memory.resumes, *(at for at, _ in memory.earlier)]
    texts = [*(place for _, place in memory.earlier), *memory.overruled]
    flags = []
    if memory.drain is not None:
        drain = memory.drain
        numbers += [drain.at, *drain.passes]
        texts += [drain.node, drain.reason, drain.former, drain.passes_boot]
        flags += [drain.is_counted]
        for cause in drain.causes:
            texts += [cause.rule, cause.code, cause.place, cause.needs, cause.boot_id, cause.key]
            flags += [cause.is_sticky, cause.may_resume]
            rank(cause.word)  # ValueError for no word of ours
    return (
        all(map(is_number, numbers))
        and all(isinstance(one, str) for one in texts)
        and all(isinstance(one, bool) for one in flags)
    )
