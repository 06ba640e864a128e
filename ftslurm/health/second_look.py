"""What a look may conclude from little time, and what deserves another one in the same probe. Pure.

Rows that have to hold in two looks would else wait for the next probe, and an epilog's job may be
on the node again by then. Not a rise since the baseline, which is the same one however often it is
looked at; and not a driver that hangs where there is little time, since a slow one does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ftslurm.health import signals as s
from ftslurm.health.decision_table import DECISION_TABLE, LEFT, PER_MINUTE, RISEN
from ftslurm.health.history import History
from ftslurm.health.nvml_read import SOURCE as NVML
from ftslurm.health.signals import Failure, Reading
from ftslurm.health.verdict import HARD, Verdict

HASTE = "haste"
"""The source of a failure that is one of time, and tells nothing of what was to be asked."""

PORT_WAIT_S = 10.5
"""A port counts as down, in a prolog and an epilog, after ten seconds."""
_WAIT_S = 3.0
_SHORT_WAIT_S = 1.0

_ROW_OF = {
    row.rule: row
    for row in DECISION_TABLE
    if row.reads == 2 and row.word in HARD and row.test not in (RISEN, PER_MINUTE)
    and (row.for_s == 0 or row.test == LEFT)
}  # fmt: skip


def wait_for_second_look(verdicts: Sequence[Verdict], *, is_short: bool, left_s: float) -> float:
    """Seconds to wait, of the `left_s` that there are; 0: no second look.

    `is_short` in a prolog and in a user's probe.
    """
    waits = [
        _wait(_ROW_OF[verdict.rule].kind, is_short)
        for verdict in verdicts
        if verdict.rule in _ROW_OF and verdict.word not in HARD
    ]
    return max((wait for wait in waits if wait <= left_s), default=0.0)


def _wait(kind: str, is_short: bool) -> float:
    if kind in (s.RDMA_STATE, s.RDMA_PHYS_STATE):
        return PORT_WAIT_S
    if is_short:
        return float("inf") if kind == s.DRIVER_HANG else _SHORT_WAIT_S
    return _WAIT_S


def without_haste(reading: Reading, history: History) -> Reading:
    """Of a prolog: its few seconds are less than some drivers take to start on eight GPUs without
    persistence mode. So that it got no answer counts as a hang only behind a look with more time
    that got none either, and three prologs in a row are no proof of a dead NVML."""
    has_hung = any(key.startswith(f"{reading.boot_id}|driver-hang ") for key in history.streaks)
    if has_hung or not reading.of(s.DRIVER_HANG):
        return reading
    return replace(
        reading,
        signals=tuple(one for one in reading.signals if one.kind != s.DRIVER_HANG),
        failures=tuple(map(_in_haste, reading.failures)),
    )


def _in_haste(failure: Failure) -> Failure:
    if failure.source != NVML:
        return failure
    text = f"{failure.text}; a prolog has no time to tell a slow driver from a dead one"
    return Failure(HASTE, text)
