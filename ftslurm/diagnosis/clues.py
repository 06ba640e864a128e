"""Everything that an attempt left behind, gathered into clues: files of the run, and Slurm's word.

Reads only, and only ends of files. A source that is missing, torn or does not answer costs a note
in `Facts.unasked`, never the rest; by the deadline what has come is handed over.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from ftslurm.diagnosis.classify import classify, is_telling
from ftslurm.diagnosis.finding import OTHER, OWNER, Clue, Facts
from ftslurm.diagnosis.node_clues import kernel_clues
from ftslurm.diagnosis.signatures import AGENT, LAUNCHER, NODE_STATE, RANK_ERROR
from ftslurm.diagnosis.slurm_clues import Asked, accounting_clues, ask_slurm, node_state_clues
from ftslurm.diagnosis.tails import (
    CONTEXT_CHARACTERS,
    TEXT_CHARACTERS,
    log_clues,
    read_tail,
    time_in,
)
from ftslurm.errors import FtslurmError
from ftslurm.files import read_json
from ftslurm.run.attempts import (
    Attempt,
    node_of,
    numbers,
    read_attempt,
    read_outcome,
    read_progress,
)
from ftslurm.run.layout import AttemptLayout, RunLayout
from ftslurm.run.rank_errors import read_rank_errors
from ftslurm.run.record import read_record
from ftslurm.run.srun_lines import RankExit, parse_line
from ftslurm.run.trouble import storage_trouble
from ftslurm.scheduler.accounting import TIMEOUT_S
from ftslurm.scheduler.protocol import Scheduler
from ftslurm.scheduler.slurm import Runner, run_command

DECISIVE = 0.8
"""Confidence in what agents and the launcher say from which Slurm's own word can hardly add."""
DECISIVE_S = 0.5

LOG_BYTES = 2 << 20
"""Of one rank's log at most."""
ALL_LOGS_BYTES = 16 << 20
LEAST_LOG_BYTES = 16 << 10
LAUNCHER_BYTES = 2 << 20
LOGS_WHEN_SURE = 64
"""Read at most, where what was heard before is decisive."""
RECORDS_SHARE = 0.5
"""Of the time: 10,000 records on a slow file system must not keep the launcher from being heard."""

_STEPD_NODE = re.compile(r"slurmstepd-([\w.-]+): |\bON ([\w.-]+) CANCELLED")
_STEP_ID = re.compile(r"(?:StepId=|STEP )\d+\.(\d+)\b")
_DECIDED = re.compile(r"ftslurm: attempt (\d+): ")


