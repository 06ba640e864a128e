"""The driver's own word for what a GPU needs: NVML field 230, else the last Xid 154 of the GPU.

It outranks the table of Xids: an error that is hard is as bad as the action says. But `none` is
also what a driver says that has noticed nothing. So NVML's `none` clears what asks for no more than
a reset, and no row that drains (DCGM judges field 230 and the Xids apart as well); an Xid 154 that
comes behind the Xid and says `none` tells of a change, and clears both (NVSentinel#1270). Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ftslurm.health import signals as s
from ftslurm.health.signals import Signal
from ftslurm.health.verdict import HARD, Case, Verdict, as_number, bus_of
from ftslurm.health.xid_table import ACTION_TABLE, DRAIN, UNKNOWN, WARN, ActionRow

ACTION_XID = 154

_CHANGED_TO = re.compile(r"\bto 0x([0-9a-fA-F]{1,8})\b")
_PARENTHESIS = re.compile(r"\(([^()]*)\)")
_NO_SUCH_ACTION = ActionRow(-1, ("unknown",), UNKNOWN)


@dataclass(frozen=True)
class Action:
    """What a GPU's recovery action is, and the signal that it is known by."""

    row: ActionRow
    signal: Signal
    index: int
    """Its place among the Xids of the log; behind all of them for what NVML says now."""

    @property
    def is_state(self) -> bool:
        return self.signal.kind == s.RECOVERY_ACTION


def actions_by_bus(case: Case) -> dict[str, Action]:
    found = {}
    for index, signal in enumerate(case.xids):
        if signal.value == ACTION_XID:
            found[bus_of(signal)] = Action(_row_of_text(signal.text), signal, index)
    for signal in case.reading.of(s.RECOVERY_ACTION):
        number = as_number(signal.value)
        row = next((one for one in ACTION_TABLE if one.value == number), _NO_SUCH_ACTION)
        found[bus_of(signal)] = Action(row, signal, len(case.xids))
    return found


def _row_of_text(text: str) -> ActionRow:
    """Of `GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)`."""
    numbers, names = _CHANGED_TO.findall(text), _PARENTHESIS.findall(text)
    for row in ACTION_TABLE:
        if numbers and row.value == int(numbers[-1], 16):
            return row
        if not numbers and names and names[-1].strip().lower() in row.names:
            return row
    return _NO_SUCH_ACTION


def verdict_of(action: Action) -> Verdict:
    row, is_hard = action.row, action.row.word in HARD
    by = "NVML" if action.is_state else f"Xid {ACTION_XID}"
    return Verdict(
        row.word,
        f"ACTION{row.value}" if row.value >= 0 else "ACTION",
        action.signal.gpu,
        f"the driver's recovery action is `{row.names[0]}`, says {by}",
        "recovery-action",
        f"{row.source} ({row.date})",
        (action.signal,),
        auto_resume=is_hard,
        needs=row.needs,
    )


def outranked(word: str, note: str, action: Action) -> tuple[str, str]:
    """The word of a hard Xid, and why, after an action that is newer than the Xid."""
    told = f"recovery action {action.row.names[0]}"
    if action.row.word in HARD:
        return action.row.word, told
    if action.row.value == 0 and (word != DRAIN or not action.is_state):
        return WARN, told
    return word, note
