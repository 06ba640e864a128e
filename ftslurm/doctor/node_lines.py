"""What the nodes of a trial have told, judged: one line for each thing that matters. Pure.

A line names the nodes that stand out; what no node could tell is said to be unknown. How nodes see
each other's writes is view_lines.py's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ftslurm.doctor.line import FAIL, OK, SKIPPED, WARN, Line, ok, skipped, warn
from ftslurm.doctor.node_facts import NodeFacts, Trialled, names
from ftslurm.doctor.view_lines import check_claims, check_shared, check_sight
from ftslurm.scheduler.protocol import CLOCKS_S

GOAL_RATE = 2e9
"""Bytes a second that a local tier should take, as good NVMe does."""
LEAST_RATE = 0.1e9
MANY_CALLS = 3000
"""Of one rank's start: millions with a thousand ranks, of a server that does thousands a second."""
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "ramfs", "overlay",
          "squashfs", "erofs")  # fmt: skip
_BADNESS = {FAIL: 3, WARN: 2, SKIPPED: 1, OK: 0}


def judge(trialled: Trialled) -> list[Line]:
    nodes = trialled.nodes
    return [
        _answers(trialled),
        check_shared(trialled),
        *check_sight(trialled),
        check_claims(trialled),
        _clocks(nodes),
        *_rates(nodes),
        _alike("across.cpu", nodes, lambda one: str(one.hello.get("isa", "")), _ISA),
        _alike("across.gpus", nodes, _gpus_of, _GPUS),
        _alike("across.driver", nodes, lambda one: str(one.hello.get("driver", "")), _DRIVER),
        _alike("across.python", nodes, lambda one: str(one.hello.get("python", "")), _PYTHON),
        _interfaces(nodes),
        _rank_start(trialled),
        *_of_each(nodes),
    ]


_ISA = (
    "CPUs of other instruction sets sum in another order, so a run that moves is not bit for bit"
    " the same, and what was built for one may not start on the other: ask for one kind"
    " (cluster.constraint)"
)
_GPUS = "a step takes as long as its slowest GPU: ask for one kind (cluster.constraint)"
_DRIVER = "kernels and NCCL's choices go by it: have one driver on all nodes"
_PYTHON = "the nodes have different interpreters at the same path: name one (cluster.python)"


def _answers(trialled: Trialled) -> Line:
    """What a node has not told counts for nothing in the other lines."""
    name = "across.answers"
    silent = []
    for one in trialled.nodes:
        asked = {"its clock": one.clock is not None}
        if trialled.made and one.sees_folder:
            asked |= {"what it could claim": bool(one.claims)}
            asked |= {"what it sees": bool(one.seen)} if one.task else {}
        silent += [f"{one.node}: {what}" for what, told in asked.items() if not told]
    if not silent:
        return ok(name, f"{len(trialled.nodes)} nodes answered in time")
    return warn(
        name,
        f"not told in time: {names(silent)}",
        "ask again; a node that is slow to answer each time hangs on something: look at its kernel"
        " log and its mounts",
    )


def _gpus_of(one: NodeFacts) -> str:
    gpus = one.hello.get("gpus") or {}
    return ", ".join(f"{count} x {model}" for model, count in sorted(gpus.items()))


def _alike(
    name: str, nodes: Sequence[NodeFacts], of: Callable[[NodeFacts], str], todo: str
) -> Line:
    """`of`: an empty text where the node has none, or cannot tell."""
    found: dict[str, list[str]] = defaultdict(list)
    for one in nodes:
        found[of(one)].append(one.node)
    if set(found) == {""}:
        return ok(name, "none is seen on any node")
    if len(found) == 1:
        return ok(name, f"{next(iter(found))} on all {len(nodes)} nodes")
    rare = sorted(found.items(), key=lambda item: len(item[1]))
    told = names([f"{text or 'none'} on {names(where)}" for text, where in rare], "; ")
    return warn(name, told, todo)


def _clocks(nodes: Sequence[NodeFacts]) -> Line:
    name = "across.clock"
    known = [(one.clock.off_s, one.clock.within_s, one.node) for one in nodes if one.clock]
    if not known:
        return skipped(name, "no node told its time")
    first, last = min(known), max(known)
    apart_s, within_s = last[0] - first[0], last[1] + first[1]
    told = (
        f"the clocks of {len(known)} nodes are {apart_s:.3f} s apart at most"
        f" (within {within_s:.3f} s)"
    )
    if apart_s - within_s <= CLOCKS_S:
        return ok(name, told)
    return warn(
        name,
        f"{told}: {last[2]} is ahead of {first[2]}",
        f"records of nodes are matched by time, {CLOCKS_S:g} s apart at most: have chrony or ntpd"
        " run on all machines",
    )


