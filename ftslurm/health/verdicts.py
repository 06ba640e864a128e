"""What one look at a node means: verdicts, worst first. Pure: the same values, the same verdict.

Warnings and what could not be told never drain; what a program has done to itself never does, and
is handed to its run. Numbers count by their change since the baseline, which has to be of the same
boot.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Optional

from ftslurm.health import signals as s
from ftslurm.health.decision_table import DECISION_TABLE, PER_MINUTE, RISEN
from ftslurm.health.history import History, Past, with_past, with_streaks
from ftslurm.health.signals import Failure, Gpu, Reading
from ftslurm.health.verdict import Case, Thresholds, Verdict, as_number, rank
from ftslurm.health.verdicts_kernel import judge_kernel, without_echoes
from ftslurm.health.verdicts_rows import judge_rows
from ftslurm.health.verdicts_xid import unit_of
from ftslurm.health.xid_table import AFTER, DRAIN, IGNORE, NEEDS_REBOOT, UNKNOWN, WARN

_ESCALATES = ("nvml",)
"""Sources without which nobody can say that a GPU works: to trust such a node hid Xids 119 and 154
(gpustack/runtime#26). A log or a tool that cannot be read says nothing about the node, and is
mostly the same on all of them (cluster-toolkit#6230, NVSentinel#1642)."""
_BUSY_PERCENT = 50.0
_SAME_LOAD_PERCENT = 10.0
_SAME_POWER = 0.1
_WEEK_S = 7 * 86400.0
_NIC_POLLS = 3
_PORTS_BY = "sysfs"
"""The source of a failure after which ports may be missing from the reading only."""
_KIND_OF = {row.rule: row.kind for row in DECISION_TABLE}
_DELTAS = {row.rule for row in DECISION_TABLE if row.test in (RISEN, PER_MINUTE)}
_TRENDS = {row.rule for row in DECISION_TABLE if row.trend} | {"XID92"}


def judge(
    reading: Reading,
    *,
    baseline: Optional[Reading],
    history: History,
    thresholds: Optional[Thresholds] = None,
) -> list[Verdict]:
    """Worst first; among equals what the kernel says first.

    Rows that have to last need a second look: `remember` this one and judge again, a few seconds
    later in the same probe or in the next one. The baseline is the job's prolog; for looks while a
    node is not watched by a job, the look before.
    """
    is_same_boot = baseline is not None and baseline.boot_id == reading.boot_id
    case = Case(reading, baseline if is_same_boot else None, history, thresholds or Thresholds())
    verdicts = judge_kernel(case) + judge_rows(case)
    verdicts += _missing_nics(case) + _cooling(case) + _unread(case)
    verdicts += _trends(case, verdicts)
    kept = [one for one in without_echoes(verdicts) if one.rule not in case.thresholds.off]
    return sorted(kept, key=lambda one: rank(one.word))


def remember(
    history: History, reading: Reading, verdicts: list[Verdict], *, baseline: Optional[Reading]
) -> History:
    """What the next look has to know of this one. `baseline` as it was judged by."""
    now, new = reading.at, []
    for verdict in verdicts:
        is_xid = verdict.code.startswith("XID") and verdict.rule.startswith("xid-")
        if not verdict.signals or (verdict.word in (IGNORE, UNKNOWN) and not is_xid):
            continue
        signal = verdict.signals[0]
        new.append(
            Past(
                verdict.code if is_xid else verdict.rule,
                now,
                key=verdict.key,
                bus=signal.gpu.bus if signal.gpu else "",
                boot_id=reading.boot_id,
                job=reading.job,
                user=reading.user,
                detail=unit_of(signal) if is_xid else "",
            )
        )
    holding = {f"{reading.boot_id}|{verdict.key}": verdict.rule in _DELTAS for verdict in verdicts}
    kinds = {signal.kind for signal in reading.signals}
    unread = {rule for rule, kind in _KIND_OF.items() if kind not in kinds}
    return with_streaks(
        with_past(history, new, now=now),
        holding,
        unread if reading.failures else set(),
        now=now,
        since=baseline.at if baseline else None,
        boot_id=reading.boot_id,
    )


def _unread(case: Case) -> list[Verdict]:
    return [_unread_source(case, failure) for failure in case.reading.failures]


def _unread_source(case: Case, failure: Failure) -> Verdict:
    """Neither healthy nor sick; said each time, with how often by now."""
    rule = f"unread-{failure.source}"
    streak = case.history.streaks.get(case.streak_key(rule))
    looks = 1 + (streak.reads if streak else 0)
    is_long = looks >= case.thresholds.unknown_probes and case.has_gpus()
    drains = is_long and failure.source in _ESCALATES
    return Verdict(
        DRAIN if drains else UNKNOWN,
        "NVML-SILENT" if drains else "UNREAD",
        None,
        f"could not tell from {failure.source}, look {looks} in a row: {failure.text[:200]}",
        rule,
        "gpustack/runtime#26; cluster-toolkit#6230 (2026-08)",
        auto_resume=drains,
    )


def _missing_nics(case: Case) -> list[Verdict]:
    """A port that the baseline had and that sysfs no longer has; its end brings the node back."""
    if case.baseline is None or any(one.source == _PORTS_BY for one in case.reading.failures):
        return []
    here = {signal.where for signal in case.reading.of(s.RDMA_STATE)}
    verdicts = []
    for signal in case.baseline.of(s.RDMA_STATE):
        if signal.where in here:
            continue
        verdict = Verdict(
            WARN,
            "NIC-GONE",
            None,
            f"port {signal.where} was there at the baseline and is gone",
            "nic-missing",
            "NVSentinel nic-health-monitor (2026-08)",
            (signal,),
        )
        streak = case.history.streaks.get(case.streak_key(verdict.key))
        if streak is not None and streak.reads + 1 >= _NIC_POLLS:
            verdict = replace(verdict, word=DRAIN, auto_resume=True, needs=NEEDS_REBOOT)
        verdicts.append(verdict)
    return verdicts


def _cooling(case: Case) -> list[Verdict]:
    """Hotter at the same load: dust, a fan, a pump or the room, but not the GPU."""
    verdicts = []
    for signal in case.reading.of(s.TEMPERATURE):
        now, then = as_number(signal.value), as_number(case.before(signal))
        if now is None or then is None or not _is_same_load(case, signal.gpu):
            continue
        if now - then >= case.thresholds.cooling_rise_c:
            sentence = f"cooling: {now:.0f} C, {then:.0f} C before at the same load"
            verdicts.append(
                Verdict(WARN, "COOLING", signal.gpu, sentence, "cooling", "ftslurm", (signal,))
            )
    return verdicts


def _is_same_load(case: Case, gpu: Optional[Gpu]) -> bool:
    if case.baseline is None:
        return False
    before = Case(case.baseline, None, case.history, case.thresholds)
    loads = [as_number(one.state(s.GPU_UTILISATION, gpu)) for one in (before, case)]
    powers = [as_number(one.state(s.POWER_W, gpu)) for one in (before, case)]
    if loads[0] is None or loads[1] is None or min(loads[0], loads[1]) < _BUSY_PERCENT:
        return False
    is_same = abs(loads[0] - loads[1]) <= _SAME_LOAD_PERCENT
    if powers[0] is None or powers[1] is None:
        return is_same
    return is_same and abs(powers[0] - powers[1]) <= _SAME_POWER * powers[0]


def _trends(case: Case, verdicts: list[Verdict]) -> list[Verdict]:
    """Two kinds on one GPU in a week foretell a failure; a site may let that drain."""
    kinds: dict[str, set[str]] = {}
    gpus: dict[str, Gpu] = {}
    for verdict in verdicts:
        if verdict.trend and verdict.gpu is not None and verdict.word != UNKNOWN:
            gpus[verdict.gpu.bus] = verdict.gpu
            kinds.setdefault(verdict.gpu.bus, set()).add(_kind_of(verdict.rule))
    for past in case.history.past:
        is_of_week = 0 <= case.reading.at - past.at <= _WEEK_S
        if past.what in _TRENDS and past.bus in gpus and is_of_week:
            kinds[past.bus].add(_kind_of(past.what))
    drains = case.thresholds.trends_drain
    return [
        Verdict(
            AFTER if drains else WARN,
            "TREND",
            gpus[bus],
            f"getting worse in more than one way: {', '.join(sorted(found))}",
            "trend",
            "ftslurm; DCGM's limit of retired pages in a week is the model",
            auto_resume=False,
            sticky=drains,
        )
        for bus, found in sorted(kinds.items())
        if len(found) >= 2
    ]


def _kind_of(rule: str) -> str:
    return _KIND_OF.get(rule, "xid 92" if rule in ("XID92", "xid-92") else rule)
