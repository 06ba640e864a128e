"""All that is on record of one attempt: every rank and node, and what was told, in order.

Reads only; `ftslurm status RUN --attempt N` and whoever writes a report ask for it. Unlike the
story of a run it reads a record of every rank that left one. What nobody knows is None.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import RunError
from ftslurm.run.attempt_records import (
    Records,
    error_records,
    facts_of,
    read_attempt_records,
)
from ftslurm.run.attempts import numbers
from ftslurm.run.layout import RunLayout
from ftslurm.run.srun_lines import RankExit, lost_node, parse_lines
from ftslurm.run.timeline import RANK_EXIT, in_order

_LAUNCHER_BYTES = 4 << 20
KEPT_TOLD = 8


@dataclass(frozen=True)
class RankStory:
    rank: int
    node: Optional[str]
    code: Optional[int]
    """Exit code; None: unknown, or ended by a signal."""
    signal: Optional[str]
    step: Optional[int]
    """Where it failed, by its own word; else where its agent last saw it."""
    error: Optional[str]
    """Its own word."""
    told_by: str
    """Who says how it ended: launcher.log and the line, its agent, or nobody."""


@dataclass(frozen=True)
class NodeStory:
    node: str
    role: str
    """ranks, spare, or left out and why."""
    state: Optional[str]
    """live | lost | gone, as the agents last said; None: no agent was there."""
    offset_s: Optional[float]
    """How far its clock was ahead of the leader's."""
    lost_at: Optional[float]


@dataclass(frozen=True)
class Account:
    number: int
    ranks: list[RankStory]
    nodes: list[NodeStory]
    events: list[dict[str, Any]]
    """By the leader's receive time."""
    kept: list[str]
    """Files of evidence/, in the attempt's folder: stacks of ranks, what nodes had to say."""


def read_account(layout: RunLayout, number: int) -> Account:
    claimed = numbers(layout)
    if number not in claimed:
        last = f"its attempts are 1 to {claimed[-1]}" if claimed else "it has none yet"
        raise RunError(f"run `{layout.root}` has no attempt {number}; {last}")
    here = read_attempt_records(layout, number)
    following = claimed[claimed.index(number) + 1 :]
    errors = list(error_records(here.paths))
    then = read_attempt_records(layout, following[0]) if following else None
    lines = _launcher_lines(here.paths.root / "launcher.log")
    return Account(
        number=number,
        ranks=_ranks(here, errors, parse_lines(lines)),
        nodes=_nodes(here, lines),
        events=in_order(facts_of(here, then, errors)),
        kept=_kept(here.paths.root),
    )


def _kept(root: Path) -> list[str]:
    files = (path for path in (root / "evidence").rglob("*") if path.is_file())
    return sorted(str(path.relative_to(root)) for path in files)


def _launcher_lines(path: Path) -> list[str]:
    """Of a log beyond all sizes only the beginning: who ended first stands there."""
    try:
        with path.open("rb") as stream:
            return stream.read(_LAUNCHER_BYTES).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _ranks(
    here: Records, errors: Iterable[Mapping[str, Any]], exits: Iterable[RankExit]
) -> list[RankStory]:
    by_rank = {int(record["rank"]): record for record in errors}
    launcher = {item.rank: item for item in exits}
    seen = {int(rank): view for rank, view in here.agents.get("ranks", {}).items()}
    agent = {int(e["rank"]): e for e in here.agent_events if e["kind"] == RANK_EXIT}
    known = {*by_rank, *launcher, *seen, *agent}
    world = range(here.world_size or 0)
    return [
        _rank(here, rank, by_rank.get(rank, {}), launcher.get(rank), seen.get(rank, {}),
              agent.get(rank, {}))
        for rank in sorted({*known, *world})
    ]  # fmt: skip


