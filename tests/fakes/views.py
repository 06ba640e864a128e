"""Ranks as a reader would see them, for what judges views."""

from dataclasses import replace
from typing import Any

from ftslurm.run.heartbeat import RankView

TRAINING_RANK = RankView(
    rank=0,
    node="n1",
    pid=100,
    start_ticks=1,
    attempt=1,
    phase="training",
    step=50,
    age_s=0.1,
    phase_age_s=50.0,
    step_age_s=0.1,
    step_wall_s=1.0,
    step_own_s=0.8,
    step_cpu_s=0.8,
    window_wall_s=1.0,
    window_own_s=0.8,
    window_cpu_s=0.8,
    usual_step_s=1.0,
    collective_seq=500,
    collective="all_reduce f32[64]",
    in_collective=True,
    collective_age_s=0.1,
    devices_wait=False,
    alive=True,
    proc_state="S",
)


def rank_view(rank: int, **changes: Any) -> RankView:
    """Two ranks a node: n1, n2 ..."""
    return replace(TRAINING_RANK, rank=rank, node=f"n{rank // 2 + 1}", pid=100 + rank, **changes)


def silent(rank: int, seconds: float, **changes: Any) -> RankView:
    """A rank that has given no sign for so long."""
    ages = {"age_s": seconds, "step_age_s": seconds, "collective_age_s": seconds}
    return rank_view(rank, **{**ages, **changes})
