"""Were GPUs asked for? By a key of `cluster`, or by an option among its `sbatch` and `srun`. Pure.

Only gres of the name `gpu` count: what stands for a part of one (`shard`, `mps`) is nothing that
several ranks can talk over.
"""

from __future__ import annotations

import re

from ftslurm.run.spec import ClusterSpec, RunSpec

_OPTION = re.compile(r"--([a-z-]+)=(.*)", re.DOTALL)
_COUNTS = re.compile(r"gpus(-per-[a-z]+)?")
_LISTS = re.compile(r"gres|tres-per-[a-z]+")
_GPU = re.compile(r"(gres[:/])?gpu([:/=].*)?", re.DOTALL)
_NONE = re.compile(r"(.*[:=])?0", re.DOTALL)


def has_gpus(cluster: ClusterSpec) -> bool:
    """Whether the job, or the step of its ranks, asks Slurm for GPUs."""
    if cluster.gpus_per_node or cluster.gpus_per_task:
        return True
    return any(asks_for_gpus(option) for option in [*cluster.sbatch, *cluster.srun])


def ranks_use_gpus(spec: RunSpec) -> bool:
    """Whether the ranks compute on GPUs, wherever they can be used at all."""
    backend = spec.parallel.backend
    return backend == "nccl" or (backend != "gloo" and has_gpus(spec.cluster))


def asks_for_gpus(option: str) -> bool:
    """Whether one option of sbatch or srun does, e.g. `--gres=gpu:h100:4` or `--gpus=4`."""
    match = _OPTION.fullmatch(option)
    if match is None:
        return False
    name, items = match[1], match[2].split(",")
    if _COUNTS.fullmatch(name):
        return not all(_NONE.fullmatch(item) for item in items)
    if _LISTS.fullmatch(name):
        return any(_GPU.fullmatch(item) and not _NONE.fullmatch(item) for item in items)
    return False
