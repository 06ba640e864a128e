"""Nodes that failed a run are kept out of its next job: noted, counted, and set in Slurm.

Slurm takes a list of excluded nodes only for a job that waits, and a requeue kills the shell that
asks for it; but from the moment of the requeue on the list can be set, and the shell, which ignores
TERM, has KillWait for it (seen on 22.05: 20 ms). What is not set then is no loss of the exclusion:
the claim of the next attempt looks at its nodes before any rank starts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

from ftslurm.diagnosis.causes import NODE_FAULTS
from ftslurm.errors import SchedulerError, UsageError, warn
from ftslurm.files import best_effort
from ftslurm.recovery.budgets import SURE
from ftslurm.recovery.exclusion import (
    Exclusion,
    Placement,
    excluded_now,
    hostlist_to_set,
    least_nodes,
    place,
    still_counting,
    too_many,
    troubles,
)
from ftslurm.recovery.likeness import Kind
from ftslurm.run.attempts import claimed_numbers, read_decision
from ftslurm.run.gpu_request import ranks_use_gpus
from ftslurm.run.layout import RunLayout
from ftslurm.run.node_memory import (
    BY_PERSON,
    EXCLUDED,
    FAULT,
    READMITTED,
    note_node,
    read_node_events,
)
from ftslurm.run.spec import ClusterSpec
from ftslurm.scheduler.hostlist import expand
from ftslurm.scheduler.protocol import NodeNeed, Site

if TYPE_CHECKING:
    from ftslurm.recovery.own_job import OwnJob

POLL_S = 0.3
UNKNOWN_KILL_WAIT_S = 30.0
"""Slurm's default."""


def remember(layout: RunLayout, number: int, decision: Mapping[str, Any]) -> None:
    """Note what an attempt's decision says of nodes; once, however often it is called. A node that
    is at fault has its fault noted: whether that is enough follows from their number."""
    blamed = decision.get("blamed") or {}
    cause, why = str(decision.get("cause", "")), str(decision.get("reason", ""))
    sure = decision.get("confidence") is None or decision["confidence"] >= SURE
    at_fault = blamed.get("node") if cause in NODE_FAULTS and sure else None
    told = [(FAULT, at_fault)] if at_fault else []
    sick = decision.get("sick") or {}
    told += [
        (EXCLUDED, node)
        for node in decision.get("exclude") or ()
        if node != at_fault or node in sick
    ]
    for kind, node in told:
        with best_effort(f"what is known of node {node} is not on record"):
            note_node(layout, kind, node, attempt=number, cause=cause, why=why)


def known_exclusions(job: OwnJob) -> dict[str, str]:
    """Node -> why no attempt of the run is placed on it, by what is known of it."""
    return _told(_exclusions(job))


def given_up_since(job: OwnJob, attempt: int) -> dict[str, str]:
    """Node -> why: kept out by what became known after the decision on `attempt`, as by root's look
    at the node, or by a node that does not answer when the next attempt is claimed."""
    decided = read_decision(job.layout.attempt(attempt)).get("exclude") or ()
    return {
        one.node: one.why
        for one in _exclusions(job)
        if one.attempt == attempt and one.node not in decided
    }


def settle_exclusions(job: OwnJob) -> dict[str, str]:
    """Before a job is queued: give up the oldest exclusions, on record, where they are so many that
    it could never start. What it is then to be kept off, as known_exclusions; without nodes that
    Slurm has no more, for which it would refuse the whole list."""
    exclusions = _exclusions(job)
    if not exclusions:
        return {}
    cluster = job.record.spec.cluster
    needed = cluster.nodes + cluster.spares
    dropped = too_many(exclusions, serving=_serving(job), needed=needed)
    for one in dropped:
        _readmit(job, one.node, needed)
    listed = job.scheduler.all_nodes()
    return _told([
        one for one in exclusions if one not in dropped and (listed is None or one.node in listed)
    ])  # fmt: skip


def readmit_nodes(job: OwnJob, nodes: Sequence[str]) -> None:
    """A person says that these may be used again; UsageError for one that the run does not keep
    off, and then for none of them."""
    remember_last(job.layout)
    out = known_exclusions(job)
    strangers = [node for node in nodes if node not in out]
    if strangers:
        raise UsageError(
            f"this run does not keep off node {strangers[0]}; it keeps off "
            f"{', '.join(sorted(out)) or 'none'}, name one of those"
        )
    newest = max(claimed_numbers(job.layout), default=0)
    for node in nodes:
        why = "somebody has readmitted it"
        note_node(
            job.layout, READMITTED, node, attempt=newest, cause=BY_PERSON, why=why, now=job.now
        )


