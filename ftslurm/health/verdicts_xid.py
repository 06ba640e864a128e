"""What one Xid means: its row, then all that may make it milder or worse. Pure.

In this order: the row, by the GPU's own state where it has one; the echo of another GPU's end; the
driver's recovery action; how often it has come before.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Optional

from ftslurm.health import signals as s
from ftslurm.health.signals import Gpu, Signal
from ftslurm.health.verdict import HARD, Case, Verdict, bus_of, is_near, xid_number
from ftslurm.health.verdicts_action import Action, outranked
from ftslurm.health.verdicts_nvlink import by_registers, by_words
from ftslurm.health.xid_table import (
    BY_XID,
    DRAIN,
    NEEDS_REPAIR,
    NEEDS_RESET,
    RESET,
    UNLISTED,
    WARN,
    Repeat,
    XidRow,
)

_TWO_WEEKS_S = 14 * 86400.0
_UNIT = re.compile(r"\bGPC (\d+), TPC (\d+)")


def judge_xid(case: Case, index: int, action: Optional[Action]) -> Verdict:
    """Of the Xid at that place of the log, with the recovery action of its GPU."""
    signal = case.xids[index]
    row = _row(case, signal)
    word, note = _by_row(case, row, signal)
    echo = _echo_of(case, signal) if row.rule in ("nvlink4", "nvlink5") else None
    if echo is not None and word in HARD:
        word, note = WARN, f"an echo of the Xid {echo.value} of {bus_of(echo)}"
    needs = row.needs
    if action is not None:
        if word in HARD and action.index > index and not row.is_sticky:
            word, note = outranked(word, note, action)
        if action.row.word in HARD:
            needs = action.row.needs or needs
    verdict = _verdict(row, signal, word, note, needs)
    return _for_a_person(case, _repeated(case, row.repeat, verdict))


def unit_of(signal: Signal) -> str:
    """`2/3` for GPC 2, TPC 3: the same unit again and again is broken, not the program."""
    match = _UNIT.search(signal.text)
    return f"{match.group(1)}/{match.group(2)}" if match else ""


def _row(case: Case, signal: Signal) -> XidRow:
    row = BY_XID.get(xid_number(signal), UNLISTED)
    if row.rule == "remap_failure" and case.state(s.REMAP_FAILURE, signal.gpu) is False:
        return replace(row, word=RESET, needs=NEEDS_RESET, is_sticky=False)
    return row


def _by_row(case: Case, row: XidRow, signal: Signal) -> tuple[str, str]:
    """NVML's state of a row remap outranks the Xids that tell of it (gpud#987)."""
    gpu = signal.gpu
    if row.rule == "remap_pending":
        states = [case.state(kind, gpu) for kind in (s.REMAP_PENDING, s.RETIRED_PAGES_PENDING)]
        state = next((one for one in states if one is not None), None)
        return (row.word, "") if state is None else (WARN, f"remap pending is {state}")
    if row.rule == "nvlink4":
        return by_registers(signal.text)
    if row.rule == "nvlink5":
        return by_words(signal.text)
    if row.volta and _is_volta(case, gpu):
        return row.volta, "on a part before A100"
    return row.word, ""


def _is_volta(case: Case, gpu: Optional[Gpu]) -> bool:
    """Pages are retired up to V100, rows remapped from A100 on."""
    has_pages = case.state(s.RETIRED_PAGES, gpu) is not None
    return has_pages and case.state(s.REMAP_PENDING, gpu) is None


def _echo_of(case: Case, signal: Signal) -> Optional[Signal]:
    """The end of a peer GPU seconds before or after."""
    peers = (one for one in case.ends if bus_of(one) != bus_of(signal))
    return next((one for one in peers if is_near(case, one, signal)), None)


def _verdict(row: XidRow, signal: Signal, word: str, note: str, needs: str) -> Verdict:
    is_hard, text = word in HARD, f" ({signal.text})" if signal.text else ""
    sticky = is_hard and row.is_sticky and needs == NEEDS_REPAIR
    return Verdict(
        word,
        f"XID{signal.value}",
        signal.gpu,
        f"Xid {signal.value}, {row.meaning}{f'; {note}' if note else ''}{text[:200]}",
        f"xid-{signal.value}",
        f"{row.source} ({row.date}): {row.action}",
        (signal,),
        hands_to_run=row.of_user,
        sticky=sticky,
        auto_resume=is_hard and not sticky,
        needs=needs if is_hard else "",
        trend=row.rule == "trend",
    )


def _repeated(case: Case, repeat: Optional[Repeat], verdict: Verdict) -> Verdict:
    """The same again and again on one GPU is the GPU's, if it is not a program's: one user's broken
    program comes back in job after job, and one that many use faults on all GPUs alike."""
    if repeat is None or verdict.word in HARD:
        return verdict
    signal, bus = verdict.signals[0], bus_of(verdict.signals[0])
    unit = unit_of(signal) if repeat.same_unit else ""
    earlier = case.past(verdict.code, window_s=repeat.window_s)
    here = [one for one in earlier if one.bus == bus]
    if repeat.same_unit:
        here = [one for one in here if unit and one.detail == unit]
    times = 1 + len(here)
    users = {user for user in (*(one.user for one in here), case.reading.user) if user}
    of_bus = Counter(one.bus for one in earlier) + case.xids_by_bus[xid_number(signal)]
    is_everywhere = any(of_bus[other] >= times for other in of_bus if other != bus)
    is_programs = repeat.users > 1 and (len(users) < repeat.users or is_everywhere)
    if times < repeat.times or is_programs:
        return verdict
    sentence = f"{verdict.sentence}; {times} times on this GPU"
    return replace(
        verdict, word=repeat.word, sentence=sentence, hands_to_run=False, auto_resume=True
    )


def _for_a_person(case: Case, verdict: Verdict) -> Verdict:
    """A GPU that fell off the bus twice in two weeks."""
    if verdict.word not in (DRAIN, RESET) or verdict.code != "XID79":
        return verdict
    bus, past = bus_of(verdict.signals[0]), case.past("XID79", window_s=_TWO_WEEKS_S)
    if not {one.boot_id for one in past if one.bus == bus} - {case.reading.boot_id}:
        return verdict
    sentence = f"{verdict.sentence}; not for the first time in 14 days"
    return replace(verdict, word=DRAIN, sentence=sentence, sticky=True, auto_resume=False)
