"""What the kernel log's messages mean, by the tables of Xids and SXids. Pure.

The driver's own recovery action (NVML field 230, else the last Xid 154 of the GPU) outranks the
table: it makes a hardware error as bad as itself. Action `none` clears what only asked for a reset;
a row that drains is cleared by nothing less than an Xid 154 behind it that says `none`. NVML's
state of a row remap outranks the Xids that tell of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Optional

from ftslurm.health import signals as s
from ftslurm.health.kernel_line import CORRECTABLE, FATAL
from ftslurm.health.signals import Gpu, Signal
from ftslurm.health.verdict import Case, Verdict, as_number
from ftslurm.health.xid_table import (
    ACTION_TABLE,
    AFTER,
    BY_SXID,
    BY_XID,
    DRAIN,
    IGNORE,
    NEEDS_REBOOT,
    NEEDS_REPAIR,
    NEEDS_RESET,
    NVLINK4_BITS,
    NVLINK4_MILD,
    RESET,
    SXID_FATAL,
    SXID_OTHER,
    UNKNOWN,
    UNLISTED,
    WARN,
    ActionRow,
    XidRow,
)

ACTION_XID = 154
_HARD = (DRAIN, RESET, AFTER)
_ECHOED_BY = (48, 79, 95)
_WEEKS_S = 14 * 86400.0
_MANY_CORRECTED = 100

_REGISTERS = re.compile(r"\blink -?\d+\s*\(((?:\s*0x[0-9a-fA-F]{1,8},?){1,7})\s*\)", re.I)
_CHANGED_TO = re.compile(r"\bto 0x([0-9a-fA-F]{1,8})\b")
_PARENTHESIS = re.compile(r"\(([^()]*)\)")
_INJECTED = re.compile(r"\bXC\d\s+i1\b")
_UNIT = re.compile(r"\bGPC (\d+), TPC (\d+)")


@dataclass(frozen=True)
class _Said:
    """What a GPU's recovery action is, and by what it is known."""

    row: ActionRow
    signal: Signal
    is_state: bool


def judge_kernel(case: Case) -> list[Verdict]:
    xids = [one for one in case.reading.of(s.XID) if _number(one)]
    xids = [one for one in xids if f"xid-{one.value}" not in case.thresholds.off]
    actions = _actions(case, xids)
    verdicts = [_action_verdict(said) for said in actions.values()]
    told = [_xid(case, signal, index, xids, actions) for index, signal in enumerate(xids)]
    verdicts += [one for one in told if one is not None]
    verdicts += [_sxid(case, one, xids) for one in case.reading.of(s.SXID) if _number(one)]
    verdicts += [_aer(case, signal) for signal in case.reading.of(s.AER)]
    return verdicts


def unit_of(signal: Signal) -> str:
    """`2/3` for GPC 2, TPC 3: the same unit again and again is broken, not the program."""
    match = _UNIT.search(signal.text)
    return f"{match.group(1)}/{match.group(2)}" if match else ""


def _number(signal: Signal) -> int:
    """0 for what is no number of an error."""
    value = signal.value
    return value if type(value) is int and 0 < value < 1_000_000 else 0


def _bus(signal: Signal) -> str:
    return signal.gpu.bus if signal.gpu else ""


def _actions(case: Case, xids: Sequence[Signal]) -> dict[str, _Said]:
    """By bus. What NVML says now is newer than any line."""
    said: dict[str, _Said] = {}
    for signal in xids:
        if signal.value == ACTION_XID:
            said[_bus(signal)] = _Said(_action_of_text(signal.text), signal, is_state=False)
    for signal in case.reading.of(s.RECOVERY_ACTION):
        number = as_number(signal.value)
        row = next((one for one in ACTION_TABLE if one.value == number), _NO_SUCH_ACTION)
        said[_bus(signal)] = _Said(row, signal, is_state=True)
    return said


_NO_SUCH_ACTION = ActionRow(-1, ("unknown",), UNKNOWN)


def _action_of_text(text: str) -> ActionRow:
    """Of `GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)`."""
    numbers = _CHANGED_TO.findall(text)
    names = _PARENTHESIS.findall(text)
    for row in ACTION_TABLE:
        if numbers and row.value == int(numbers[-1], 16):
            return row
        if not numbers and names and names[-1].strip().lower() in row.names:
            return row
    return _NO_SUCH_ACTION


