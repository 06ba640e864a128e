"""What submit refuses because this place cannot carry the run, and what it lets pass."""

import os
import subprocess

import pytest

from ftslurm.errors import RunError, SpecError, UsageError
from ftslurm.files import write_json
from ftslurm.run.attempts import append_event
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import RunSpec, to_dict
from ftslurm.submit.refuse import (
    SaveCost,
    Storage,
    refuse_inside_job,
    refuse_signal_clash,
    refuse_slow_save,
    refuse_storage,
    refuse_taken,
    save_cost,
    storage_of,
)


@pytest.fixture
def spec():
    return RunSpec()


def test_a_submission_from_inside_a_job_is_refused_with_the_way_out(spec):
    with pytest.raises(UsageError, match=r"inside job 4711 .* env -u SLURM_JOB_ID"):
        refuse_inside_job(spec, {"SLURM_JOB_ID": "4711"})
    refuse_inside_job(spec, {"SLURM_CONF": "/etc/slurm/slurm.conf"})


def test_a_local_run_may_start_inside_a_job(spec):
    spec.cluster.scheduler = "local"
    refuse_inside_job(spec, {"SLURM_JOB_ID": "4711"})


@pytest.mark.parametrize("number", ["10", "12", "15"])
def test_a_stop_signal_that_nccl_takes_is_refused(spec, number):
    with pytest.raises(SpecError, match="asks the ranks to stop"):
        refuse_signal_clash(spec, {"NCCL_PROXY_DUMP_SIGNAL": number})
    refuse_signal_clash(spec, {"NCCL_PROXY_DUMP_SIGNAL": "3"})
    refuse_signal_clash(spec, {})


def test_clusters_own_setting_of_the_signal_beats_the_shells(spec):
    spec.cluster.env = {"NCCL_PROXY_DUMP_SIGNAL": "3"}
    refuse_signal_clash(spec, {"NCCL_PROXY_DUMP_SIGNAL": "10"})


def test_a_run_directory_that_is_there_is_refused(tmp_path):
    refuse_taken(RunLayout(tmp_path / "run-1"))
    (tmp_path / "run-1").mkdir()
    with pytest.raises(RunError, match="two runs cannot share a directory"):
        refuse_taken(RunLayout(tmp_path / "run-1"))


def test_checkpoints_in_memory_are_refused_for_slurm(spec, tmp_path):
    with pytest.raises(SpecError, match="no checkpoint would outlive a node"):
        refuse_storage(spec, Storage("/dev/shm", "tmpfs"), tmp_path)
    spec.cluster.scheduler = "local"
    assert refuse_storage(spec, Storage("/dev/shm", "tmpfs"), tmp_path) is None


def test_a_disk_of_the_submitting_host_is_warned_of_and_a_parallel_file_system_is_not(
    spec, tmp_path
):
    warning = refuse_storage(spec, Storage("/scratch", "xfs"), tmp_path)
    assert warning is not None and "only where the host exports it" in warning
    assert refuse_storage(spec, Storage("/lustre", "lustre"), tmp_path) is None


def test_the_mount_of_a_path_is_the_innermost_and_the_last_one_on_it(tmp_path):
    inner = tmp_path / "with space" / "runs"
    inner.mkdir(parents=True)
    point = str(inner.parent).replace(" ", "\\040")
    table = tmp_path / "mountinfo"
    table.write_text(
        f"20 1 0:1 / / rw - ext4 /dev/a rw\n"
        f"21 20 0:2 / {tmp_path} rw shared:1 master:2 - xfs /dev/b rw\n"
        f"22 20 0:3 / {point} rw - nfs4 host:/a rw\n"
        f"23 20 0:4 / {point} rw - lustre host:/b rw\n"
    )
    assert storage_of(inner / "not" / "there", table) == Storage(str(inner.parent), "lustre")
    assert storage_of(tmp_path, table).kind == "xfs"


def test_the_mount_of_a_path_here_is_what_findmnt_says(tmp_path):
    asked = ["findmnt", "--noheadings", "--output", "FSTYPE", "--target", str(tmp_path)]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    assert storage_of(tmp_path).kind == said.splitlines()[-1]


def test_a_save_that_cannot_fit_is_refused_with_both_figures_and_the_ways_out():
    cost = SaveCost(120 << 30, 95.0, "as measured in run a-1")
    with pytest.raises(SpecError, match=r"some 95 s \(120.0 GiB, as measured.*leaves 40 s"):
        refuse_slow_save(cost, 40.0)
    refuse_slow_save(cost, 95.0)
    refuse_slow_save(None, 1.0)
    refuse_slow_save(cost, None)


def earlier_run(folder, name, spec, *saves, attempt=1):
    layout = RunLayout(folder / name)
    layout.attempt(attempt).root.mkdir(parents=True)
    record = {"schema_version": 1, "run_id": name, "scheduler": "slurm", "spec": to_dict(spec)}
    write_json(layout.run_json, record)
    for seconds, size_bytes in saves:
        append_event(
            layout.attempt(attempt), "committed", step=1, seconds=seconds, bytes=size_bytes
        )


def test_an_earlier_run_of_the_same_kind_tells_what_a_save_takes(tmp_path, spec):
    spec.entry = "mine:train"
    earlier_run(tmp_path, "a-1", spec, (3.0, 100), (7.5, 100), (2.0, 100))
    assert save_cost(spec, tmp_path) == SaveCost(100, 7.5, "as measured in run a-1")
    spec.cluster.nodes = 2
    assert save_cost(spec, tmp_path) is None


def test_an_earlier_run_that_cannot_be_read_is_passed_over(tmp_path, spec):
    spec.entry = "mine:train"
    earlier_run(tmp_path, "a-1", spec, (3.0, 100))
    broken = tmp_path / "b-2"
    broken.mkdir()
    (broken / "run.json").write_text("{")
    os.utime(broken / "run.json", (2e9, 2e9))
    assert save_cost(spec, tmp_path) == SaveCost(100, 3.0, "as measured in run a-1")


def test_the_reference_model_is_computed_and_the_speed_is_that_of_a_test_write(tmp_path, spec):
    spec.model.layers, spec.model.width = 24, 1024
    cost = save_cost(spec, tmp_path / "runs")
    parameters = 24 * 12 * 1024**2
    assert cost.size_bytes == pytest.approx(12 * parameters, rel=0.01)
    assert cost.seconds > 0 and "test write" in cost.source
    assert list(tmp_path.iterdir()) == []


def test_of_a_loop_of_ones_own_nothing_is_known(tmp_path, spec):
    spec.entry = "mine:train"
    assert save_cost(spec, tmp_path) is None
