"""GPU models among the nodes of a partition, as their gres tell them. Pure."""

from __future__ import annotations

import re
from collections import Counter

from ftslurm.doctor.cluster import Cluster
from ftslurm.doctor.line import Line, ok, skipped, warn

_SOCKETS = re.compile(r"\([^()]*\)")


def check_gpu_models(cluster: Cluster) -> Line:
    name, whose = "slurm.gpu_models", f"partition {cluster.partition_name}"
    if cluster.gres is None:
        return skipped(name, f"{whose}: sinfo did not tell what its nodes have")
    nodes = Counter(model for gres in cluster.gres.values() for model in models(gres))
    if not nodes:
        return ok(name, f"{whose}: no node has GPUs")
    if set(nodes) == {""}:
        return skipped(name, f"{whose}: gres name no model; `nvidia-smi -L` on its nodes does")
    told = ", ".join(f"{model or 'unnamed'} on {nodes[model]}" for model in sorted(nodes))
    told = f"{whose}: {told} of {len(cluster.gres)} nodes"
    if len(nodes) == 1:
        return ok(name, told)
    todo = "a step takes as long as its slowest GPU: have nodes of one model (cluster.constraint,"
    return warn(name, told, f"{todo} or `--gres=gpu:MODEL:N` in cluster.sbatch)")


def models(gres: str) -> set[str]:
    """Of `gpu:h100:8(S:0-1),nic:2`; an empty name for `gpu:8`."""
    found = set()
    for item in _SOCKETS.sub("", gres).split(","):
        kind, *rest = item.strip().split(":")
        if kind == "gpu":
            found.add(rest[0] if rest and not rest[0].isdigit() else "")
    return found
