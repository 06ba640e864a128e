"""What ranks left behind, as clues: their launcher's words on them, their own records, their logs.

Reads only, and only ends of files; first of those ranks that promise most.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftslurm.diagnosis.classify import classify, is_telling
from ftslurm.diagnosis.finding import Clue, Facts
from ftslurm.diagnosis.gathering import DECISIVE, Gathering
from ftslurm.diagnosis.launcher_lines import launcher_lines
from ftslurm.diagnosis.signatures import LAUNCHER, RANK_ERROR
from ftslurm.diagnosis.tails import (
    CONTEXT_CHARACTERS,
    TEXT_CHARACTERS,
    log_clues,
    read_tail,
    time_in,
)
from ftslurm.run.rank_errors import read_rank_errors
from ftslurm.run.srun_lines import parse_line

LOG_BYTES = 2 << 20
"""Of one rank's log at most."""
ALL_LOGS_BYTES = 16 << 20
LEAST_LOG_BYTES = 16 << 10
LOGS_WHEN_SURE = 64
"""Read at most, where what was heard before is decisive."""
RECORDS_SHARE = 0.5
"""Of the time: 10,000 records on a slow file system must not keep the launcher from being heard."""

_STEPD_NODE = re.compile(r"slurmstepd-([\w.-]+): |\bON ([\w.-]+) CANCELLED")
_STEP_ID = re.compile(r"(?:StepId=|STEP )\d+\.(\d+)\b")


def launcher_clues(found: Gathering) -> None:
    path, lines = launcher_lines(found.layout, found.number, found.attempt)
    for number, text, written_at in lines:
        found.steps.update(_STEP_ID.findall(text))
        ends = parse_line(text, line=number)
        for end in ends:
            found.exits.setdefault(end.rank, end)
        if not (ends or is_telling(LAUNCHER, text)):
            continue
        rank = ends[0].rank if ends else None
        said = _STEPD_NODE.search(text)
        node = ends[0].node if ends else None
        node = node or (said[1] or said[2] if said else None)
        if node is None and rank is not None:
            node = found.nodes.get(rank)
        at = time_in(text, year_of=written_at)
        text = text[:TEXT_CHARACTERS]
        found.clues.append(Clue(LAUNCHER, text, at, rank, node, str(path), number))


def error_clues(found: Gathering) -> None:
    """Those of ranks that the launcher heard of first, first."""
    within_s = RECORDS_SHARE * max(0.0, found.left_s)
    told = read_rank_errors(found.paths, within_s=within_s, first=list(found.exits))
    for path, record in told.records:
        with found.source(path.name):
            found.clues.append(_rank_error(found, path, record))
    if told.unread:
        found.unasked.append(f"{told.unread} of {len(told.ranks)} ranks' own records")


def _rank_error(found: Gathering, path: Path, record: Mapping[str, Any]) -> Clue:
    message = str(record["message"])
    text = f"{record['type']}: {message}" if message else str(record["type"])
    context = "".join(record.get("traceback") or [])[-CONTEXT_CHARACTERS:]
    node, step = str(record["node"]), record.get("step")
    return Clue(
        RANK_ERROR,
        text[:TEXT_CHARACTERS],
        found.by_leader(float(record["at"]), node),
        int(record["rank"]),
        node,
        str(path),
        None,
        context,
        int(step) if step is not None else None,
    )


def of_logs(found: Gathering) -> None:
    """First of those that promise most."""
    ranks = _by_promise(found)
    if len(ranks) > LOGS_WHEN_SURE and classify(found.clues, Facts()).confidence >= DECISIVE:
        ranks = ranks[:LOGS_WHEN_SURE]
    budget = ALL_LOGS_BYTES
    each = max(LEAST_LOG_BYTES, min(LOG_BYTES, ALL_LOGS_BYTES // max(1, len(ranks))))
    for count, rank in enumerate(ranks):
        if found.left_s <= 0 or budget <= 0:
            found.unasked.append(f"{len(ranks) - count} of {len(ranks)} logs")
            break
        path = found.paths.logs / f"rank-{rank}.log"
        tail = read_tail(path, each)
        if tail is not None:
            budget -= sum(map(len, tail.lines))
            node = found.nodes.get(rank)
            found.clues.extend(log_clues(tail, rank=rank, node=node, file=str(path)))


def _by_promise(found: Gathering) -> list[int]:
    """All ranks. slurmstepd writes into the log of its node's first rank."""
    firsts: dict[str, int] = {}
    for rank, node in found.nodes.items():
        firsts.setdefault(node, rank)
    ended_first = list(found.exits)[: LOGS_WHEN_SURE // 4]
    stepds = [firsts[found.nodes[rank]] for rank in ended_first if rank in found.nodes]
    return list(dict.fromkeys([*ended_first, *stepds, *found.exits, *found.nodes]))