def _action_verdict(said: _Said) -> Verdict:
    row, signal = said.row, said.signal
    is_hard = row.word in _HARD
    by = "NVML" if said.is_state else f"Xid {ACTION_XID}"
    return Verdict(
        row.word,
        f"ACTION{row.value}" if row.value >= 0 else "ACTION",
        signal.gpu,
        f"the driver's recovery action is `{row.names[0]}`, says {by}",
        "recovery-action",
        f"{row.source} ({row.date})",
        (signal,),
        auto_resume=is_hard,
        needs=row.needs,
    )


def _xid(
    case: Case, signal: Signal, index: int, xids: Sequence[Signal], actions: dict[str, _Said]
) -> Optional[Verdict]:
    if signal.value == ACTION_XID:
        return None
    row = BY_XID.get(_number(signal), UNLISTED)
    if row.rule == "remap_failure" and case.state(s.REMAP_FAILURE, signal.gpu) is False:
        row = replace(row, word=RESET, needs=NEEDS_RESET, is_sticky=False)
    word, note = _word(case, row, signal)
    echo = _echo_of(case, signal, xids) if row.rule in ("nvlink4", "nvlink5") else None
    if echo is not None and word in _HARD:
        word, note = WARN, f"an echo of the Xid {echo.value} of {_bus(echo)}"
    said = actions.get(_bus(signal))
    if said is not None and not row.is_sticky:
        is_later = said.is_state or xids.index(said.signal) > index
        word, note = _outranked(word, note, said, is_later)
    needs = row.needs
    if said is not None and said.row.word in _HARD:
        needs = said.row.needs or needs
    verdict = _of_xid(row, signal, word, note, needs)
    verdict = _repeated(case, row, verdict)
    return _again(case, verdict)


def _of_xid(row: XidRow, signal: Signal, word: str, note: str, needs: str) -> Verdict:
    is_hard, text = word in _HARD, f" ({signal.text})" if signal.text else ""
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


def _word(case: Case, row: XidRow, signal: Signal) -> tuple[str, str]:
    """By the row and what its rule looks at, before the recovery action has its say."""
    gpu = signal.gpu
    if row.rule == "remap_pending":
        state = _first(case, gpu, s.REMAP_PENDING, s.RETIRED_PAGES_PENDING)
        return (row.word, "") if state is None else (WARN, f"remap pending is {state}")
    if row.rule == "nvlink4":
        return _nvlink4(signal.text)
    if row.rule == "nvlink5":
        return _nvlink5(signal.text)
    if row.volta and _is_volta(case, gpu):
        return row.volta, "on a part before A100"
    return row.word, ""


def _first(case: Case, gpu: Optional[Gpu], *kinds: str) -> object:
    return next((state for state in (case.state(kind, gpu) for kind in kinds) if state is not None),
                None)  # fmt: skip


def _is_volta(case: Case, gpu: Optional[Gpu]) -> bool:
    """Pages are retired up to V100, rows remapped from A100 on."""
    has_pages = case.state(s.RETIRED_PAGES, gpu) is not None
    return has_pages and case.state(s.REMAP_PENDING, gpu) is None


def _nvlink4(text: str) -> tuple[str, str]:
    match = _REGISTERS.search(text)
    words = (
        [int(word, 16) for word in re.findall(r"0x[0-9a-fA-F]+", match.group(1))] if match else []
    )
    found, rest = [], list(words)
    for number, bits, name, _ in NVLINK4_BITS:
        mask = sum(1 << bit for bit in bits)
        if number <= len(words) and words[number - 1] & mask:
            found.append(name)
            rest[number - 1] &= ~mask
    # A bit that no row knows, and no registers at all, are as bad as the message.
    milds = [NVLINK4_MILD.get(name, DRAIN) for name in found]
    if not found or any(rest[at] for at in (0, 2, 3, 4) if at < len(rest)):
        milds.append(DRAIN)
    word = next(one for one in (DRAIN, RESET, WARN, IGNORE) if one in milds)
    return word, ", ".join(dict.fromkeys(found))


