"""What is known of the kinds of an allocation's nodes: by their agents, by Slurm, and by what the
attempts before in this allocation had known. Only where spares are to match.

Slurm is asked once in an allocation, since it needs no agents to tell what it was configured with:
before the first attempt there are none, and GPUs may not be shown to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

from ftslurm.errors import warn
from ftslurm.recovery.likeness import Kind
from ftslurm.run.attempts import claimed_numbers, read_attempt
from ftslurm.run.gpu_request import ranks_use_gpus

if TYPE_CHECKING:
    from ftslurm.recovery.own_job import OwnJob


def known_kinds(
    job: OwnJob, nodes: Sequence[str], told: Mapping[str, Mapping[str, Any]]
) -> Optional[dict[str, Kind]]:
    """Of those `nodes` of which something is known; None: spares need not match, there are none.
    `told`: by their agents."""
    spec = job.record.spec
    if not spec.cluster.spares:
        return None
    known = _before(job)
    for node, record in told.items():
        known[node] = _parsed(node, record).or_else(known.get(node, Kind()))
    of_gres = [node for node in nodes if known.get(node, Kind()).gres is None]
    if of_gres and ranks_use_gpus(spec):
        from ftslurm.scheduler.accounting import read_nodes  # late: few runs have spares
        from ftslurm.scheduler.slurm_parse import gpus_by_type

        for node, state in (read_nodes(of_gres) or {}).items():
            gres = tuple(sorted(gpus_by_type(state.gres).items()))
            known[node] = known.get(node, Kind()).or_else(Kind(gres=gres))
    return {node: known[node] for node in nodes if node in known}


def _before(job: OwnJob) -> dict[str, Kind]:
    """As the newest attempt in this allocation had it."""
    for number in claimed_numbers(job.layout)[-1:]:
        attempt = read_attempt(job.layout, number)
        if (attempt.job_id, attempt.restart_count) == (job.job_id, job.restart_count):
            return _from_rows(attempt.kinds)
    return {}


def to_rows(kinds: Mapping[str, Kind]) -> list[dict[str, Any]]:
    """As an attempt has them on record."""
    alike: dict[Kind, list[str]] = {}
    for node, kind in kinds.items():
        alike.setdefault(kind, []).append(node)
    return [{"nodes": nodes, **kind.to_record()} for kind, nodes in alike.items()]


def _from_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Kind]:
    return {node: _parsed(node, row) for row in rows for node in row["nodes"]}


def _parsed(node: str, record: Mapping[str, Any]) -> Kind:
    try:
        return Kind.from_record(record)
    except (TypeError, ValueError, AttributeError) as error:
        warn(f"what kind of node {node} is, is not known: {error}")
        return Kind()
