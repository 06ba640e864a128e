"""Whether the ranks hang, and which of them the others wait for. Pure; the clock is a parameter.

All ranks train in step, so a hang is that nobody has given a sign of life (a step, a phase, a
collective) for longer than this run's own steps explain. Whoever is in a phase that has no steps
has that phase's limit, and as long as it keeps within that, nobody hangs; whoever is blocked in the
kernel has a save's, and is told of before. What is not known is not blamed: a rank that has never
beaten is no finding, and without a culprit there is none named. A program that only counts its
steps cannot say what it is at: its silence may be an evaluation, and has the limit of one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

from ftslurm.run.heartbeat import COMPILING, EVALUATING, LEAVING, SAVING, TRAINING, RankView
from ftslurm.run.spec import RecoverySpec

LOOKED_AWAY_S = 5.0
"""A reader that has not looked for this long was itself stopped, e.g. by `scontrol suspend`, and so
were the ranks: what happened meanwhile is held against nobody."""
SOON_S = 1.0
"""Whoever looks each second is told when a limit runs out before the next look."""
EARLY_S = 0.7
"""Taken off the limit, as much as a look on a busy machine may come late, so that it is kept and
not exceeded."""
STILL_IN_KERNEL_S = 3.0
"""So long after a rank was last seen in state D it counts as blocked there: between one call that
storage holds up and the next it may be seen running."""


@dataclass(frozen=True)
class HangLimits:
    factor: float = 3.0
    """0: never."""
    floor_s: float = 10.0
    phase_limit_s: Mapping[str, float] = field(default_factory=dict)
    """Without an entry, or 0: none."""

    @classmethod
    def of(cls, spec: RecoverySpec) -> HangLimits:
        return cls(spec.hang_factor, spec.hang_floor_s, spec.phase_limit_s)


@dataclass
class HangMemory:
    """What is kept from one look to the next; one for each attempt."""

    usual_step_s: float = 0.0
    """Of the run so far; the attempt before may lend its own."""
    has_seen_waiting: bool = False
    """Whether a rank has ever been seen inside a collective: these ranks tell of them."""
    stopped_since: dict[int, float] = field(default_factory=dict)
    looked_at: Optional[float] = None
    fair_from: float = 0.0
    """Silence counts from here at the earliest."""
    in_kernel_at: dict[int, float] = field(default_factory=dict)
    """Rank -> when it was last seen blocked in the kernel, outside of a collective."""
    has_told_of_kernel: bool = False
    """Since somebody last advanced."""
    due_in_s: float = math.inf
    """When nobody moves, there will be a finding this long after the newest look; told to the
    moment up to SOON_S."""


@dataclass(frozen=True)
class HangFinding:
    ranks: tuple[int, ...]
    """Who makes no progress: all that were looked at."""
    culprits: tuple[int, ...]
    """Whom the others wait for; empty where that cannot be told."""
    why: str
    silent_s: float
    acts: bool = True
    """Whether the attempt is to be ended; else it is to be known."""


def hung(
    views: Sequence[RankView], memory: HangMemory, limits: HangLimits, *, at: float
) -> Optional[HangFinding]:
    """Judge one look at the ranks; `at`: seconds of the looker's steady clock.

    `views` are those of one moment (see agent/report.py) and of nodes that are heard: the ranks of
    a node that is cut off are another matter.
    """
    _remember(views, memory, at)
    if not views or limits.factor <= 0 or all(view.phase == LEAVING for view in views):
        return None
    fair_s = at - memory.fair_from
    limit_s = limits.factor * memory.usual_step_s + limits.floor_s - EARLY_S
    silent_s = min(min(view.age_s for view in views), fair_s)
    frozen = [rank for rank, since in memory.stopped_since.items() if at - since >= limit_s]
    if not frozen:
        memory.due_in_s = _due_in_s(views, memory, limits, fair_s)
        if memory.due_in_s > 0:
            memory.has_told_of_kernel = False
            return None
    culprits, reasons = blame(views)
    acts = not _is_storage(views, memory, limits, silent_s, at)
    if not acts:
        if memory.has_told_of_kernel:
            return None
        memory.has_told_of_kernel = True
    return HangFinding(
        ranks=tuple(view.rank for view in views),
        culprits=culprits,
        why=_sentence(silent_s, memory, reasons) + _advice(views, culprits),
        silent_s=silent_s,
        acts=acts,
    )


def blame(views: Sequence[RankView]) -> tuple[tuple[int, ...], list[str]]:
    """Whom the others wait for, and why they are thought to: the surest sign that any rank shows
    decides, the weaker ones of others follow from it."""
    for sign in (_gone, _stopped, _in_kernel, _behind, _elsewhere, _outside):
        named = sign(views)
        if named:
            reasons = [f"rank {view.rank} on {view.node} {reason}" for view, reason in named]
            return tuple(view.rank for view, _ in named), reasons
    return (), [_nobody(views)]


_Named = list[tuple[RankView, str]]


def _gone(views: Sequence[RankView]) -> _Named:
    return [(view, "has ended") for view in views if not view.alive and view.phase != LEAVING]


def _stopped(views: Sequence[RankView]) -> _Named:
    return [
        (view, "is stopped (state T: SIGSTOP or a debugger)")
        for view in views
        if view.proc_state in ("T", "t")
    ]


def _in_kernel(views: Sequence[RankView]) -> _Named:
    blocked = [view for view in views if view.proc_state == "D" and not view.in_collective]
    nodes = len({view.node for view in blocked})
    where = f"state D on {nodes} nodes: storage" if nodes > 1 else "state D: storage or a device"
    return [(view, f"is blocked in the kernel ({where})") for view in blocked]


def _behind(views: Sequence[RankView]) -> _Named:
    """Fewer collectives entered than the others: than those that wait in theirs or, where no host
    is seen to wait since the devices do (CUDA), than any."""
    newest = max(view.collective_seq for view in views)
    ahead = [view for view in views if view.collective_seq == newest]
    do_wait = any(view.in_collective for view in ahead)
    if not do_wait and any(view.in_collective for view in views):
        return []
    they = f"wait{_s(ahead)} in" if do_wait else f"{_s(ahead, 'have', 'has')} entered"
    there = f"collective {newest} ({ahead[0].collective}) that {_ranks(ahead)} {they}"
    named = []
    for view in views:
        if view.collective_seq == newest:
            continue
        if view.in_collective:
            own = f"{view.collective_seq} ({view.collective})"
            named.append((view, f"waits in collective {own} and has left out one before {there}"))
        else:
            named.append((view, f"has not entered {there}: it is {_doing(view)}"))
    return named


def _elsewhere(views: Sequence[RankView]) -> _Named:
    """As many collectives entered, but another one than most: an earlier one was left out."""
    waiting = [view for view in views if view.in_collective]
    names = Counter(view.collective for view in waiting)
    if len(names) < 2:
        return []
    (usual, count), *others = names.most_common()
    if count == others[0][1]:
        odd = waiting  # as many here as there: nobody is in the right
    else:
        odd = [view for view in waiting if view.collective != usual]
    reason = "waits in {} while most others wait in {}: their orders of collectives differ"
    return [(view, reason.format(view.collective, usual)) for view in odd]


def _outside(views: Sequence[RankView]) -> _Named:
    if not any(view.in_collective for view in views):
        return []
    return [
        (view, f"is in no collective while the others wait in one: it is {_doing(view)}")
        for view in views
        if not view.in_collective
    ]


def _nobody(views: Sequence[RankView]) -> str:
    if all(view.counted for view in views):
        calls = ", ".join(sorted({str(view.step) for view in views}, key=int)[:4])
        return f"{_ranks(views)} called ftslurm.should_stop() {calls} times and then no more"
    if all(view.in_collective for view in views):
        return (
            f"all ranks wait in the same collective ({views[0].collective}): the network, or a "
            "rank that is not known here"
        )
    states = "".join(sorted({view.proc_state for view in views}))
    return f"no rank is known to wait for another (process states {states})"


def _remember(views: Sequence[RankView], memory: HangMemory, at: float) -> None:
    if memory.looked_at is None or at - memory.looked_at > LOOKED_AWAY_S:
        memory.fair_from = at
        memory.stopped_since.clear()
    if memory.looked_at is None:
        memory.fair_from = at - max((view.age_s for view in views), default=0.0)
    memory.looked_at = at
    usual = sorted(view.usual_step_s for view in views if view.usual_step_s > 0)
    if usual:
        memory.usual_step_s = usual[(len(usual) - 1) // 2]
    for view, _ in _in_kernel(views):
        memory.in_kernel_at[view.rank] = at
    memory.has_seen_waiting |= any(view.in_collective for view in views)
    stopped = {view.rank for view, _ in _stopped(views)}
    for rank in set(memory.stopped_since) - stopped:
        del memory.stopped_since[rank]
    for rank in stopped:
        memory.stopped_since.setdefault(rank, at)


def _due_in_s(
    views: Sequence[RankView], memory: HangMemory, limits: HangLimits, fair_s: float
) -> float:
    """Until all have been silent for longer than they may; of 10,000, no more are asked than it
    takes."""
    unmarked = memory.has_seen_waiting and _is_unmarked(views)
    due_in_s = 0.0
    for view in views:
        own_limit_s = _limit_s(view, memory, limits, unmarked=unmarked)
        left_s = math.inf if own_limit_s is None else own_limit_s - min(_silence_s(view), fair_s)
        due_in_s = max(due_in_s, left_s)
        if due_in_s > SOON_S:
            break
    return due_in_s


def _limit_s(
    view: RankView, memory: HangMemory, limits: HangLimits, *, unmarked: bool
) -> Optional[float]:
    """How long this rank may be silent; None: as long as it likes."""
    phase = view.phase
    if phase == LEAVING:
        return 0.0  # waits for the others, within limits of its own
    step_limit_s = limits.factor * memory.usual_step_s + limits.floor_s - EARLY_S
    if phase == TRAINING and view.counted:
        if not memory.usual_step_s:
            return None  # it may call once an epoch, or once before its loop
        rest_limit_s = limits.phase_limit_s.get(EVALUATING)
        return max(step_limit_s, rest_limit_s) if rest_limit_s else None
    if phase == TRAINING and memory.usual_step_s:
        if not unmarked:
            return step_limit_s
        phase = EVALUATING
    elif phase == TRAINING:
        phase = COMPILING  # three steps have to tell what is usual
    return limits.phase_limit_s.get(phase) or None


def _is_unmarked(views: Sequence[RankView]) -> bool:
    """Nobody waits for anybody, and nobody has been where another has not: an evaluation, say, that
    nobody has marked as one. Where devices wait, the hosts look like this in every hang."""
    first = views[0]
    return all(
        not view.in_collective
        and not view.devices_wait
        and view.alive
        and view.collective_seq == first.collective_seq
        for view in views
    )


def _is_storage(
    views: Sequence[RankView], memory: HangMemory, limits: HangLimits, silent_s: float, at: float
) -> bool:
    """Whom the others wait for is blocked in the kernel, as a file system that fails over blocks
    for a minute whoever writes: it has as long as a save."""
    limit_s = limits.phase_limit_s.get(SAVING) or math.inf
    if silent_s >= limit_s or _gone(views) or _stopped(views):
        return False
    since = at - STILL_IN_KERNEL_S
    outside = [view for view in views if not view.in_collective]
    return any(memory.in_kernel_at.get(view.rank, -math.inf) >= since for view in outside)


def _silence_s(view: RankView) -> float:
    """In training every sign counts; elsewhere the phase as a whole has its limit."""
    return view.age_s if view.phase in (TRAINING, LEAVING) else view.phase_age_s


def _doing(view: RankView) -> str:
    state = {"R": "computing", "S": "blocked", "D": "blocked in the kernel"}.get(view.proc_state)
    return f"{state or 'in state ' + view.proc_state} in phase {view.phase}, step {view.step}"


def _sentence(silent_s: float, memory: HangMemory, reasons: Sequence[str]) -> str:
    usual = f" (a step usually takes {memory.usual_step_s:.2g} s)" if memory.usual_step_s else ""
    more = f"; and {len(reasons) - 4} more" if len(reasons) > 4 else ""
    return f"no rank has advanced for {silent_s:.1f} s{usual}: {'; '.join(reasons[:4])}{more}"


def _advice(views: Sequence[RankView], culprits: Sequence[int]) -> str:
    """For a loop that is at work on something that it has not named."""
    at_work = [view for view in views if view.rank in culprits or not culprits]
    if all(view.counted for view in at_work):
        return (
            "; if it was busy, have it call ftslurm.should_stop() meanwhile or raise "
            "recovery.phase_limit_s.evaluating"
        )
    if not all(view.phase == TRAINING and view.proc_state == "R" for view in at_work):
        return ""
    return "; if that is an evaluation, put it into `with session.evaluating():`"


def _ranks(views: Sequence[RankView]) -> str:
    names = ", ".join(str(view.rank) for view in views[:8])
    more = f" and {len(views) - 8} more" if len(views) > 8 else ""
    return f"rank{_s(views, 's', '')} {names}{more}"


def _s(views: Sequence[RankView], many: str = "", one: str = "s") -> str:
    return one if len(views) == 1 else many
