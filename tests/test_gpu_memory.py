"""Told of GPUs after an attempt, as NVML tells of it (a libnvidia-ml of the tests' own)."""

import os
import subprocess
import sys
import time

import pytest
from fakes.nvml import nodes

from ftslurm.agent import gpu_memory
from ftslurm.agent.gpu_memory import GpuMemory
from ftslurm.diagnosis.gpu_memory import (
    DEVICE,
    ENDED,
    OTHERS,
    OURS,
    GpuUse,
    Told,
    has_owner,
    held,
    look_argv,
    read,
    whose,
)
from ftslurm.diagnosis.look_here import held_here
from ftslurm.health.nvml import LIBRARY, Nvml
from ftslurm.health.settings import HealthSettings
from ftslurm.run.spec import ClusterSpec, RunSpec

GIB = 1 << 30
BUS = "0000:1b:00"
PIDS = {1: OURS, 2: OTHERS, 3: ENDED}


@pytest.fixture
def node(tmp_path, monkeypatch):
    monkeypatch.setenv(nodes.STATE_VARIABLE, str(tmp_path / "state"))
    return nodes.Node(tmp_path / "state", gpus=2).set("*", "memory", 0)


@pytest.mark.parametrize(
    ("used", "processes", "per_node", "told"),
    [
        (0, {}, 1, ""),
        (GIB, {1: GIB}, 1, ""),
        (70 * GIB, {1: 70 * GIB}, 1, "70.0 GiB are taken by process 1 (lives)"),
        (70 * GIB, {1: 30 * GIB, 3: 40 * GIB}, 1, "by processes 1 (lives), 3 (has ended)"),
        (70 * GIB, {1: None}, 1, "70.0 GiB are taken by process 1 (lives)"),
        (70 * GIB, {}, 1, "70.0 GiB are taken by no process that is there"),
        # Another's GPU may be among those that are seen: only what is ours counts.
        (70 * GIB, {}, 0, ""),
        (70 * GIB, {3: 70 * GIB}, 0, ""),
        (70 * GIB, {1: 60 * GIB, 3: 10 * GIB}, 0, "60.0 GiB are taken by process 1 (lives)"),
        (70 * GIB, {2: 70 * GIB}, 1, ""),
        (70 * GIB, {2: None}, 1, ""),
        (70 * GIB, {2: 60 * GIB}, 1, "10.0 GiB are taken by no process that is there"),
        (None, {}, 1, ""),
        (None, {1: 70 * GIB}, 1, "process 1 (lives)"),
    ],
)
def test_what_is_held_against_a_gpu(used, processes, per_node, told):
    found = held([GpuUse(BUS, used, processes)], PIDS.get, per_node=per_node)
    assert (told in found[BUS]) if told else not found
    assert not found or has_owner(found[BUS]) == ("no process" not in told)


def test_a_process_is_of_the_jobs_steps_or_anothers_or_has_ended():
    in_step = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3"}
    cases = [
        ({**in_step, "FTSLURM_ATTEMPT": "1"}, OURS),
        (in_step, OTHERS),  # a person's, `srun --overlap --jobid=77`
        ({"SLURM_JOB_ID": "77", "FTSLURM_ATTEMPT": "1"}, OTHERS),  # the batch script's
        ({**in_step, "SLURM_JOB_ID": "778", "FTSLURM_ATTEMPT": "1"}, OTHERS),
    ]
    for environ, word in cases:
        with subprocess.Popen(["/bin/sleep", "60"], env=environ) as process:
            deadline = time.monotonic() + 60
            while whose(process.pid, "77") != word and time.monotonic() < deadline:
                time.sleep(0.01)  # /proc shows the environment after the exec
            assert whose(process.pid, "77") == word
            process.kill()
        assert whose(process.pid, "77") == ENDED
    zombie = subprocess.Popen(["/bin/true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert whose(zombie.pid, "77") == ENDED
    zombie.wait()
    assert whose(1, "77") == OTHERS


def test_processes_and_memory_are_read_by_old_and_new_drivers(library, node, tmp_path):
    node.set(0, "memory", 3 * GIB).set(0, "processes", f"12:{2 * GIB},13:-1")
    node.set(1, "mig", 1)
    (tmp_path / "old").mkdir()
    for path, used in (
        (library, 3 * GIB),
        (str(nodes.build(tmp_path / "old", "-DOLD_DRIVER")), None),
    ):
        nvml = Nvml(path)
        nvml.start()
        first, cut = read(nvml)
        assert first == GpuUse(BUS, used, {12: 2 * GIB, 13: None})
        assert cut.used_bytes is None, "slices of others may have it"


def test_memory_that_is_a_numa_node_of_the_kernels_is_not_judged(library, node, tmp_path):
    node.set("*", "memory", 70 * GIB).set("*", "processes", f"{2**22 + 1}:{70 * GIB}")
    for number, cpus in (("0", "0-71\n"), ("4", "\n")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cpus)
    node.set(0, "numa", 0).set(1, "numa", 4)
    nvml = Nvml(library)
    nvml.start()
    by_a_socket, of_its_own = read(nvml, numa=tmp_path)
    assert by_a_socket.used_bytes == 70 * GIB and len(by_a_socket.processes) == 1
    assert of_its_own == GpuUse("0000:2b:00")
    node.set(0, "numa", 7)
    assert read(nvml, numa=tmp_path)[0].used_bytes is None, "of a node that is not known"


def test_a_driver_that_hangs_or_knows_nothing_is_held_against_nobody(
    library, node, monkeypatch, capfd
):
    gpus = GpuMemory("77", 2, library)
    node.set("*", "code:nvmlDeviceGetMemoryInfo_v2", 999)
    assert gpus.look() == Told()
    monkeypatch.setattr(gpu_memory, "DEADLINE_S", 1.0)
    node.set(1, "stuck:nvmlDeviceGetMemoryInfo_v2", 1)
    assert gpus.look() == Told()
    assert "GPU memory is back is not known: 'no end within 1 s'" in capfd.readouterr().err


@pytest.mark.skipif(DEVICE.exists(), reason="this machine has a driver")
def test_without_a_driver_no_time_is_lost():
    assert not look_argv("77", 8, LIBRARY)
    assert GpuMemory("77", 8).look() == Told()


def test_the_look_needs_the_standard_library_alone():
    argv = [sys.executable, "-S", "-m", "ftslurm.diagnosis.gpu_memory", "--job=1", "--gpus=1"]
    done = subprocess.run(
        [*argv, "--library=libnvidia-ml-is-not-here.so.1"], capture_output=True, text=True,
        timeout=100, check=True, cwd=nodes.HERE.parents[2],
    )  # fmt: skip
    assert done.stdout == '{"gpus": 0, "held": {}}\n'


def test_gpus_that_are_not_shown_to_the_agents_step_are_told_of(library, node):
    assert not GpuMemory("77", 2, library).look().is_unseen
    node.set("*", "gpus", 0)
    assert GpuMemory("77", 2, library).look() == Told({}, is_unseen=True)


def test_a_nodes_look_at_itself_tells_too(library, node):
    spec = RunSpec(
        cluster=ClusterSpec(gpus_per_node=2), health=HealthSettings(nvml_library=library)
    )
    assert held_here(spec, {"SLURM_JOB_ID": "77"}) == {}
    node.set(1, "memory", 70 * GIB)
    (told,) = held_here(spec, {"SLURM_JOB_ID": "77"}).items()
    assert told == ("0000:2b:00", "70.0 GiB are taken by no process that is there")