def _rates(nodes: Sequence[NodeFacts]) -> list[Line]:
    return [
        _rate(nodes, "/dev/shm", "across.write_memory", GOAL_RATE,
              "saves are staged in memory before training goes on: look for a node that is busy,"
              " or whose memory is slow"),
        _rate(nodes, "/tmp", "across.write_local", 0.0, ""),
        _rate(nodes, "runs", "across.write_runs", LEAST_RATE,
              "a save of a large model will take its time; see `ftslurm plan`"),
    ]  # fmt: skip


def _rate(
    nodes: Sequence[NodeFacts], place: str, name: str, least: float, todo: str
) -> Line:  # fmt: skip
    rates = {
        one.node: one.rates[place]["rate"] for one in nodes if "rate" in one.rates.get(place, {})
    }
    refused = {
        one.node: one.rates[place]["error"] for one in nodes if "error" in one.rates.get(place, {})
    }
    if refused:
        node, why = next(iter(refused.items()))
        where = "the runs' folder" if place == "runs" else place
        return warn(name, f"{where} on {node}: {why}", "make room there, or ask for quota")
    if not rates:
        return skipped(name, "not measured; --write-gb says how much to write")
    slowest = min(rates, key=lambda node: rates[node])
    told = (
        f"{place if place != 'runs' else 'the runs'}: {rates[slowest] / 1e9:.2f} GB/s on {slowest},"
        f" the slowest of {len(rates)}, all at once {sum(rates.values()) / 1e9:.2f}"
    )
    if place == "/tmp":
        below = rates[slowest] < GOAL_RATE
        told += f"; a local tier should take {GOAL_RATE / 1e9:g}" if below else ""
        told += ", no save goes there (cluster.environment is unpacked there)" if below else ""
    if rates[slowest] < least:
        return warn(name, told, todo)
    return ok(name, told)


def _interfaces(nodes: Sequence[NodeFacts]) -> Line:
    """Names: what cluster.interface takes has to be there on every node."""
    name = "across.interface"
    sets = [set(one.hello.get("interfaces") or {}) for one in nodes]
    on_all = set.intersection(*sets) if sets else set()
    if not on_all:
        each = [f"{one.node}: {', '.join(one.hello.get('interfaces') or {})}" for one in nodes]
        told = names(each, "; ")
        return warn(name, f"no interface has an address on all nodes ({told})", _INTERFACE)
    routes = {str(one.hello.get("route") or "none") for one in nodes}
    told = f"on all nodes: {', '.join(sorted(on_all))}; the way out is by {names(sorted(routes))}"
    if len(routes) > 1:
        return warn(name, f"{told}, not the same on all", _INTERFACE)
    return ok(name, told)


_INTERFACE = (
    "ranks may pick interfaces that do not reach each other: name one that all have"
    " (cluster.interface)"
)


def _rank_start(trialled: Trialled) -> Line:
    name, module = "across.rank_start", trialled.module
    found = trialled.nodes[0].rank_start if trialled.nodes else None
    if found is None or "error" in found:
        why = "no answer" if found is None else str(found["error"])
        return skipped(name, f"`import {module}` was not counted: {why}")
    if not found["found"]:
        return skipped(
            name, f"{module} is not in the interpreter that was tried; ranks may have another"
        )
    calls = found["calls"]
    asked = calls["stat"] + calls["open"] + calls["list"] + found["libraries"]
    kind = str(found.get("file_system") or "unknown")
    told = (
        f"`import {module}` took {found['took_s']:.1f} s and asks {asked} times or more for files"
        f" ({calls['stat']} stat, {calls['open']} open, {calls['list']} listings as Python counts"
        f" them, {found['libraries']} libraries; strace tells all), on {kind}"
    )
    if kind in _LOCAL or asked < MANY_CALLS:
        return ok(name, told)
    todo = "each rank asks the file server so often when it begins: cluster.environment has a node"
    return warn(name, told, f"{todo} unpack one file instead")


def _of_each(nodes: Sequence[NodeFacts]) -> list[Line]:
    """host.* of all nodes, each once: as on the worst of them."""
    found: dict[str, list[tuple[int, str, Mapping[str, Any]]]] = defaultdict(list)
    for one in nodes:
        for line in one.hello.get("lines") or []:
            found[line["name"]].append((_BADNESS[line["state"]], one.node, line))
    told = []
    for name, rows in found.items():
        worst = max(row[0] for row in rows)
        where = [node for badness, node, _ in rows if badness == worst]
        line = next(line for badness, _, line in rows if badness == worst)
        whose = f"{where[0]}: " if len(where) == 1 else f"{where[0]} and {len(where) - 1} more: "
        told.append(Line(name, line["state"], whose + line["seen"], line["todo"]))
    return told
