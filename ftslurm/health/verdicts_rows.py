"""What the readings of the hardware mean, by the decision table. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

from ftslurm.health import signals as s
from ftslurm.health.decision_table import (
    ABOVE,
    ABOVE_OTHER,
    ANY_OF,
    AT_LEAST,
    AT_MOST,
    BELOW_BASELINE,
    BELOW_OTHER,
    BITS,
    DECISION_TABLE,
    IS,
    IS_NOT,
    LEFT,
    PER_MINUTE,
    RISEN,
    Row,
)
from ftslurm.health.history import is_same_rise, lasting_since
from ftslurm.health.signals import Signal
from ftslurm.health.verdict import Case, Verdict, as_number
from ftslurm.health.xid_table import DRAIN, IGNORE, NEEDS_REPAIR, RESET, UNKNOWN, WARN

_OF_KIND: dict[str, list[Row]] = {}
for _row in DECISION_TABLE:
    _OF_KIND.setdefault(_row.kind, []).append(_row)

_DRIVER_XIDS = {62, 79, 119}
"""Behind any of these a call that hangs is no accident (gpud#117, Azure/azurehpc#714)."""
_IN_WORK = ("not_started", "in_progress")
_NEED_GPUS = (s.NVML_UNUSABLE, s.NVML_ERROR, s.DRIVER_HANG)
"""Without a GPU a node has no driver to be missed."""
_COUNTS = (s.GPU_COUNT_NVML, s.GPU_COUNT_PCI)
_PORT_FOR_S = 10.0
"""A prolog cannot wait four minutes for a port, and no job should begin without it."""


def judge_rows(case: Case) -> list[Verdict]:
    verdicts = []
    for signal in case.reading.signals:
        for row in _OF_KIND.get(signal.kind, ()):
            if row.rule in case.thresholds.off or not _applies(row, signal, case):
                continue
            verdict = _verdict(row, signal, case)
            if verdict is not None:
                verdicts.append(verdict)
    return verdicts


def _applies(row: Row, signal: Signal, case: Case) -> bool:
    if row.where and signal.where.rpartition("/")[2] != row.where:
        return False
    if row.kind.startswith("nvlink") and case.state(s.MIG_MODE, signal.gpu):
        return False  # NVLink is off under MIG (DCGM, NVBug 200682374)
    if row.kind in _NEED_GPUS and not case.has_gpus():
        return False
    if row.kind == s.FABRIC_STATUS and case.state(s.FABRIC_STATE, signal.gpu) in _IN_WORK:
        return False  # it means something behind the end only (nvml.h, nvmlGpuFabricInfo_t)
    utilisation = as_number(case.state(s.GPU_UTILISATION, signal.gpu)) or 0.0
    return not row.loaded or utilisation > 0


def _verdict(row: Row, signal: Signal, case: Case) -> Optional[Verdict]:
    if row.test in (RISEN, PER_MINUTE):
        risen = case.risen(signal)
        if risen.by is None:
            return _cannot_tell(row, signal, risen.why)
    if not _holds(row, signal, case):
        return None
    verdict = _of_row(row, signal, row.word, _sentence(row, signal, case))
    return verdict if _has_lasted(row, verdict, case) else _milder(row, verdict)


def _cannot_tell(row: Row, signal: Signal, why: str) -> Optional[Verdict]:
    value = as_number(signal.value) or 0.0
    if why.startswith("the counter"):
        sentence = f"cannot tell whether there are {row.meaning}: {why}"
        return _of_row(row, signal, UNKNOWN, sentence)
    if value > 0 and row.test == RISEN and row.word in (RESET, DRAIN):
        sentence = f"{row.meaning}: {signal.value} since the driver was loaded, {why}"
        return _of_row(row, signal, WARN, sentence)
    return None


def _of_row(row: Row, signal: Signal, word: str, sentence: str) -> Verdict:
    drains = word not in (WARN, UNKNOWN, IGNORE)
    return Verdict(
        word,
        row.code,
        signal.gpu,
        sentence,
        row.rule,
        f"{row.source} ({row.date})",
        (signal,),
        sticky=drains and row.is_sticky,
        auto_resume=drains and not row.is_sticky and row.needs != NEEDS_REPAIR,
        needs=row.needs if drains else "",
        trend=row.trend,
    )


def _milder(row: Row, verdict: Verdict) -> Verdict:
    sentence = f"{verdict.sentence}; not for long enough yet"
    return _of_row(row, verdict.signals[0], row.first or WARN, sentence)


def _sentence(row: Row, signal: Signal, case: Case) -> str:
    value = f"{signal.value:#x}" if row.test == BITS else f"{signal.value}"
    place = f" at link {signal.link}" if signal.link is not None else ""
    place += f" at {signal.where}" if signal.where else ""
    told = f" ({signal.text})" if signal.text and signal.kind != s.KERNEL_LOST else ""
    then = case.before(signal)
    since = f", {then} before" if then is not None and row.test not in (IS, ANY_OF) else ""
    return f"{row.meaning}{place}: {signal.kind} is {value}{since}{told}"


def _holds(row: Row, signal: Signal, case: Case) -> bool:
    value, bound = signal.value, row.bound
    if row.test == IS:
        return value == bound
    if row.test == IS_NOT:
        if isinstance(bound, int):
            return as_number(value) is not None and value != bound
        return value not in bound if isinstance(bound, tuple) else value != bound
    if row.test == ANY_OF:
        return isinstance(bound, tuple) and value in bound
    if row.test == LEFT:
        return case.before(signal) == bound and value != bound
    number = as_number(value)
    if number is None:
        return False
    if row.test == BITS:
        return isinstance(value, int) and isinstance(bound, int) and bool(value & bound)
    if row.test in (BELOW_BASELINE, BELOW_OTHER, ABOVE_OTHER):
        return _compares(row, number, signal, case)
    return _reaches(row, number, signal, case)


def _compares(row: Row, number: float, signal: Signal, case: Case) -> bool:
    if row.test == BELOW_BASELINE:
        before = as_number(case.before(signal))
        return before is not None and number < before
    kinds = _kinds(row)
    if row.kind in _COUNTS and not _has_gres(case):
        kinds = tuple(kind for kind in kinds if kind != s.GPU_COUNT_GRES)
    others = (as_number(case.state(str(kind), signal.gpu)) for kind in kinds)
    known = [other for other in others if other is not None]
    if row.test == BELOW_OTHER:
        return any(number < other for other in known)
    return any(number > other for other in known)


def _has_gres(case: Case) -> bool:
    """Settings are shared with nodes that have no GPU, and slices of one are no GPUs."""
    is_cut = any(one.value is True for one in case.reading.of(s.MIG_MODE))
    return case.state(s.GPU_COUNT_PCI, None) != 0 and not is_cut


def _kinds(row: Row) -> tuple[object, ...]:
    return row.bound if isinstance(row.bound, tuple) else ()


def _reaches(row: Row, number: float, signal: Signal, case: Case) -> bool:
    bound = case.thresholds.limits.get(row.rule, as_number(_plain(row)))
    if bound is None:
        return False
    if row.test == AT_LEAST:
        return number >= bound
    if row.test == ABOVE:
        return number > bound
    if row.test == AT_MOST:
        return number <= bound
    risen, minutes = case.risen(signal).by or 0.0, case.minutes()
    if row.test == RISEN:
        share = row.window_s / (60.0 * minutes) if row.window_s and minutes else 1.0
        return risen * min(1.0, share) >= bound
    return minutes is not None and risen / minutes >= bound


def _plain(row: Row) -> Optional[float]:
    return row.bound if isinstance(row.bound, (int, float)) else None


def _has_lasted(row: Row, verdict: Verdict, case: Case) -> bool:
    now, signal = case.reading.at, verdict.signals[0]
    if row.kind == s.DRIVER_HANG and any(_driver_xids(case)):
        return True
    streak = case.history.streaks.get(case.streak_key(verdict.key))
    reads = 1 + (streak.reads if streak else 0)
    if row.kind == s.DRIVER_HANG and not _is_no_slow_start(signal, case):
        return False
    if streak and is_same_rise(streak, row.test in (RISEN, PER_MINUTE), case.since()):
        reads = streak.reads
    lasted_s = now - lasting_since(streak, now) if streak else 0.0
    for_s = row.for_s
    if row.test == LEFT and case.reading.context in ("prolog", "epilog"):
        for_s = min(for_s, _PORT_FOR_S)
    return reads >= row.reads and lasted_s >= for_s


def _is_no_slow_start(signal: Signal, case: Case) -> bool:
    """Without persistence mode the driver starts all its GPUs for each first client anew, and may
    take longer than a look has (docs.nvidia.com/deploy/driver-persistence)."""
    modes = case.baseline.of(s.PERSISTENCE_MODE) if case.baseline else []
    is_kept_up = bool(modes) and all(one.value is True for one in modes)
    return is_kept_up or s.UNKILLABLE in signal.text


def _driver_xids(case: Case) -> Iterator[bool]:
    for signal in case.reading.of(s.XID):
        yield signal.value in _DRIVER_XIDS
    for past in case.history.past:
        is_driver = past.what in {f"XID{xid}" for xid in _DRIVER_XIDS}
        yield is_driver and past.boot_id == case.reading.boot_id
