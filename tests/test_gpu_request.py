"""Which options of sbatch and srun ask for GPUs."""

import pytest

from ftslurm.run.gpu_request import asks_for_gpus, has_gpus
from ftslurm.run.spec import ClusterSpec

ASK = [
    "--gres=gpu", "--gres=gpu:2", "--gres=gpu:h100:4", "--gres=gres:gpu:2", "--gres=gres/gpu:2",
    "--gres=lustre:1,gpu:a100:10", "--gpus=4", "--gpus=h100:4", "--gpus-per-node=1",
    "--gpus-per-socket=1", "--gpus-per-task=1", "--tres-per-task=gres/gpu:1",
    "--tres-per-task=cpu=4,gres/gpu=1",
]  # fmt: skip
ASK_NOT = [
    "--gres=lustre:1", "--gres=none", "--gres=gpu:0", "--gres=gpu:h100:0", "--gres=gpufs:1",
    "--gres=shard:1", "--gres-flags=enforce-binding", "--gpus=0", "--gpu-freq=high",
    "--gpu-bind=closest", "--tres-per-task=cpu:4", "--tres-bind=gres/gpu:closest", "--exclusive",
    "--comment=--gres=gpu:2", "--constraint=gpu",
]  # fmt: skip


@pytest.mark.parametrize("option", ASK)
def test_an_option_that_names_gpus_asks_for_them(option):
    assert asks_for_gpus(option)
    assert has_gpus(ClusterSpec(sbatch=["--exclusive", option]))
    assert has_gpus(ClusterSpec(srun=[option]))


@pytest.mark.parametrize("option", ASK_NOT)
def test_an_option_that_names_something_else_does_not(option):
    assert not asks_for_gpus(option)
    assert not has_gpus(ClusterSpec(sbatch=[option], srun=[option]))


def test_the_keys_of_cluster_ask_too():
    assert has_gpus(ClusterSpec(gpus_per_node=1))
    assert has_gpus(ClusterSpec(gpus_per_task=1))
