"""What a node kept of itself (agent/collect.py), as clues: its kernel's lines and its GPUs' state.

Pure. What the kernel says of GPUs is judged as in a look at the node, the rest is by the table of
signatures. Of the log only what came in the attempt's own time counts: an Xid of last week is none
of its, and a line of which nobody can say when it came is left out. The state of a GPU is that of
the moment at which it was asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Optional

from ftslurm.diagnosis.classify import is_telling
from ftslurm.diagnosis.finding import Clue
from ftslurm.diagnosis.kernel_clock import slack_s
from ftslurm.diagnosis.signatures import KERNEL
from ftslurm.health.settings import HealthSettings, thresholds_of

_OF_A_GPU = re.compile(r"Xid \(|fallen off the bus")
_DMESG = re.compile(r"^\[\s*(\d+\.\d+)\]\s*(.*)")
_GPU = re.compile(r"^GPU ([0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})")


def kernel_clues(
    record: Mapping[str, Any],
    file: str,
    *,
    since: float,
    offset_s: float,
    settings: HealthSettings,
) -> tuple[list[Clue], list[str]]:
    """(clues, what could not be asked). `offset_s`: of the node's clock, ahead of the leader's."""
    node = str(record["node"])
    probes = record.get("probes") or {}
    clues: list[Clue] = []
    of_gpus: list[tuple[Optional[float], str]] = []
    after, since = record.get("kernel_after"), since - _slack_s(record)
    for seq, at, text in _kernel_lines(record, probes):
        by_leader = None if at is None else at - offset_s
        if after is not None and seq is not None:
            is_new = seq > after
        else:
            is_new = by_leader is not None and by_leader >= since
        if is_new and _OF_A_GPU.search(text):
            of_gpus.append((by_leader, text))
        elif is_new and is_telling(KERNEL, text):
            clues.append(Clue(KERNEL, text, by_leader, node=node, file=file))
    at = float(record["at"]) - offset_s
    if of_gpus:
        clues += _gpu_clues(of_gpus, settings, node, at, file)
    for text in _gpu_lines(str((probes.get("nvidia-smi") or {}).get("text") or "")):
        clues.append(Clue(KERNEL, text, at, node=node, file=file))
    # A tool that is not there is no news; one that hangs is.
    notes = [
        f"{name} on {node}: {row['note']}"
        for name, row in probes.items()
        if row.get("note") and "not on this node" not in row["note"]
    ]
    return clues, notes


def _gpu_clues(
    lines: Sequence[tuple[Optional[float], str]],
    settings: HealthSettings,
    node: str,
    at: float,
    file: str,
) -> list[Clue]:
    """By the rules that a look at the node goes by; which GPUs are the job's nobody says here."""
    # Late: most attempts end without such a line.
    from ftslurm.diagnosis.health_clues import SOME_PROGRAM, clue_of
    from ftslurm.health.history import History
    from ftslurm.health.kernel_line import parse_line
    from ftslurm.health.kernel_log import signals_of
    from ftslurm.health.report import told_of
    from ftslurm.health.signals import Reading
    from ftslurm.health.verdicts import judge

    parsed = [(line_at, parse_line(text)) for line_at, text in lines]
    events = [replace(event, at=line_at) for line_at, event in parsed if event is not None]
    reading = Reading("", node, "probe", at, signals=tuple(signals_of(events, ())))
    verdicts = judge(reading, baseline=None, history=History(), thresholds=thresholds_of(settings))
    said_at = [verdict.signals[0].at if verdict.signals else at for verdict in verdicts]
    clues = [
        clue_of(told_of(verdict), settings, node, verdict_at, file, program=SOME_PROGRAM)
        for verdict, verdict_at in zip(verdicts, said_at)
    ]
    return [clue for clue in clues if clue is not None]


def _slack_s(record: Mapping[str, Any]) -> float:
    boot_at = record.get("boot_at")
    return slack_s(0.0 if boot_at is None else float(record["at"]) - float(boot_at))


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