def _readmit(job: OwnJob, node: str, needed: int) -> None:
    why = (
        f"the job needs {needed} nodes and could never start without {node}, the node that has "
        "been kept out for longest"
    )
    warn(f"node {node} is used again: {why}")
    newest = max(claimed_numbers(job.layout), default=0)
    with best_effort("not on record"):
        note_node(job.layout, READMITTED, node, attempt=newest, why=why, now=job.now)


def _exclusions(job: OwnJob) -> list[Exclusion]:
    """Oldest first. The machine of a local run has nothing in its place."""
    if job.scheduler.name == "local":
        return []
    rules = job.record.spec.recovery
    events = read_node_events(job.layout)
    counting = still_counting(events, fault_days=rules.node_fault_days, now=job.now())
    return excluded_now(counting, max_node_faults=rules.max_node_faults)


def _serving(job: OwnJob) -> set[str]:
    """Nodes that could serve the run's next job; empty where nobody can say."""
    cluster = job.record.spec.cluster
    site = Site.from_dict(job.record.site) if job.record.site else None
    partition = cluster.partition or (site.default_partition if site else None)
    need = NodeNeed(cluster.constraint or "", _gpus_of_node(cluster), cluster.mem or "")
    serving = job.scheduler.serving_nodes(partition, need)
    return set(serving or ()) - _by_person(job)


def _gpus_of_node(cluster: ClusterSpec) -> int:
    """0: the job's options that we do not read may ask for some."""
    return cluster.gpus_per_node or cluster.gpus_per_task * cluster.tasks_per_node


def _told(exclusions: Sequence[Exclusion]) -> dict[str, str]:
    return {one.node: f"is kept out since attempt {one.attempt}" for one in exclusions}


def placement(
    job: OwnJob,
    nodes: Sequence[str],
    unusable: Mapping[str, str],
    *,
    doubtful: Collection[str] = (),
    kinds: Optional[Mapping[str, Kind]] = None,
) -> Placement:
    """Where in this allocation an attempt may run. `unusable`: node -> why; a spare is preferred to
    a `doubtful` node, and to one that has ever had a fault; `kinds`: by which it has to match."""
    cluster, recovery = job.record.spec.cluster, job.record.spec.recovery
    faults = troubles(read_node_events(job.layout))
    return place(
        nodes,
        wanted=cluster.nodes,
        least=least_nodes(cluster, recovery),
        unusable=unusable,
        faults={node: faults.get(node, 0) + (node in doubtful) for node in nodes},
        kinds=kinds,
        gpus=_gpus_of_node(cluster) if ranks_use_gpus(job.record.spec) else None,
    )


def keep_out_of_waiting(job: OwnJob, job_id: str, names: Sequence[str], *, for_s: float) -> bool:
    """Have a job that is being queued again, or waits, kept off these nodes, and no longer off
    those that the run has readmitted; whether it is, as read back. Tried for so long."""
    events = read_node_events(job.layout)
    if not (names or events):
        return True
    deadline = job.now() + for_s
    said, pause_s = "there was no time for it", 0.0
    while job.now() < deadline:
        try:
            old = job.scheduler.excluded_nodes(job_id)
            wanted = hostlist_to_set(old, by_person=_by_person(job), ours=events, now=names)
            if set(old) == set(wanted):
                return True
            job.scheduler.exclude_nodes(job_id, wanted)
            said = "Slurm took the list and does not show it"
        except (SchedulerError, UsageError) as error:
            said, pause_s = str(error), POLL_S
        job.sleep(pause_s)  # what was set is read back at once
        pause_s = POLL_S
    what = f"kept off {', '.join(names)}" if names else "given back the nodes it was kept off"
    warn(f"job {job_id} is not {what} ({said}); it looks at its nodes itself when it starts")
    return False


def kill_wait_s(job: OwnJob) -> float:
    """How long a requeue lets the shell live that has asked for it."""
    return Site.from_dict(job.record.site).kill_wait_s if job.record.site else UNKNOWN_KILL_WAIT_S


def remember_last(layout: RunLayout) -> dict[str, Any]:
    """The decision after the newest attempt; what it says of nodes is noted if its shell died
    before it could."""
    numbers = claimed_numbers(layout)
    if not numbers:
        return {}
    decision = read_decision(layout.attempt(numbers[-1]))
    remember(layout, numbers[-1], decision)
    return decision


def _by_person(job: OwnJob) -> set[str]:
    text = job.record.spec.cluster.exclude
    try:
        return set(expand(text)) if text else set()
    except UsageError:
        return set()
