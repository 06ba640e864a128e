"""The argv that starts one process a rank, or one a node, under Slurm and on this machine. Pure.
Also those of the standbys and, under Slurm only, of the node agents, a preflight and looks at
nodes' health.

What is to run is appended by the renderer. Nothing here runs a command or knows what a rank does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Optional

from ftslurm.health.settings import HealthSettings
from ftslurm.run.gpu_request import has_gpus
from ftslurm.run.spec import ClusterSpec, RecoverySpec

LOGS = "@LOGS@"
"""Stands in the argv for the attempt's log folder, known only when the batch script runs. The
renderer replaces it by the shell variable of its template, inside quotes."""

NODES = "@NODES@"
"""Stands for the nodes that ranks run on, likewise."""

COUNT = "@COUNT@"
"""Stands for their number, where an attempt may have fewer than the run asks for."""

RANKS = "@RANKS@"
"""Stands for the number of ranks, likewise."""

SHORT_TASK_S = 10
"""A signal within them finds nobody who asks for the deadline: the one frozen at submit holds."""

KILL_WAIT_S = 10
"""Seconds from TERM to KILL on this machine."""


def has_agents(cluster: ClusterSpec, recovery: RecoverySpec) -> bool:
    """Whether every node of a job runs an agent."""
    return recovery.agents and cluster.scheduler == "slurm"


def ranks_argv(
    cluster: ClusterSpec,
    recovery: RecoverySpec,
    *,
    python: str,
    run_dir: Path,
    workdir: Optional[Path] = None,
    code: Sequence[Path] = (),
) -> list[str]:
    """Starts all ranks of an attempt and ends when the last has; items contain LOGS and the like.
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
        *_srun(cluster, recovery, ranks=True),
        # Slurm's default leaves the peers of a dead task hanging.
        "--kill-on-bad-exit=1",
        # Unset, the site's WaitTime would kill the peers of a rank that ended well early.
        f"--wait={cluster.wait_s}",
        f"--output={LOGS}/rank-%t.log",
        *_as_rank(cluster, run_dir, workdir, code),
    ]


def preflight_argv(
    cluster: ClusterSpec,
    recovery: RecoverySpec,
    health: HealthSettings,
    *,
    run_dir: Path,
    workdir: Optional[Path] = None,
    code: Sequence[Path] = (),
) -> list[str]:
    """Starts a process in the place of each rank, as the rank would be; one that ends, ends no
    other. Empty where there is never one, and on this machine, in whose place there is no other."""
    if cluster.scheduler == "local" or health.preflight == "never":
        return []
    return [
        *_srun(cluster, recovery, ranks=True),
        "--kill-on-bad-exit=0",
        "--wait=0",
        *_as_rank(cluster, run_dir, workdir, code),
    ]


def _as_rank(
    cluster: ClusterSpec, run_dir: Path, workdir: Optional[Path], code: Sequence[Path]
) -> list[str]:
    return [
        # 22.05 and 23.02 do not take it over from the job.
        f"--cpus-per-task={cluster.cpus_per_task}",
        *_binding(cluster),
        *_container(cluster, run_dir, workdir or run_dir / "code", code),
        *cluster.srun,
    ]


def nodes_argv(cluster: ClusterSpec, recovery: RecoverySpec) -> list[str]:
    """Starts one process on every node that ranks run on; its output is the batch script's."""
    if cluster.scheduler == "local":
        return []
    ends_together = ["--kill-on-bad-exit=1", "--wait=0"]
    return [*_srun(cluster, recovery, ranks=False), *ends_together, *_options({"mpi": cluster.mpi})]


def agents_argv(
    cluster: ClusterSpec, recovery: RecoverySpec, *, is_task: bool = False
) -> list[str]:
    """Arguments of agent/keep.py: starts one agent on every node of the job, spares included; empty
    where there are none. `is_task`: of a sweep."""
    if not has_agents(cluster, recovery):
        return []
    return [
        *(_after(cluster, recovery) if is_task else []),
        # With these, `--gres=none` is an invalid specification (22.05); and an agent is of no
        # attempt.
        *("env", "-u", "SLURM_GPUS", "-u", "SLURM_GPUS_PER_NODE", "-u", "SLURM_GPUS_PER_TASK"),
        *("-u", "FTSLURM_ATTEMPT"),
        *_beside(cluster.nodes + cluster.spares, "agents"),
        "--export=ALL",
        "--gres=none",
        "--mpi=none",
    ]


