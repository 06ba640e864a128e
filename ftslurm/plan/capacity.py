"""How large a checkpoint is, what keeping some takes, how fast it must be written. Pure."""

from __future__ import annotations

from ftslurm.plan.intervals import Costs, best_s, waste

STATE_BYTES_PER_PARAMETER = 14
"""BF16 weights (2), FP32 master weights (4), Adam's two moments (8)."""
GRADIENT_BYTES_PER_PARAMETER = 2
MARGIN = (0.20, 0.30)
"""For what is being written, retries and fragments."""


def state_bytes(parameters: float, bytes_per_parameter: float = STATE_BYTES_PER_PARAMETER) -> float:
    return parameters * bytes_per_parameter


def storage_bytes(one_bytes: float, kept: int) -> tuple[float, float, float]:
    """Of `kept` checkpoints: bare, and with the smaller and the larger margin."""
    bare = one_bytes * kept
    return bare, bare * (1.0 + MARGIN[0]), bare * (1.0 + MARGIN[1])


def bandwidth(one_bytes: float, within_s: float) -> float:
    """Bytes a second, over all nodes, to write or read one checkpoint in that time."""
    return one_bytes / within_s


def peers_pay_from(
    costs: Costs,
    *,
    peer_restart_s: float,
    peer_share: float,
    overhead: float,
    gpu_mtbf_h: float,
    most_gpus: int = 1 << 24,
) -> int:
    """From how many GPUs on it pays to keep each state a second time in the memory of a peer.

    `peer_share` of the failures then take `peer_restart_s`; `overhead` is the share of every step
    that the copies cost. 0: never, up to `most_gpus`.
    """
    helped = Costs(
        costs.stall_s,
        peer_share * peer_restart_s + (1.0 - peer_share) * costs.restart_s,
        costs.lag_s,
    )

    def pays(gpus: int) -> bool:
        between_s = gpu_mtbf_h * 3600.0 / gpus
        interval_s = max(best_s(costs, between_s), 1.0)
        plain = waste(interval_s, costs, between_s).goodput
        return waste(interval_s, helped, between_s).goodput * (1.0 - overhead) > plain

    low, high = 0, 1
    while not pays(high):
        low, high = high, 2 * high
        if high > most_gpus:
            return 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high
