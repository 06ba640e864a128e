"""What a node kept of itself (agent/collect.py), as clues: its kernel's lines and its GPUs' state.

Pure. Of the kernel log only what came in the attempt's own time counts: an Xid of last week is none
of its, and a line of which nobody can say when it came is left out. The state of a GPU is that of
the moment at which it was asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Optional

from ftslurm.diagnosis.classify import is_telling
from ftslurm.diagnosis.finding import Clue
from ftslurm.diagnosis.signatures import KERNEL

BEFORE_S = 5.0
"""A line this much older than the attempt still counts: clocks, and the claim's own time."""
DRIFT = 20e-6
"""By which the kernel log's clock may go off the time of day, which nothing sets right there."""

_DMESG = re.compile(r"^\[\s*(\d+\.\d+)\]\s*(.*)")
_GPU = re.compile(r"^GPU ([0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})")


def kernel_clues(
    record: Mapping[str, Any], file: str, *, since: float, offset_s: float
) -> tuple[list[Clue], list[str]]:
    """(clues, what could not be asked). `offset_s`: of the node's clock, ahead of the leader's."""
    node = str(record["node"])
    probes = record.get("probes") or {}
    clues = []
    after, slack_s = record.get("kernel_after"), _slack_s(record)
    for seq, at, text in _kernel_lines(record, probes):
        by_leader = None if at is None else at - offset_s
        if after is not None and seq is not None:
            is_new = seq > after
        else:
            is_new = by_leader is not None and by_leader >= since - slack_s
        if is_new and is_telling(KERNEL, text):
            clues.append(Clue(KERNEL, text, by_leader, node=node, file=file))
    at = float(record["at"]) - offset_s
    for text in _gpu_lines(str((probes.get("nvidia-smi") or {}).get("text") or "")):
        clues.append(Clue(KERNEL, text, at, node=node, file=file))
    # A tool that is not there is no news; one that hangs is.
    notes = [
        f"{name} on {node}: {row['note']}"
        for name, row in probes.items()
        if row.get("note") and "not on this node" not in row["note"]
    ]
    return clues, notes


def _slack_s(record: Mapping[str, Any]) -> float:
    boot_at = record.get("boot_at")
    up_s = 0.0 if boot_at is None else max(0.0, float(record["at"]) - float(boot_at))
    return BEFORE_S + DRIFT * up_s


def _kernel_lines(
    record: Mapping[str, Any], probes: Mapping[str, Any]
) -> Iterator[tuple[Optional[int], Optional[float], str]]:
    """Number, UTC seconds by the node and text of each."""
    kernel = record.get("kernel") or []
    if kernel:
        for line in kernel:
            yield line.get("seq"), line.get("at"), str(line.get("text", ""))
        return
    boot_at = record.get("boot_at")
    for text in str((probes.get("dmesg") or {}).get("text") or "").splitlines():
        found = _DMESG.match(text)
        if found is None:
            continue
        yield None, (None if boot_at is None else boot_at + float(found[1])), found[2]


def _gpu_lines(text: str) -> Iterator[str]:
    """Telling lines of `nvidia-smi -q`, each with the GPU whose block it stands in."""
    gpu = ""
    for line in text.splitlines():
        heading = _GPU.match(line)
        if heading is not None:
            gpu = heading[1]
        if is_telling(KERNEL, line):
            yield f"GPU {gpu}: {line.strip()}" if gpu else line.strip()
