"""What the kernel log's messages mean: Xids, SXids and PCIe errors, by their tables. Pure."""

from __future__ import annotations

from dataclasses import replace

from ftslurm.health import signals as s
from ftslurm.health.kernel_line import CORRECTABLE, FATAL
from ftslurm.health.signals import Signal
from ftslurm.health.verdict import HARD, Case, Verdict, bus_of, is_near, xid_number
from ftslurm.health.verdicts_action import ACTION_XID, actions_by_bus, verdict_of
from ftslurm.health.verdicts_xid import judge_xid
from ftslurm.health.xid_table import (
    BY_SXID,
    DRAIN,
    IGNORE,
    NEEDS_REBOOT,
    SXID_FATAL,
    SXID_OTHER,
    WARN,
)

_MANY_CORRECTED = 100


def judge_kernel(case: Case) -> list[Verdict]:
    actions = actions_by_bus(case)
    verdicts = [verdict_of(action) for action in actions.values()]
    for index, signal in enumerate(case.xids):
        if signal.value != ACTION_XID:
            verdicts.append(judge_xid(case, index, actions.get(bus_of(signal))))
    verdicts += [_sxid(case, one) for one in case.reading.of(s.SXID) if xid_number(one)]
    verdicts += [_aer(signal) for signal in case.reading.of(s.AER)]
    return verdicts


def without_echoes(verdicts: list[Verdict]) -> list[Verdict]:
    """What a program is told of on a GPU that failed is the failure's, not the program's."""
    hard = [one for one in verdicts if one.word in HARD and one.needs and one.rule != "leftover"]
    failed = {one.gpu.bus for one in hard if one.gpu}
    return [replace(one, hands_to_run=False) if _is_echo(one, failed) else one for one in verdicts]


def _is_echo(verdict: Verdict, failed: set[str]) -> bool:
    if not verdict.hands_to_run:
        return False
    signal = verdict.signals[0]
    return bus_of(signal) in failed or "caused by previous Xid" in signal.text


def _sxid(case: Case, signal: Signal) -> Verdict:
    is_fatal = signal.text.startswith("Fatal")  # beside `Non-fatal`, in just these letters
    row = BY_SXID.get(xid_number(signal), SXID_OTHER)
    if is_fatal and row.word != DRAIN:
        row = SXID_FATAL
    word, note = row.word, ""
    end = next((one for one in case.ends if is_near(case, one, signal)), None)
    if row is SXID_FATAL and end is not None:
        word, note = WARN, f"; an echo of the Xid {end.value} of {bus_of(end)}"
    return Verdict(
        word,
        f"SXID{signal.value}",
        None,
        f"SXid {signal.value} of {signal.where}, {row.meaning}{note} ({signal.text[:200]})",
        f"sxid-{signal.value}",
        f"{row.source} ({row.date})",
        (signal,),
        auto_resume=word == DRAIN,
        needs=row.needs if word == DRAIN else "",
    )


def _aer(signal: Signal) -> Verdict:
    """Only a GPU's or a NIC's own fatal error drains: a disk is not ours to judge."""
    is_ours = signal.gpu is not None or signal.where.startswith(("nvidia ", "mlx5_core "))
    word = DRAIN if signal.value == FATAL and is_ours else WARN
    if signal.value == CORRECTABLE and signal.count < _MANY_CORRECTED:
        word = IGNORE
    return Verdict(
        word,
        "AER-FATAL" if word == DRAIN else "AER",
        signal.gpu,
        f"{signal.value or 'unclear'} PCIe error of {signal.where}, {signal.count} times",
        "aer-log",
        "Linux drivers/pci/pcie/aer.c; gcm pcie_aer (2026-08)",
        (signal,),
        auto_resume=word == DRAIN,
        needs=NEEDS_REBOOT if word == DRAIN else "",
    )