def _rank(
    here: Records,
    rank: int,
    error: Mapping[str, Any],
    exit_: Optional[RankExit],
    seen: Mapping[str, Any],
    heard: Mapping[str, Any],
) -> RankStory:
    code, name, told_by = _ending(here, exit_, heard)
    node = error.get("node") or seen.get("node") or heard.get("node")
    node = node or (exit_.node if exit_ else None) or here.node_of(rank)
    words = f"{error['type']}: {error.get('message', '')}" if error.get("type") else None
    step = error.get("step")
    return RankStory(
        rank=rank,
        node=node,
        code=code,
        signal=name,
        step=seen.get("step") if step is None else step,
        error=words,
        told_by=told_by,
    )


def _ending(
    here: Records, exit_: Optional[RankExit], heard: Mapping[str, Any]
) -> tuple[Optional[int], Optional[str], str]:
    if exit_ is not None:
        return exit_.code, exit_.signal, f"launcher.log:{exit_.line}"
    if heard.get("code") is not None or heard.get("signal"):
        return heard.get("code"), heard.get("signal"), "its agent"
    if any(event["kind"] == "ranks_ended" and event.get("rc") == 0 for event in here.events):
        return 0, None, "the launcher's exit code"
    return None, None, "nobody"


def _nodes(here: Records, lines: Iterable[str]) -> list[NodeStory]:
    agents = here.agents.get("nodes", {})
    lost = {node for node in map(lost_node, lines) if node}
    roles = _roles(here)
    stories = []
    for name in dict.fromkeys([*roles, *agents, *sorted(lost)]):
        node = agents.get(name, {})
        state = node.get("state") or ("lost" if name in lost else None)
        role = roles.get(name, "unknown")
        stories.append(NodeStory(name, role, state, node.get("offset_s"), node.get("lost_at")))
    return stories


def _roles(here: Records) -> dict[str, str]:
    if here.claim is None:
        return {}
    return {
        **dict.fromkeys(here.claim.nodes, "ranks"),
        **dict.fromkeys(here.claim.spares, "spare"),
        **{node: f"left out, {why}" for node, why in here.claim.excluded.items()},
    }


def render_account(account: Account) -> Iterator[str]:
    yield "nodes:"
    for node in account.nodes:
        clock = "" if node.offset_s is None else f", clock {node.offset_s:+.3f} s"
        yield f"  {node.node} ({node.role}): {node.state or 'unknown'}{clock}"
    yield "ranks:"
    yield from _rank_lines(account.ranks)
    if account.kept:
        more = ", ..." if len(account.kept) > KEPT_TOLD else ""
        yield f"kept: {', '.join(account.kept[:KEPT_TOLD])}{more}"
    yield "what was told, in order:"
    yield from map(_event_line, account.events)


def _rank_lines(ranks: list[RankStory]) -> Iterator[str]:
    """One line for each way to end, those of which most is known first."""
    for rank in ranks:
        if rank.error or rank.signal or rank.code:
            step = "" if rank.step is None else f" at step {rank.step}"
            error = f"; {rank.error.splitlines()[0]}" if rank.error else ""
            yield (
                f"  rank {rank.rank} on {rank.node or 'unknown node'}{step}: {_how(rank)} "
                f"({rank.told_by}){error}"
            )
    fine = sum(rank.code == 0 for rank in ranks)
    if fine:
        yield f"  {fine} ended with exit code 0"
    silent = sum(rank.told_by == "nobody" and not rank.error for rank in ranks)
    if silent:
        yield f"  {silent} of whose end nothing is known"


def _how(rank: RankStory) -> str:
    if rank.signal:
        return rank.signal
    return "exit code unknown" if rank.code is None else f"exit code {rank.code}"


def _event_line(event: Mapping[str, Any]) -> str:
    at = time.strftime("%H:%M:%S", time.gmtime(float(event["at"])))
    thousandths = int(float(event["at"]) % 1 * 1000)
    left_out = ["at", "kind", "by", "traceback", "adopted"]
    if not event.get("clock_s"):
        left_out.append("clock_s")
    facts = " ".join(
        f"{name}={value}" for name, value in sorted(event.items())
        if name not in left_out and value is not None
    )  # fmt: skip
    return f"  {at}.{thousandths:03d} {event['by']:7} {event['kind']} {facts}"
