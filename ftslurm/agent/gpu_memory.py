"""This node's GPU memory, looked at for its agent (diagnosis/gpu_memory.py)."""

from __future__ import annotations

from dataclasses import dataclass

from ftslurm.agent.collect import Probe, run_all
from ftslurm.agent.loop import tell
from ftslurm.diagnosis.gpu_memory import DEADLINE_S, Told, look_argv, parse
from ftslurm.health.nvml import LIBRARY


@dataclass(frozen=True)
class GpuMemory:
    """Of a job with so many GPUs a node."""

    job_id: str
    """As Slurm counts, without the array's."""
    per_node: int
    library: str = LIBRARY

    def look(self) -> Told:
        """Takes DEADLINE_S at most, and what a driver that hangs costs; no time without one."""
        argv = look_argv(self.job_id, self.per_node, self.library)
        if not argv:
            return Told()
        (answer,) = run_all([Probe("gpu-memory", argv, DEADLINE_S, 64 << 10)])
        try:
            return parse(bytes(answer.data))
        except (ValueError, KeyError, TypeError, AttributeError):
            why = answer.note or bytes(answer.data[-200:])
            tell(f"whether GPU memory is back is not known: {why!r}")
            return Told()
