"""How often a job of many GPUs fails. Pure.

A synchronous job stops when any one of its GPUs does, so its mean time between failures is that of
one GPU divided by their number. Nothing here knows a cluster: the numbers are the caller's.
"""

from __future__ import annotations

HOUR_S, DAY_S = 3600.0, 86400.0

GPU_MTBF_H = 50_000.0
"""One H100 in a training job, its share of everything that stops the job included: the order of
magnitude of 2026's public analyses, and 54 days of Llama 3 on 16,384 GPUs give 50,700 h."""

SIZES = (8, 64, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 100_000, 131_072)


def mtbf_s(gpus: int, gpu_mtbf_h: float = GPU_MTBF_H) -> float:
    """Seconds between two failures of a job on `gpus` GPUs."""
    return gpu_mtbf_h * HOUR_S / gpus


def failures_in(days: float, gpus: int, gpu_mtbf_h: float = GPU_MTBF_H) -> float:
    return days * DAY_S / mtbf_s(gpus, gpu_mtbf_h)


def observed_gpu_mtbf_h(failures: int, days: float, gpus: int) -> float:
    """From what was counted: GPU-hours a failure."""
    return gpus * days * 24.0 / failures