def _after(cluster: ClusterSpec, recovery: RecoverySpec) -> list[str]:
    """Tasks of a sweep are many and often short, and the agents' step would be a third of what one
    of a few seconds costs. Not where other nodes may be lost, GPUs have memory to give back, or the
    agents keep the run's figures."""
    is_small = cluster.nodes + cluster.spares == 1 and not has_gpus(cluster)
    return ["--after", str(SHORT_TASK_S)] if is_small and recovery.metrics_dir is None else []


def standbys_argv(cluster: ClusterSpec, recovery: RecoverySpec) -> list[str]:
    """Starts one standby on every node of the job, spares included; empty where there are none.
    Ranks are forked in its job step, which therefore has all that theirs has."""
    if not recovery.standby:
        return []
    of_no_attempt = ["env", "-u", "FTSLURM_ATTEMPT"]
    if cluster.scheduler == "local":
        return of_no_attempt
    return [
        *of_no_attempt,
        *_beside(cluster.nodes + cluster.spares, "standby"),
        f"--cpus-per-task={cluster.tasks_per_node * cluster.cpus_per_task}",
        # A rank with another environment than its standby starts cold.
        f"--export={cluster.export}",
        *_options({"mpi": cluster.mpi}),
    ]


def looks_argv(cluster: ClusterSpec, nodes: Sequence[str]) -> list[str]:
    """Starts one process on each of these nodes of the job, with the job's GPUs in its sight: a
    step without `--gres` has them all. Empty on this machine, where nothing is to start it."""
    if cluster.scheduler == "local":
        return []
    where = f"--nodelist={','.join(nodes)}"
    return [*_beside(len(nodes), "health"), where, "--export=ALL", "--mpi=none"]


def _beside(nodes: int, name: str) -> list[str]:
    """One process a node beside the ranks: it takes nothing from them, and lives on when a node is
    lost or another one ends."""
    return one_a_node(nodes, name, ["--overlap", "--mem=0", "--cpu-bind=none", "--no-kill"])


def one_a_node(nodes: int, name: str, options: Sequence[str]) -> list[str]:
    """One process on each of so many nodes; one that ends, ends no other."""
    return [
        "srun",
        f"--job-name={name}",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        *options,
        "--kill-on-bad-exit=0",
        "--wait=0",
    ]


def _srun(cluster: ClusterSpec, recovery: RecoverySpec, *, ranks: bool) -> list[str]:
    tasks_per_node = cluster.tasks_per_node if ranks else 1
    count, tasks = str(cluster.nodes), str(cluster.nodes * tasks_per_node)
    if _may_shrink(cluster, recovery):
        count, tasks = COUNT, RANKS if ranks else COUNT
    return [
        "srun",
        # Without these, a job with spares would have ranks on them too.
        f"--nodes={count}",
        f"--ntasks={tasks}",
        f"--ntasks-per-node={tasks_per_node}",
        *_nodelist(cluster, recovery),
        *_overlap(cluster, recovery),
        # A site or a user may have set SLURM_EXPORT_ENV or SBATCH_EXPORT to NONE.
        f"--export={cluster.export}",
    ]


def _may_shrink(cluster: ClusterSpec, recovery: RecoverySpec) -> bool:
    return has_agents(cluster, recovery) or recovery.min_nodes is not None


def _nodelist(cluster: ClusterSpec, recovery: RecoverySpec) -> Sequence[str]:
    # Left to itself, a step on a part of the job may leave the first node out (24.11 and 26.05,
    # seen after another step), and rank 0 has to be where the batch script is.
    is_part = cluster.spares or _may_shrink(cluster, recovery)
    return [f"--nodelist={NODES}"] if is_part else []


def _overlap(cluster: ClusterSpec, recovery: RecoverySpec) -> Sequence[str]:
    # A step with a dead node holds its CPUs and GPUs until Slurm gives the node up, and the next
    # one would wait for them (22.05, seen for 40 s and more).
    return ["--overlap"] if has_agents(cluster, recovery) else []


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
