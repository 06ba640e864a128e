"""Figures that others have published, beside what this planner says in their place. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ftslurm.plan.capacity import (
    GRADIENT_BYTES_PER_PARAMETER,
    STATE_BYTES_PER_PARAMETER,
    state_bytes,
    storage_bytes,
)
from ftslurm.plan.failures import GPU_MTBF_H, HOUR_S, failures_in, mtbf_s, observed_gpu_mtbf_h
from ftslurm.plan.intervals import AGAIN, Costs, after_failure_s, naive_share, waste

LLAMA3_GPUS, LLAMA3_DAYS, LLAMA3_INTERRUPTIONS, LLAMA3_UNEXPECTED = 16_384, 54.0, 466, 419

_LLAMA3 = "The Llama 3 Herd of Models (2024), 3.3.4"
_ANALYSES = "public analyses of 2026, one H100 at 50,000 h"
_EPOCH = "Epoch AI on Llama 3.1 405B"
_SIZES = "BF16 weights, FP32 master weights, Adam's moments"


@dataclass(frozen=True)
class Row:
    what: str
    published: str
    value: float
    """Ours."""
    unit: str
    source: str
    note: str = ""


def rows() -> list[Row]:
    return [*_failures(), *_intervals(), *_after_a_failure(), *_sizes()]


def _failures() -> list[Row]:
    told = {1024: "49", 8192: "6", 16_384: "3", 100_000: "0.5"}
    found = [
        Row(f"between failures on {gpus:,} GPUs", hours, mtbf_s(gpus) / HOUR_S, "h", _ANALYSES)
        for gpus, hours in told.items()
    ]
    found.append(
        Row(
            f"interruptions of {LLAMA3_GPUS:,} GPUs in {LLAMA3_DAYS:.0f} days",
            f"{LLAMA3_UNEXPECTED} unexpected of {LLAMA3_INTERRUPTIONS}",
            failures_in(LLAMA3_DAYS, LLAMA3_GPUS),
            "failures",
            _LLAMA3,
            "at 50,000 h a GPU",
        )  # fmt: skip
    )
    observed = observed_gpu_mtbf_h(LLAMA3_UNEXPECTED, LLAMA3_DAYS, LLAMA3_GPUS)
    found.append(
        Row("one GPU's share of them", "some 50,000", observed, "h", _LLAMA3, "GPU-hours a failure")
    )
    return found


def _intervals() -> list[Row]:
    between_s = LLAMA3_DAYS * 24 * HOUR_S / LLAMA3_UNEXPECTED
    interval_s = 240.0
    # Of which save is a given interval the optimum? Young's formula, turned round.
    stall_s = interval_s**2 / (2.0 * between_s)
    cheap = waste(interval_s, Costs(stall_s, 0.0), between_s)
    dear = waste(interval_s, Costs(stall_s, 3600.0), between_s)
    return [
        Row("save for which 4 minutes are the optimum", "not told", stall_s, "s", _EPOCH,
            "4 min squared / (2 x MTBF)"),
        Row("waste at 4 minutes", "2.1", 100 * cheap.total, "%", _EPOCH,
            "saves and training done again; a restart counts nothing in it"),
        Row("naive waste, (4 min + 60 min) / MTBF", "35",
            100 * naive_share(interval_s, 3600.0, mtbf_s(16_384, GPU_MTBF_H)), "%", _ANALYSES,
            "loses a whole interval each time, takes an hour to restart each time"),
        Row("the same by the exact expectation", "not told", 100 * dear.total, "%", "Daly (2006)",
            f"of it {100 * dear.restart:.1f} % is the hour: nearly all of the 35 % is the restart"),
    ]  # fmt: skip


def _after_a_failure() -> list[Row]:
    """Of 512 GPUs and a checkpoint of 50 GB: what the published words say of its parts, where they
    give a range the middle of it, and a save each 4 minutes."""
    restart = {"detect": 10.0, "leave": 45.0, "start": 75.0, "load": 50e9 / 2e9}
    parts = after_failure_s(restart, 240.0, 0.0)
    whole_s = sum(parts.values())
    given = "a heartbeat of 10 s, 30 to 60 s to leave, 30 to 120 s to start, 50 GB at 2 GB/s"
    return [
        Row("a failure of 512 GPUs: load and train again", "the most",
            100 * (parts["load"] + parts[AGAIN]) / whole_s, "%", _ANALYSES,
            f"of {whole_s:.0f} s; {given}"),
        Row("the same: detection", "not the most", 100 * parts["detect"] / whole_s, "%",
            _ANALYSES),
    ]  # fmt: skip


def _sizes() -> list[Row]:
    one = state_bytes(70e9)
    bare, some, more = storage_bytes(one, 3)
    with_gradients = STATE_BYTES_PER_PARAMETER + GRADIENT_BYTES_PER_PARAMETER
    return [
        Row("bytes a parameter", "14", STATE_BYTES_PER_PARAMETER, "B", _SIZES),
        Row("with BF16 gradients", "16", with_gradients, "B", _SIZES),
        Row("state of 70B parameters", "980", one / 1e9, "GB", _SIZES),
        Row("three of them", "nearly 3", bare / 1e12, "TB", _SIZES),
        Row("and 20 % of room", "+20 %", some / 1e12, "TB", _SIZES),
        Row("and 30 % of room", "+30 %", more / 1e12, "TB", _SIZES),
    ]
