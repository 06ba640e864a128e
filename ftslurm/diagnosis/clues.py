"""Everything that an attempt left behind, gathered into clues: files of the run, and Slurm's word.

Reads only, and only ends of files. A source that is missing, torn or does not answer costs a note
in `Facts.unasked`, never the rest; by the deadline what has come is handed over.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional

from ftslurm.diagnosis.ask_nodes import Looks, RootsWords, Word, begin_looks, words_of_health
from ftslurm.diagnosis.causes import CODE, NUMERIC, OOM_GPU, OOM_HOST
from ftslurm.diagnosis.classify import classify
from ftslurm.diagnosis.finding import OTHER, OWNER, Clue, Facts
from ftslurm.diagnosis.gathering import DECISIVE, Gathering
from ftslurm.diagnosis.health_clues import health_clues, what_is_untold
from ftslurm.diagnosis.node_clues import kernel_clues
from ftslurm.diagnosis.rank_clues import error_clues, launcher_clues, of_logs
from ftslurm.diagnosis.signatures import AGENT, LAUNCHER, NODE_STATE, RANK_ERROR
from ftslurm.diagnosis.slurm_clues import Asked, accounting_clues, ask_slurm, node_state_clues
from ftslurm.diagnosis.tails import TEXT_CHARACTERS
from ftslurm.errors import FtslurmError
from ftslurm.files import read_json
from ftslurm.health.settings import HealthSettings
from ftslurm.run.attempts import (
    Attempt,
    node_of,
    numbers,
    read_attempt,
    read_outcome,
    read_progress,
)
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import RunRecord, read_record
from ftslurm.run.trouble import storage_trouble
from ftslurm.scheduler.accounting import TIMEOUT_S
from ftslurm.scheduler.protocol import Scheduler
from ftslurm.scheduler.slurm import Runner, run_command

DECISIVE_S = 0.5

ROOTS_LAST_S = 0.3
"""At least, for root's folder, which is read beside all else."""
_OF_THE_PROGRAM = frozenset({CODE, NUMERIC, OOM_GPU, OOM_HOST})

_LOST = ("node_lost:", "leader_lost:")
"""How the agents' word on a node that is away begins."""


def gather(
    layout: RunLayout,
    number: int,
    *,
    scheduler: Optional[Scheduler] = None,
    rc: int,
    deadline_s: float,
    run: Runner = run_command,
    under_way: Callable[[Gathering], None] = lambda found: None,
) -> tuple[list[Clue], Facts]:
    """Clues and facts of attempt `number`. `scheduler` None: neither Slurm nor the nodes are asked.
    `under_way`: told at once; the nodes' looks at themselves may outlast the deadline."""
    found = Gathering(layout, number, time.monotonic() + deadline_s)
    under_way(found)
    with found.source("attempt.json"):
        found.attempt = read_attempt(layout, number)
    with found.source("run.json"):
        found.record = read_record(layout)
        found.nodes = _places(found.record, found.attempt)
        if found.record.spec.health.verdict_dir and found.attempt is not None:
            found.roots = RootsWords(Path(found.record.spec.health.verdict_dir), found.attempt)
    asked = ask_slurm(scheduler, found.attempt, run=run, timeout_s=deadline_s)
    with found.source("agents.json"):
        _agents(found)
    with found.source("the nodes' looks at themselves"):
        found.looks = _begin_looks(found, scheduler)
    with found.source("preflight.json"):
        _preflight(found)
    with found.source("launcher.log"):
        launcher_clues(found)
    with found.source("ranks"):
        error_clues(found)
    with found.source("evidence/nodes"):
        _evidence(found)
    with found.source("the run's file system"):
        _storage(found)
    with found.source("outcome.json and progress.json"):
        _last_step(found)
    with found.source("logs"):
        of_logs(found)
    found.preempted, found.cancelled_by = _slurm(found, asked)
    with found.source("the nodes' health"):
        _health(found)
    return found.clues, found.facts(rc)


