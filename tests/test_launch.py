"""The argv that starts ranks, and one process a node, under Slurm and on this machine."""

from pathlib import Path

import pytest

from ftslurm.run.spec import ClusterSpec, RecoverySpec
from ftslurm.scheduler.launch import (
    COUNT,
    LOGS,
    NODES,
    RANKS,
    agents_argv,
    looks_argv,
    nodes_argv,
    ranks_argv,
)

RUN = Path("/runs/r")


ALONE = RecoverySpec(agents=False)


def ranks(recovery=ALONE, **values):
    return ranks_argv(ClusterSpec(**values), recovery, python="/x/python", run_dir=RUN)


def test_a_look_at_nodes_takes_nothing_from_the_ranks_and_sees_the_jobs_gpus():
    cluster = ClusterSpec(nodes=4, spares=1, gpus_per_node=8)
    argv = looks_argv(cluster, ["n1", "n3"])
    assert argv[0] == "srun" and {"--nodelist=n1,n3", "--nodes=2", "--ntasks=2"} <= set(argv)
    assert {"--overlap", "--mem=0", "--no-kill", "--cpu-bind=none"} <= set(argv)
    assert not any(word.startswith(("--gres", "--gpu")) for word in argv)
    assert looks_argv(ClusterSpec(scheduler="local"), ["here"]) == []


def test_ranks_are_launched_with_every_default_of_site_and_user_overridden():
    argv = ranks(nodes=2, tasks_per_node=4, cpus_per_task=3)
    assert argv[0] == "srun"
    for option in ("--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=3",
                   "--export=ALL", "--kill-on-bad-exit=1", "--wait=0",
                   f"--output={LOGS}/rank-%t.log"):  # fmt: skip
        assert option in argv
    assert "--no-kill" not in argv
    assert all(option.startswith("--") for option in argv[1:])


def test_no_rank_runs_on_a_spare():
    assert {"--nodes=2", "--ntasks=4"} <= set(ranks(nodes=2, spares=3, tasks_per_node=2))
    assert {"--nodes=2", "--ntasks=2"} <= set(nodes_argv(ClusterSpec(nodes=2, spares=3), ALONE))


def test_ranks_beside_agents_overlap_what_a_dead_node_holds_and_are_as_many_as_the_claim_says():
    argv = ranks(RecoverySpec(), nodes=2, tasks_per_node=4)
    for option in ("--overlap", f"--nodes={COUNT}", f"--ntasks={RANKS}", f"--nodelist={NODES}"):
        assert option in argv
    # It would disable --kill-on-bad-exit.
    assert "--no-kill" not in argv
    once_a_node = nodes_argv(ClusterSpec(nodes=2), RecoverySpec())
    assert {"--overlap", f"--nodes={COUNT}", f"--ntasks={COUNT}"} <= set(once_a_node)


def test_a_run_that_may_shrink_takes_its_size_from_the_claim_without_agents_too():
    argv = ranks(RecoverySpec(agents=False, min_nodes=1), nodes=2)
    assert {f"--nodes={COUNT}", f"--nodelist={NODES}"} <= set(argv) and "--overlap" not in argv


def test_an_agent_runs_on_every_node_and_takes_nothing():
    argv = agents_argv(ClusterSpec(nodes=2, spares=1, gpus_per_node=4), RecoverySpec())
    for option in ("--nodes=3", "--ntasks=3", "--overlap", "--no-kill", "--kill-on-bad-exit=0",
                   "--wait=0", "--gres=none", "--mem=0", "--cpu-bind=none"):  # fmt: skip
        assert option in argv
    assert agents_argv(ClusterSpec(), ALONE) == []
    assert agents_argv(ClusterSpec(scheduler="local"), RecoverySpec()) == []


@pytest.mark.parametrize(("cluster", "recovery", "is_task", "first"), [
    ({}, {}, True, ["--after", "10", "env"]),
    ({}, {}, False, ["env"]),
    ({"nodes": 2}, {}, True, ["env"]),
    ({"spares": 1}, {}, True, ["env"]),
    ({"gpus_per_task": 1}, {}, True, ["env"]),
    ({"sbatch": ["--gres=gpu:1"]}, {}, True, ["env"]),
    ({}, {"metrics_dir": "/var/lib/metrics"}, True, ["env"]),
    ({}, {"agents": False}, True, []),
])  # fmt: skip
def test_only_a_small_task_of_a_sweep_begins_without_agents(cluster, recovery, is_task, first):
    asked = ClusterSpec(**{"nodes": 1, **cluster}), RecoverySpec(**recovery)
    assert agents_argv(*asked, is_task=is_task)[: len(first) or None] == first


@pytest.mark.parametrize(
    ("key", "value", "option"),
    [
        ("gpus_per_task", 1, "--gpus-per-task=1"),
        ("gpu_bind", "closest", "--gpu-bind=closest"),
        ("cpu_bind", "map_cpu:0,1*2", "--cpu-bind=map_cpu:0,1*2"),
        ("mpi", "pmix", "--mpi=pmix"),
        ("export", "ALL,A=b c", "--export=ALL,A=b c"),
        ("wait_s", 30, "--wait=30"),
        ("srun", ["--mem-bind=local"], "--mem-bind=local"),
    ],
)
def test_a_key_of_the_launch_is_one_option_of_srun(key, value, option):
    assert option in ranks(**{key: value})
    default = ranks()
    assert option not in default and len(set(ranks(**{key: value})) - set(default)) == 1


def test_pyxis_gets_the_run_directory_at_its_own_place_and_the_mounts_of_the_user():
    argv = ranks(container_image="docker://nvcr.io#nvidia/pytorch:24.10-py3", mounts=["/d:/d:ro"])
    assert "--container-image=docker://nvcr.io#nvidia/pytorch:24.10-py3" in argv
    assert "--container-mounts=/runs/r:/runs/r,/d:/d:ro" in argv
    assert "--container-workdir=/runs/r/code" in argv


def test_pyxis_gets_live_code_at_its_own_place_and_starts_the_ranks_in_it():
    cluster = ClusterSpec(container_image="image", mounts=["/d:/d"])
    code = [Path("/home/me/repo"), Path("/opt/ftslurm")]
    argv = ranks_argv(
        cluster, ALONE, python="p", run_dir=RUN, workdir=Path("/home/me/repo/exp"), code=code
    )
    mounts = "/home/me/repo:/home/me/repo,/opt/ftslurm:/opt/ftslurm,/runs/r:/runs/r,/d:/d"
    assert f"--container-mounts={mounts}" in argv
    assert "--container-workdir=/home/me/repo/exp" in argv


def test_the_process_of_each_node_is_started_through_the_plugin_that_ranks_are():
    assert "--mpi=none" in nodes_argv(ClusterSpec(mpi="none"), ALONE)
    assert not [option for option in nodes_argv(ClusterSpec(), ALONE) if "mpi" in option]


def test_an_argv_of_this_machine_names_the_log_folder_once_and_ends_before_the_rank_command():
    argv = ranks(scheduler="local", tasks_per_node=2)
    assert argv[:3] == ["/x/python", "-m", "ftslurm.scheduler.local_ranks"]
    assert "--ntasks=2" in argv
    assert [item for item in argv if LOGS in item] == [f"--output={LOGS}/rank-%t.log"]
    assert argv[-1] == "--"
    assert nodes_argv(ClusterSpec(scheduler="local"), ALONE) == []
