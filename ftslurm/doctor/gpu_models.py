"""GPU models among the nodes of a partition, as their gres tell them. Pure."""

from __future__ import annotations

from collections import Counter

from ftslurm.doctor.cluster import Cluster
from ftslurm.doctor.line import Line, ok, skipped, warn
from ftslurm.scheduler.slurm_parse import gpus_by_type


def check_gpu_models(cluster: Cluster) -> Line:
    name, whose = "slurm.gpu_models", f"partition {cluster.partition_name}"
    if cluster.gres is None:
        return skipped(name, f"{whose}: sinfo did not tell what its nodes have")
    nodes = Counter(model for gres in cluster.gres.values() for model in gpus_by_type(gres))
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
