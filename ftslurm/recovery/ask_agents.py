"""What the batch loop asks the agents' leader of its job: which nodes are lost, whether an old
attempt's processes are gone, and that an attempt begins.

A job without agents, or with a leader that does not answer in time, is answered for as if all were
well. Never decides anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Optional

from ftslurm.errors import FormatError
from ftslurm.files import read_json
from ftslurm.run.attempts import Attempt, read_attempt

if TYPE_CHECKING:
    from ftslurm.recovery.own_job import OwnJob

NODES_S = 6.0
"""The leader is on this node: one that is not dead but late, as on a node that is busy ending
ranks, is worth waiting for, since without its word the next attempt is not watched."""
CLEAR_S = 20.0
"""Agents give leftovers 7 s to go, and their GPUs' memory 4 s to come back."""
BEGIN_S = 6.0
ENDED_S = 5.0
"""What the agents have seen is written down, durably, before the answer."""
ENDED_IN_GRACE_S = 1.0


@dataclass(frozen=True)
class Word:
    """What the leader says of the job's nodes."""

    lost: dict[str, str] = field(default_factory=dict)
    """Node -> why no rank may be placed on it: not reached, or not clean."""
    unreachable: frozenset[str] = frozenset()
    """Those among them that Slurm cannot clean up either until it gives them up."""
    doubtful: frozenset[str] = frozenset()
    """Nothing is known of these: the node answers, its agent does not."""
    held: Mapping[str, str] = field(default_factory=dict)
    """Those among `lost` on whose GPUs processes of an earlier attempt have memory now -> which."""
    kinds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What nodes have told of what they are, as likeness.Kind; those that are lost too."""

    @property
    def is_hasty(self) -> bool:
        """Some of `lost` are reached, and have not been able to say in time that they are clean."""
        return bool(set(self.lost) - self.unreachable)


def look(job: OwnJob, attempt: int) -> Word:
    """Before a new attempt: are the nodes there, and clean of `attempt` and all before it, their
    GPUs' memory included?"""
    states = (_ask(job, {"ask": "nodes"}, NODES_S) or {}).get("nodes", {})
    words = {name: str(of.get("state")) for name, of in states.items()}
    lost = {name: "does not answer the other nodes" for name in words if words[name] == "lost"}
    unreachable = frozenset(lost)
    held: dict[str, str] = {}
    if states and attempt:
        answer = _ask(job, {"ask": "clear", "attempt": attempt}, CLEAR_S) or {}
        for name, pids in (answer.get("leftover") or {}).items():
            if pids:
                lost[name] = f"still runs processes of an earlier attempt (pids {_few(pids)})"
        now: dict[str, dict[str, str]] = answer.get("held") or {}
        before = _held_in_looks(job, attempt, answer.get("unseen") or ())
        for name, gpus in {**before, **now}.items():
            told = _of_gpus(gpus)
            lost.setdefault(name, f"has not got the memory of its GPUs back ({told})")
            if name in now and _is_named(gpus):
                held[name] = told
        for name in answer.get("lost") or ():
            # Too busy to answer in time, perhaps: no fault of the node yet.
            lost.setdefault(name, "has not said that it is clean of earlier attempts")
    doubtful = frozenset(name for name in words if words[name] == "gone")
    kinds = {name: of["kind"] for name, of in states.items() if of.get("kind")}
    return Word(lost, unreachable, doubtful, held, kinds)


def _held_in_looks(job: OwnJob, attempt: int, nodes: Iterable[str]) -> dict[str, dict[str, str]]:
    """Where the agents' step has no GPUs in its sight, as with ConstrainDevices: what the nodes'
    looks at themselves have told, since an attempt that has failed. That of another job, or of this
    one before a requeue, is out of date."""
    found = {}
    for node in nodes:
        with contextlib.suppress(OSError, FormatError, KeyError):
            ended = read_attempt(job.layout, attempt)
            if (ended.job_id, ended.restart_count) != (job.job_id, job.restart_count):
                break
            found[node] = read_json(job.layout.attempt(attempt).looks / f"{node}.json")["held"]
    return {node: gpus for node, gpus in found.items() if gpus}


def tell_begin(job: OwnJob, attempt: Attempt) -> None:
    """The attempt's ranks are about to be started."""
    question = {
        "ask": "begin",
        "attempt": attempt.number,
        "nodes": attempt.nodes,
        "tasks_per_node": attempt.tasks_per_node,
    }
    _ask(job, question, BEGIN_S)


def tell_ended(job: OwnJob, number: int, *, rc: int, in_grace: bool) -> None:
    """The ranks of attempt `number` have ended: what the agents know of it is to be on the disk."""
    question = {"ask": "ended", "attempt": number, "rc": rc}
    _ask(job, question, ENDED_IN_GRACE_S if in_grace else ENDED_S)


def _ask(job: OwnJob, question: Mapping[str, Any], timeout_s: float) -> Optional[dict[str, Any]]:
    if job.scheduler.name == "local" or not job.record.spec.recovery.agents:
        return None
    from ftslurm.agent.ask import ask  # late: a job without agents needs nothing of it

    return ask(job.layout, job.job_id, dict(question), timeout_s)


def _is_named(gpus: Mapping[str, str]) -> bool:
    from ftslurm.diagnosis.gpu_memory import has_owner  # late: loads ctypes

    return any(map(has_owner, gpus.values()))


def _of_gpus(gpus: Mapping[str, str]) -> str:
    return "; ".join(f"GPU {bus}: {what}" for bus, what in sorted(gpus.items()))


def _few(pids: list[Any]) -> str:
    return ", ".join(map(str, pids[:5])) + (", ..." if len(pids) > 5 else "")
