"""What ended an attempt, told from everything that was left behind: one cause, how sure, who.

Pure and table-driven: clues in, a finding out. The most trusted clue that names a cause is the
root: Slurm's word for this run of the job, then slurmstepd, the kernel, the earliest exception of a
rank, and last what communication libraries print. What only tells of another rank's end is an echo
and never takes the place of a root, whatever its wall time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Optional

from ftslurm.diagnosis.causes import (
    CANCELLED_ADMIN,
    CANCELLED_USER,
    CODE,
    GPU,
    HANG,
    MEANING,
    NETWORK_TRANSIENT,
    NODE,
    OOM_HOST,
    PREEMPTED,
    STORAGE,
    STRAGGLER,
    UNKNOWN,
)
from ftslurm.diagnosis.finding import OWNER, Clue, Facts, Finding
from ftslurm.diagnosis.reading import Reading, without_lost_programs
from ftslurm.diagnosis.signatures import (
    ACCOUNTING,
    AGENT,
    HARDWARE,
    HEALTH,
    KERNEL,
    LAUNCHER,
    LOG,
    NODE_STATE,
    RANK_ERROR,
    STATE,
    STEPD,
    TEXT,
    UNCLEAR,
    WATCHED,
    WEAK,
    Signature,
    Table,
    look_up,
)
from ftslurm.diagnosis.signatures_ranks import (
    ANY,
    ANY_IN_LOG,
    DEATHS,
    ECHOES,
    MEETING,
    NAMED,
    OURS,
    TYPES,
)
from ftslurm.diagnosis.signatures_system import (
    ACCOUNT,
    AGENTS,
    EXITS,
    HEALTH_WORDS,
    KERNEL_LINES,
    NODE_STATES,
    SLURM_LINES,
    STEPD_LINES,
)

TABLE: Table = {
    RANK_ERROR: [*OURS, *NAMED, *DEATHS, *ECHOES, *MEETING, *TYPES, *ANY],
    LOG: [*OURS, *STEPD_LINES, *NAMED, *DEATHS, *ECHOES, *MEETING, *TYPES, *ANY_IN_LOG],
    LAUNCHER: [*SLURM_LINES, *EXITS],
    ACCOUNTING: ACCOUNT,
    NODE_STATE: NODE_STATES,
    AGENT: AGENTS,
    KERNEL: KERNEL_LINES,
    HEALTH: HEALTH_WORDS,
}

_NODE_IS_TOLD = frozenset({NODE, GPU, HANG, STRAGGLER})
_NODE_BY_KERNEL = frozenset({NETWORK_TRANSIENT, STORAGE})
_SHOWN = 5
_DOUBTFUL = 0.4
_LONG_BEFORE_S = 2400.0
"""A rank that waits for a broken GPU may say so half an hour later (torch's time-out)."""
_SENTENCE_CHARACTERS = 240
_GPU_ADDRESS = re.compile(r"\b((?:[0-9a-fA-F]{4}|[0-9a-fA-F]{8}):[0-9a-fA-F]{2}:[0-9a-fA-F]{2})\b")
_JOB = re.compile(r"\bjob_(\d+)\b")


def classify(clues: Sequence[Clue], facts: Facts) -> Finding:
    """The cause of an attempt's end; `unknown` when nothing names one."""
    readings = [*_from_facts(facts), *filter(None, (_read(clue) for clue in clues))]
    readings = without_lost_programs(_without_wrong_ranks(readings))
    readings, doubt = _weighed(readings, facts)
    roots = _roots(readings, facts)
    finding = _finding(readings, roots, facts) if roots else _nothing(readings, facts)
    sick = {one.node: one.told for one in reversed(readings) if one.row.is_sick and one.node}
    faults = [one.fault for one in readings if one.fault]
    return replace(finding, sick=sick, program_fault=next(iter(faults), ""), doubt=doubt)


def is_telling(kind: str, text: str) -> bool:
    """Whether some row of the table has a word for this line."""
    return look_up(TABLE[kind], text) is not None


def _read(clue: Clue) -> Optional[Reading]:
    found = look_up(TABLE[clue.kind], clue.text, clue.context)
    if found is None:
        return None
    row, match = found
    trust = row.trust_in(clue.kind, ends_traceback=bool(clue.context))
    if clue.is_past and trust > HARDWARE:
        trust = max(trust, WEAK)
    groups = match.groupdict()
    named = groups.get("rank")
    node, rank = groups.get("node"), int(named) if named is not None else None
    # slurmstepd names the first node of a step that lost another one, and a watchdog speaks on
    # every rank: whoever says it is not whom it is about.
    by_step = row.cause == NODE and clue.kind in (LAUNCHER, LOG)
    # It writes of the step into the log of its node's first rank (seen): no word of that rank.
    by_step = by_step or (row.cause == OOM_HOST and clue.kind == LOG and trust == STEPD)
    by_victim = row.cause in (HANG, NETWORK_TRANSIENT) and trust == TEXT
    if not by_step and not by_victim:
        node = node or clue.node
        rank = clue.rank if rank is None else rank
    told, fault = groups.get("told") or "", f"XID{groups['xid']}" if groups.get("xid") else ""
    return Reading(clue, row, trust, TABLE[clue.kind].index(row), node, rank, told, fault)


def _without_wrong_ranks(readings: Sequence[Reading]) -> list[Reading]:
    """In a step with a kill, srun calls whichever task of a node ends first `Out Of Memory` (seen):
    a rank that has left a word of its own was not the one that was killed."""
    spoke = {item.rank for item in readings if item.clue.kind == RANK_ERROR}

    def is_wrong(item: Reading) -> bool:
        return item.row.cause == OOM_HOST and item.clue.kind == LAUNCHER and item.rank in spoke

    return [replace(item, rank=None) if is_wrong(item) else item for item in readings]


def _weighed(readings: Sequence[Reading], facts: Facts) -> tuple[list[Reading], str]:
    """With what nodes say of their health as much as it is worth: (readings, what is doubted)."""
    codes = [(item.code, item.node) for item in readings if item.code and item.node]
    if not codes:
        return list(readings), ""
    # Late: most attempts end without such a word.
    from ftslurm.diagnosis.health_clues import false_alarms

    alarms = false_alarms(codes, nodes=len(set(facts.nodes.values())))
    errors = [item.clue.at for item in readings if item.clue.kind == RANK_ERROR and item.clue.at]
    old = min(errors, default=0.0) - _LONG_BEFORE_S

    def weighed(item: Reading) -> Reading:
        if item.code in alarms:
            row = replace(item.row, is_sick=False, confidence=_DOUBTFUL)
            return replace(item, row=row, trust=WEAK, node=None)
        # A drain that lets the running job end stands for days.
        is_old = item.code and item.clue.kind == NODE_STATE and (item.clue.at or old) < old
        return replace(item, trust=WEAK) if is_old else item

    told = "; ".join(f"{said}, which is held against none of them" for said in alarms.values())
    return [weighed(item) for item in readings], told


def _from_facts(facts: Facts) -> list[Reading]:
    """What was asked of Slurm as a question of its own."""
    said: list[tuple[str, str]] = []
    if facts.cancelled_by == OWNER:
        said.append((CANCELLED_USER, "the job was cancelled by its owner"))
    elif facts.cancelled_by is not None:
        said.append((CANCELLED_ADMIN, "the job was cancelled by somebody else"))
    if facts.preempted:
        said.append((PREEMPTED, "the job was preempted (PreemptTime is set)"))
    return [
        Reading(
            Clue(ACCOUNTING, text),
            Signature(text, "", cause, "squeue", 0.95),
            STATE,
            place,
            None,
            None,
        )
        for place, (cause, text) in enumerate(said)
    ]


def _roots(readings: Sequence[Reading], facts: Facts) -> list[Reading]:
    """Readings that may be what came first, best first."""
    spoke = {
        reading.rank
        for reading in readings
        if reading.clue.kind == RANK_ERROR and not reading.is_echo and not reading.is_of_launcher
    }
    found_at = min(
        (reading.clue.at for reading in readings
         if reading.trust == WATCHED and reading.clue.at is not None),
        default=math.inf,
    )  # fmt: skip
    kept = [
        reading
        for reading in readings
        if not reading.is_echo
        and not _is_repeated(reading, spoke)
        and not _is_after(reading, found_at)
        and not _is_of_another_job(reading, facts)
    ]
    return sorted(kept, key=lambda reading: reading.order)


def _is_repeated(reading: Reading, spoke: set[Optional[int]]) -> bool:
    """The log of a rank whose own record names a cause: the record is the better account."""
    return reading.clue.kind == LOG and reading.trust >= HARDWARE and reading.rank in spoke


def _is_after(reading: Reading, found_at: float) -> bool:
    """A rank's exception once the agents had begun to end the ranks for what they found."""
    at = reading.clue.at
    return HARDWARE < reading.trust <= UNCLEAR and at is not None and at > found_at


def _is_of_another_job(reading: Reading, facts: Facts) -> bool:
    """The kernel speaks of all jobs of a node."""
    if reading.clue.kind != KERNEL or facts.job_id is None:
        return False
    jobs = _JOB.findall(reading.clue.text)
    return bool(jobs) and facts.job_id.partition("_")[0] not in jobs


def _finding(readings: Sequence[Reading], roots: Sequence[Reading], facts: Facts) -> Finding:
    root = roots[0]
    cause = root.row.cause or UNKNOWN
    if cause == UNKNOWN and root.clue.kind == LAUNCHER:
        root = _first_end(root, readings, roots)
    same = [root, *(item for item in roots if item.row.cause == cause and item is not root)]
    gpus = [_gpu(reading.clue.text) for reading in same] if cause == GPU else []
    rank = next((item.rank for item in same if item.rank is not None), None)
    if cause in (NODE, GPU) and root.rank is None:
        rank = None
    shown = [root.clue, *(reading.clue for reading in same[1:] if reading.trust <= TEXT)]
    return Finding(
        cause=cause,
        confidence=_confidence(root, roots, facts),
        blamed_rank=rank,
        blamed_node=_blamed_node(cause, same, facts),
        blamed_gpu=next(filter(None, gpus), None),
        clues=list(dict.fromkeys(shown))[:_SHOWN],
        sentence=_sentence(cause, root, facts),
        signature=root.row.name,
        is_of_one_node=_is_of_one_node(same, facts),
    )


def _blamed_node(cause: str, same: Sequence[Reading], facts: Facts) -> Optional[str]:
    if cause in _NODE_IS_TOLD:
        return next(filter(None, (_node(item, facts) for item in same)), None)
    if cause not in _NODE_BY_KERNEL:
        return None
    # What the kernels of several nodes tell is no fault of one of them.
    nodes = {_node(item, facts) for item in same if item.clue.kind == KERNEL}
    return nodes.pop() if len(nodes) == 1 else None


def _is_of_one_node(same: Sequence[Reading], facts: Facts) -> bool:
    by_ranks = [item for item in same if item.clue.kind in (RANK_ERROR, LOG)] or same
    told = {item.clue.node or _node(item, facts) for item in by_ranks}
    return len(set(facts.nodes.values())) > 1 and len(told) == 1 and None not in told


def _node(reading: Reading, facts: Facts) -> Optional[str]:
    if reading.node is None and reading.rank is not None:
        return facts.nodes.get(reading.rank)
    return reading.node


def _first_end(root: Reading, readings: Sequence[Reading], roots: Sequence[Reading]) -> Reading:
    """The rank that ended first, of those that did not only lose another one: srun KILLs what
    outlives its TERM, and a peer may be heard to end before the one that was killed."""
    echoing = {item.rank for item in readings if item.is_echo and item.clue.kind == RANK_ERROR}
    ends = [
        item
        for item in roots
        if item.row.cause == UNKNOWN
        and item.clue.kind == LAUNCHER
        and item.rank is not None
        and item.rank not in echoing
    ]
    return min(ends, key=lambda item: item.clue.line or 0, default=root)


def _gpu(text: str) -> Optional[str]:
    found = _GPU_ADDRESS.search(text)
    # The kernel writes the PCI domain in four digits, NVML in eight.
    return found[1].lower()[-10:] if found else None


def _confidence(root: Reading, roots: Sequence[Reading], facts: Facts) -> float:
    confidence = root.row.confidence
    if root.row.cause == CODE and root.clue.kind == RANK_ERROR and not facts.step:
        confidence += 0.05
    others = roots[1:]
    if any(item.row.cause == root.row.cause and item.clue.kind != root.clue.kind
           for item in others):  # fmt: skip
        confidence += 0.04
    if any(item.row.cause != root.row.cause and item.trust <= UNCLEAR for item in others):
        confidence -= 0.15
    return round(min(0.99, max(0.05, confidence)), 2)


def _sentence(cause: str, root: Reading, facts: Facts) -> str:
    text = " ".join(root.clue.text.split())[:_SENTENCE_CHARACTERS]
    who = ""
    if root.rank is not None:
        node = root.node or facts.nodes.get(root.rank)
        who = f" rank {root.rank}" + (f" on {node}" if node else "")
    elif root.node is not None:
        who = f" {root.node}"
    elif root.clue.kind == NODE_STATE and cause == NODE:
        who = " a node"
    when = "" if root.clue.step is None else f" at step {root.clue.step}"
    said = f"{who}{when}: `{text}`" if who else f" `{text}`"
    return f"{cause}, {MEANING[cause]}:{said}"


def _nothing(readings: Sequence[Reading], facts: Facts) -> Finding:
    """Only echoes, or not a word."""
    echoes = [reading for reading in readings if reading.is_echo]
    heard = {reading.rank for reading in echoes if reading.rank is not None}
    silent = sorted(set(facts.nodes) - heard)
    rank = silent[0] if heard and len(silent) == 1 else None
    if rank is not None:
        why = f"rank {rank} on {facts.nodes[rank]} left without a word, the others only lost it"
    elif echoes:
        why = "every rank only tells of another one's end"
    else:
        why = f"the launcher ended with code {facts.rc}, and no rank, node or log says why"
    missing = f" (not asked: {'; '.join(facts.unasked)})" if facts.unasked else ""
    return Finding(
        UNKNOWN,
        0.2,
        rank,
        None,
        None,
        [reading.clue for reading in echoes[:_SHOWN]],
        f"{UNKNOWN}, {MEANING[UNKNOWN]}: {why}{missing}",
    )
