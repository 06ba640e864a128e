"""The argv that starts one process a rank, or one a node, under Slurm and on this machine. Pure.

What is to run is appended by the renderer. Nothing here runs a command or knows what a rank does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Optional

from ftslurm.run.spec import ClusterSpec

LOGS = "@LOGS@"
"""Stands in the argv for the attempt's log folder, known only when the batch script runs. The
renderer replaces it by the shell variable of its template, inside quotes."""

NODES = "@NODES@"
"""Stands for the nodes that ranks run on, likewise."""

KILL_WAIT_S = 10
"""Seconds from TERM to KILL on this machine."""


def ranks_argv(
    cluster: ClusterSpec,
    *,
    python: str,
    run_dir: Path,
    workdir: Optional[Path] = None,
    code: Sequence[Path] = (),
) -> list[str]:
    """Starts all ranks of an attempt and ends when the last has; one item contains LOGS.
    `workdir`: where they start, default RUN/code; `code`: folders outside of RUN that they import
    from."""
    if cluster.scheduler == "local":
        return [
            python,
            "-m",
            "ftslurm.scheduler.local_ranks",
            f"--ntasks={cluster.nodes * cluster.tasks_per_node}",
            f"--output={LOGS}/rank-%t.log",
            f"--kill-wait={KILL_WAIT_S}",
            "--",
        ]
    return [
        *_srun(cluster, tasks_per_node=cluster.tasks_per_node),
        # 22.05 and 23.02 do not take it over from the job.
        f"--cpus-per-task={cluster.cpus_per_task}",
        *_binding(cluster),
        # Unset, the site's WaitTime would kill the peers of a rank that ended well early.
        f"--wait={cluster.wait_s}",
        f"--output={LOGS}/rank-%t.log",
        *_container(cluster, run_dir, workdir or run_dir / "code", code),
        *cluster.srun,
    ]


def nodes_argv(cluster: ClusterSpec) -> list[str]:
    """Starts one process on every node that ranks run on; its output is the batch script's."""
    if cluster.scheduler == "local":
        return []
    return [*_srun(cluster, tasks_per_node=1), *_options({"mpi": cluster.mpi}), "--wait=0"]


def _srun(cluster: ClusterSpec, *, tasks_per_node: int) -> list[str]:
    return [
        "srun",
        # Without these, a job with spares would have ranks on them too.
        f"--nodes={cluster.nodes}",
        f"--ntasks={cluster.nodes * tasks_per_node}",
        f"--ntasks-per-node={tasks_per_node}",
        *_nodelist(cluster),
        # A site or a user may have set SLURM_EXPORT_ENV or SBATCH_EXPORT to NONE.
        f"--export={cluster.export}",
        # Slurm's default leaves the peers of a dead task hanging.
        "--kill-on-bad-exit=1",
    ]


def _nodelist(cluster: ClusterSpec) -> Sequence[str]:
    # Left to itself, a step on a part of the job may leave the first node out (24.11 and 26.05,
    # seen after another step), and rank 0 has to be where the batch script is.
    return [f"--nodelist={NODES}"] if cluster.spares else []


def _binding(cluster: ClusterSpec) -> Sequence[str]:
    return _options(
        {
            "gpus-per-task": cluster.gpus_per_task or None,
            "gpu-bind": cluster.gpu_bind,
            "cpu-bind": cluster.cpu_bind,
            "mpi": cluster.mpi,
        }
    )


def _options(values: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def _container(
    cluster: ClusterSpec, run_dir: Path, workdir: Path, code: Sequence[Path]
) -> Sequence[str]:
    if cluster.container_image is None:
        return []
    mounts = [*(f"{folder}:{folder}" for folder in (*code, run_dir)), *cluster.mounts]
    return [
        f"--container-image={cluster.container_image}",
        f"--container-mounts={','.join(mounts)}",
        # As outside a container; an image has a working folder of its own.
        f"--container-workdir={workdir}",
    ]