def _places(record: RunRecord, attempt: Optional[Attempt]) -> dict[int, str]:
    """Rank -> node."""
    if attempt is None or not attempt.nodes:
        return {}
    per_node = attempt.tasks_per_node or record.spec.cluster.tasks_per_node
    world = attempt.world_size or per_node * len(attempt.nodes)
    places = ((rank, node_of(attempt.nodes, rank, per_node)) for rank in range(world))
    return {rank: node or attempt.nodes[-1] for rank, node in places}


def _agents(found: Gathering) -> None:
    path = found.paths.agents_json
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


def _preflight(found: Gathering) -> None:
    path = found.paths.preflight_json
    record = read_json(path) if path.exists() else {}
    for node, what in (record.get("bad") or {}).items():
        text, at = f"preflight: {what}"[:TEXT_CHARACTERS], float(record["at"])
        found.clues.append(Clue(AGENT, text, at, node=str(node), file=str(path)))


def _evidence(found: Gathering) -> None:
    since = found.attempt.claimed_at if found.attempt else 0.0
    settings = found.record.spec.health if found.record else HealthSettings()
    for path in sorted((found.paths.root / "evidence" / "nodes").glob("*.json")):
        if found.left_s <= 0:
            found.unasked.append(f"`{path.parent}`: the time was up")
            break
        with found.source(path.name):
            record = read_json(path)
            if found.attempt is not None and record["node"] not in found.attempt.nodes:
                continue  # it took no part
            offset = found.offsets.get(str(record["node"]), 0.0)
            clues, notes = kernel_clues(
                record, str(path), since=since, offset_s=offset, settings=settings
            )
            found.clues.extend(clues)
            found.unasked.extend(notes)


def _begin_looks(found: Gathering, scheduler: Optional[Scheduler]) -> Optional[Looks]:
    if scheduler is None or found.record is None or found.attempt is None:
        return None
    lost = {clue.node for clue in found.clues if clue.text.startswith(_LOST)}
    nodes = [node for node in found.attempt.nodes if node not in lost]
    return begin_looks(scheduler, found.layout, found.record, found.attempt, nodes)


def _health(found: Gathering) -> None:
    if found.record is None:
        return
    settings = found.record.spec.health
    none: tuple[list[Word], list[str]] = ([], [])
    own = found.looks.wait(is_short=_is_told(found)) if found.looks else none
    roots = found.roots.wait(max(ROOTS_LAST_S, found.left_s)) if found.roots else none
    words, notes = words_of_health(own, roots)
    found.unasked += notes
    untold: dict[str, list[str]] = {}
    for file, report in words:
        offset_s = found.offsets.get(report.node, 0.0)
        clues, untold[report.node] = health_clues(
            report, str(file), settings=settings, offset_s=offset_s
        )
        found.clues += clues
    found.unasked += what_is_untold(untold)


def _is_told(found: Gathering) -> bool:
    """By a rank itself, and it is of a kind behind which there is no sick node."""
    told = classify(found.clues, Facts())
    by_rank = bool(told.clues) and told.clues[0].kind == RANK_ERROR
    return by_rank and told.confidence >= DECISIVE and told.cause in _OF_THE_PROGRAM


def _storage(found: Gathering) -> None:
    trouble = storage_trouble(found.layout, found.number)
    if trouble:
        found.clues.append(Clue(NODE_STATE, trouble, file=str(found.layout.root)))


def _last_step(found: Gathering) -> None:
    outcome, progress = read_outcome(found.paths), read_progress(found.paths)
    steps = [clue.step for clue in found.clues if clue.step is not None]
    if outcome is not None:
        steps.append(outcome.step)
    if progress is not None and progress.step > (progress.restored_step or 0):
        steps.append(progress.step)
    found.step = max(steps, default=None)


def _slurm(found: Gathering, asked: Optional[Asked]) -> tuple[Optional[bool], Optional[str]]:
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