def _nvlink5(text: str) -> tuple[str, str]:
    if _INJECTED.search(text):
        return IGNORE, "injected for a test"
    if text.startswith("NETIR_BER_EVENT"):
        return WARN, "a bit error rate"
    if re.search(r"\bFatal\b", text):
        return RESET, "fatal by its own text"
    return WARN, "not fatal by its own text"


def _echo_of(case: Case, signal: Signal, xids: Sequence[Signal]) -> Optional[Signal]:
    """The loss of a peer GPU seconds before or after."""
    for one in xids:
        if one.value in _ECHOED_BY and _bus(one) != _bus(signal) and _is_near(case, one, signal):
            return one
    return None


def _is_near(case: Case, one: Signal, other: Signal) -> bool:
    if one.at is None or other.at is None:
        return False
    return abs(one.at - other.at) <= case.thresholds.sympathetic_s


def _outranked(word: str, note: str, said: _Said, is_later: bool) -> tuple[str, str]:
    action = said.row
    if word not in _HARD or not is_later:
        return word, note
    told = f"recovery action {action.names[0]}"
    if action.word in _HARD:
        return action.word, told
    if action.value == 0 and (word != DRAIN or not said.is_state):
        return WARN, told
    return word, note


def _repeated(case: Case, row: XidRow, verdict: Verdict) -> Verdict:
    repeat, signal, reading = row.repeat, verdict.signals[0], case.reading
    if repeat is None or verdict.word in _HARD:
        return verdict
    earlier = case.history.within(
        verdict.code, _bus(signal), now=reading.at, window_s=repeat.window_s
    )
    if repeat.same_unit:
        unit = unit_of(signal)
        earlier = [one for one in earlier if unit and one.detail == unit]
    users = {one.user for one in earlier if one.user} | ({reading.user} if reading.user else set())
    if 1 + len(earlier) < repeat.times or (repeat.users > 1 and len(users) < repeat.users):
        return verdict
    sentence = f"{verdict.sentence}; {1 + len(earlier)} times on this GPU"
    return replace(
        verdict, word=repeat.word, sentence=sentence, hands_to_run=False, auto_resume=True
    )


def _again(case: Case, verdict: Verdict) -> Verdict:
    """A GPU that fell off the bus twice, or was reset twice, in two weeks is for a person."""
    if verdict.word not in (DRAIN, RESET):
        return verdict
    bus, now = _bus(verdict.signals[0]), case.reading.at
    resets = case.history.within("reset", bus, now=now, window_s=_WEEKS_S)
    losses = case.history.within("XID79", bus, now=now, window_s=_WEEKS_S)
    losses = [one for one in losses if one.boot_id != case.reading.boot_id]
    if len(resets) < 2 and not (verdict.code == "XID79" and losses):
        return verdict
    sentence = f"{verdict.sentence}; not for the first time in 14 days"
    return replace(verdict, word=DRAIN, sentence=sentence, sticky=True, auto_resume=False)


def without_echoes(verdicts: list[Verdict]) -> list[Verdict]:
    """What a program is told of on a GPU that failed is the failure's, not the program's."""
    failed = {one.gpu.bus for one in verdicts if one.gpu and one.word in _HARD and one.needs}
    return [replace(one, hands_to_run=False) if _is_echo(one, failed) else one for one in verdicts]


def _is_echo(verdict: Verdict, failed: set[str]) -> bool:
    if not verdict.hands_to_run:
        return False
    signal = verdict.signals[0]
    return _bus(signal) in failed or "caused by previous Xid" in signal.text


def _sxid(case: Case, signal: Signal, xids: Sequence[Signal]) -> Verdict:
    is_fatal = signal.text.lower().startswith("fatal")
    row = BY_SXID.get(_number(signal), SXID_FATAL if is_fatal else SXID_OTHER)
    if is_fatal and row.word != DRAIN:
        row = SXID_FATAL
    word, note = row.word, ""
    peers = [one for one in xids if one.value in _ECHOED_BY and _is_near(case, one, signal)]
    if row is SXID_FATAL and peers:
        word, note = WARN, f"; an echo of the Xid {peers[0].value} of {_bus(peers[0])}"
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


def _aer(case: Case, signal: Signal) -> Verdict:
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
