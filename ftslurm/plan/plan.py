"""Everything that is planned for one size of job. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from ftslurm.plan.capacity import bandwidth, peers_pay_from, storage_bytes
from ftslurm.plan.failures import DAY_S, mtbf_s
from ftslurm.plan.intervals import Costs, Waste, best_s, daly_s, exact_s, waste, young_s

PEER_RESTART_S, PEER_SHARE, PEER_OVERHEAD = 40.0, 0.7, 0.01
"""A state copied from a peer's memory: published restarts of 40 s; some seven of ten failures leave
the peer alive; 1 % of the step for the copies. What was measured should take their place."""


@dataclass(frozen=True)
class Ask:
    gpus: int
    gpu_mtbf_h: float
    costs: Costs
    interval_s: Optional[float] = None
    """None: the best one."""
    state_bytes: Optional[float] = None
    kept: int = 3
    gpus_per_node: int = 8
    grace_s: float = 120.0


@dataclass(frozen=True)
class Storage:
    one_bytes: float
    kept_bytes: float
    kept_bytes_with_margin: tuple[float, float]
    persist_bytes_per_s: float
    """Over all nodes, to be durable in the time asked for."""
    persist_bytes_per_s_per_node: float
    grace_bytes_per_s_per_node: float
    """To get an emergency save into a quarter of the grace."""
    load_bytes_per_s_per_node: float
    """To read it in as long as it was written."""


@dataclass(frozen=True)
class Plan:
    gpus: int
    gpu_mtbf_h: float
    costs: Costs
    mtbf_s: float
    failures_per_day: float
    young_s: float
    daly_s: float
    exact_s: float
    interval_s: float
    is_best: bool
    waste: Waste
    gpu_hours_lost_per_day: float
    peers_pay_from_gpus: int
    """0: at no size."""
    storage: Optional[Storage]


def plan(ask: Ask) -> Plan:
    between_s = mtbf_s(ask.gpus, ask.gpu_mtbf_h)
    stall_s = ask.costs.stall_s
    interval_s = ask.interval_s or best_s(ask.costs, between_s)
    found = waste(interval_s, ask.costs, between_s)
    return Plan(
        gpus=ask.gpus,
        gpu_mtbf_h=ask.gpu_mtbf_h,
        costs=ask.costs,
        mtbf_s=between_s,
        failures_per_day=DAY_S / between_s,
        young_s=young_s(stall_s, between_s),
        daly_s=daly_s(stall_s, between_s),
        exact_s=exact_s(stall_s, between_s),
        interval_s=interval_s,
        is_best=ask.interval_s is None,
        waste=found,
        gpu_hours_lost_per_day=24.0 * ask.gpus * found.total,
        peers_pay_from_gpus=peers_pay_from(
            ask.costs,
            peer_restart_s=PEER_RESTART_S,
            peer_share=PEER_SHARE,
            overhead=PEER_OVERHEAD,
            gpu_mtbf_h=ask.gpu_mtbf_h,
        ),
        storage=None if ask.state_bytes is None else _storage(ask, ask.state_bytes),
    )


def _storage(ask: Ask, one_bytes: float) -> Storage:
    bare, some, more = storage_bytes(one_bytes, ask.kept)
    nodes = max(1.0, ask.gpus / ask.gpus_per_node)
    persist = bandwidth(one_bytes, max(ask.costs.lag_s, 1.0))
    return Storage(
        one_bytes=one_bytes,
        kept_bytes=bare,
        kept_bytes_with_margin=(some, more),
        persist_bytes_per_s=persist,
        persist_bytes_per_s_per_node=persist / nodes,
        grace_bytes_per_s_per_node=bandwidth(one_bytes, ask.grace_s / 4.0) / nodes,
        load_bytes_per_s_per_node=persist / nodes,
    )