@dataclass
class _Gathering:
    """One attempt, while its clues are gathered."""

    layout: RunLayout
    number: int
    deadline: float
    attempt: Optional[Attempt] = None
    nodes: dict[int, str] = field(default_factory=dict)
    offsets: dict[str, float] = field(default_factory=dict)
    """Node -> how far its clock is ahead of the leader's."""
    exits: dict[int, RankExit] = field(default_factory=dict)
    steps: set[str] = field(default_factory=set)
    """Slurm's numbers of the ranks' job steps."""
    step: Optional[int] = None
    clues: list[Clue] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)

    @property
    def paths(self) -> AttemptLayout:
        return self.layout.attempt(self.number)

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    @contextlib.contextmanager
    def source(self, what: str) -> Iterator[None]:
        """Whatever a source holds, the others are heard."""
        try:
            yield
        except (OSError, FtslurmError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.unasked.append(f"{what}: {type(error).__name__}: {error}")

    def by_leader(self, at: Optional[float], node: Optional[str]) -> Optional[float]:
        """A time by a node's clock, by the leader's."""
        return None if at is None else at - self.offsets.get(node or "", 0.0)


def gather(
    layout: RunLayout,
    number: int,
    *,
    scheduler: Optional[Scheduler] = None,
    rc: int,
    deadline_s: float,
    run: Runner = run_command,
) -> tuple[list[Clue], Facts]:
    """Clues and facts of attempt `number`. `scheduler` None: Slurm is not asked."""
    found = _Gathering(layout, number, time.monotonic() + deadline_s)
    with found.source("attempt.json"):
        found.attempt = read_attempt(layout, number)
    with found.source("run.json"):
        found.nodes = _places(layout, found.attempt)
    asked = ask_slurm(scheduler, found.attempt, run=run, timeout_s=deadline_s)
    with found.source("agents.json"):
        _agents(found)
    with found.source("launcher.log"):
        _launcher(found)
    with found.source("ranks"):
        _rank_errors(found)
    with found.source("evidence/nodes"):
        _evidence(found)
    with found.source("the run's file system"):
        _storage(found)
    with found.source("outcome.json and progress.json"):
        _last_step(found)
    with found.source("logs"):
        _logs(found)
    preempted, cancelled_by = _slurm(found, asked)
    return found.clues, Facts(
        rc=rc,
        preempted=preempted,
        cancelled_by=cancelled_by,
        step=found.step,
        job_id=found.attempt.job_id if found.attempt else None,
        nodes=found.nodes,
        exits=found.exits,
        unasked=tuple(found.unasked),
    )


def _places(layout: RunLayout, attempt: Optional[Attempt]) -> dict[int, str]:
    """Rank -> node."""
    if attempt is None or not attempt.nodes:
        return {}
    per_node = attempt.tasks_per_node or read_record(layout).spec.cluster.tasks_per_node
    world = attempt.world_size or per_node * len(attempt.nodes)
    places = ((rank, node_of(attempt.nodes, rank, per_node)) for rank in range(world))
    return {rank: node or attempt.nodes[-1] for rank, node in places}


def _agents(found: _Gathering) -> None:
    path = found.paths.root / "agents.json"
    try:
        record = read_json(path)
    except FileNotFoundError:
        return
    for node, row in record.get("nodes", {}).items():
        if row.get("offset_s") is not None:
            found.offsets[node] = float(row["offset_s"])
    for finding in record.get("findings", []):
        kind = finding["kind"]
        if not finding.get("acted"):
            kind += " (not acted on)"
        ranks, nodes = finding.get("ranks") or [], finding.get("nodes") or []
        for node in nodes or [None]:
            found.clues.append(
                Clue(
                    AGENT,
                    f"{kind}: {finding.get('why', '')}",
                    float(finding["at"]),
                    ranks[0] if ranks else None,
                    node,
                    str(path),
                )
            )


def _launcher(found: _Gathering) -> None:
    path, lines = _launcher_lines(found)
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


def _launcher_lines(found: _Gathering) -> tuple[Path, list[tuple[int, str, float]]]:
    """(file, its lines with number and time) of what the ranks' launcher said: without agents it
    is among the batch script's own words, between those on the attempt before and on this one."""
    path = found.paths.root / "launcher.log"
    tail = read_tail(path, LAUNCHER_BYTES)
    if tail is None and found.attempt is not None:
        job_id, submit = found.attempt.job_id, found.layout.submit
        path = submit / f"{job_id}.out"
        if job_id.startswith("local-"):  # submitit's name for it
            path = submit / f"{job_id[len('local-') :]}_0_log.out"
        tail = read_tail(path, LAUNCHER_BYTES)
    if tail is None:
        return path, []
    first = tail.first or 1  # else only the order of the numbers means something
    lines = [(first + index, text, tail.written_at) for index, text in enumerate(tail.lines)]
    if path.name == "launcher.log":
        return path, lines
    own: list[tuple[int, str, float]] = []
    for line in lines:
        decided = _DECIDED.match(line[1])
        if decided is None:
            own.append(line)
        elif int(decided[1]) == found.number:
            break
        else:
            own = []
    return path, own


def _rank_errors(found: _Gathering) -> None:
    """Those of ranks that the launcher heard of first, first."""
    within_s = RECORDS_SHARE * max(0.0, found.left_s)
    told = read_rank_errors(found.paths, within_s=within_s, first=list(found.exits))
    for path, record in told.records:
        with found.source(path.name):
            found.clues.append(_rank_error(found, path, record))
    if told.unread:
        found.unasked.append(f"{told.unread} of {len(told.ranks)} ranks' own records")


def _rank_error(found: _Gathering, path: Path, record: Mapping[str, Any]) -> Clue:
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


def _evidence(found: _Gathering) -> None:
    since = found.attempt.claimed_at if found.attempt else 0.0
    for path in sorted((found.paths.root / "evidence" / "nodes").glob("*.json")):
        if found.left_s <= 0:
            found.unasked.append(f"`{path.parent}`: the time was up")
            break
        with found.source(path.name):
            record = read_json(path)
            if found.attempt is not None and record["node"] not in found.attempt.nodes:
                continue  # it took no part
            offset = found.offsets.get(str(record["node"]), 0.0)
            clues, notes = kernel_clues(record, str(path), since=since, offset_s=offset)
            found.clues.extend(clues)
            found.unasked.extend(notes)


def _storage(found: _Gathering) -> None:
    trouble = storage_trouble(found.layout, found.number)
    if trouble:
        found.clues.append(Clue(NODE_STATE, trouble, file=str(found.layout.root)))


def _last_step(found: _Gathering) -> None:
    outcome, progress = read_outcome(found.paths), read_progress(found.paths)
    steps = [clue.step for clue in found.clues if clue.step is not None]
    if outcome is not None:
        steps.append(outcome.step)
    if progress is not None and progress.step > (progress.restored_step or 0):
        steps.append(progress.step)
    found.step = max(steps, default=None)


def _logs(found: _Gathering) -> None:
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


def _by_promise(found: _Gathering) -> list[int]:
    """All ranks. slurmstepd writes into the log of its node's first rank."""
    firsts: dict[str, int] = {}
    for rank, node in found.nodes.items():
        firsts.setdefault(node, rank)
    ended_first = list(found.exits)[: LOGS_WHEN_SURE // 4]
    stepds = [firsts[found.nodes[rank]] for rank in ended_first if rank in found.nodes]
    return list(dict.fromkeys([*ended_first, *stepds, *found.exits, *found.nodes]))


def _slurm(found: _Gathering, asked: Optional[Asked]) -> tuple[Optional[bool], Optional[str]]:
    """(preempted, cancelled by owner or other)."""
    if asked is None or found.attempt is None:
        return None, None
    asked.wait(max(0.0, min(found.left_s, _patience_s(found.clues))))
    found.unasked.extend(asked.unanswered)
    following = _following(found.layout, found.number)
    owner: Optional[int] = None
    with found.source("the run's folder"):
        owner = found.layout.root.stat().st_uid
    clues, who = accounting_clues(asked, found.attempt, following, owner=owner, steps=found.steps)
    found.clues.extend(clues)
    found.clues.extend(node_state_clues(asked, found.attempt))
    by = None if who is None else (OWNER if who == owner else OTHER)
    return asked.preempted, by


def _patience_s(clues: Sequence[Clue]) -> float:
    """Slurm learns of a lost node minutes after the agents: then its word is not waited for."""
    heard = [clue for clue in clues if clue.kind in (AGENT, LAUNCHER)]
    return DECISIVE_S if classify(heard, Facts()).confidence >= DECISIVE else TIMEOUT_S


def _following(layout: RunLayout, number: int) -> Optional[Attempt]:
    later = [item for item in numbers(layout) if item > number]
    with contextlib.suppress(OSError, FtslurmError):
        return read_attempt(layout, later[0]) if later else None
    return None
