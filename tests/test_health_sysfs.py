"""PCI, RDMA and processes out of a root folder of our own."""

import os
import random
from pathlib import Path

import pytest

from ftslurm.health import signals as s
from ftslurm.health import sysfs

AER = "RxErr 1\nBadTLP 2\nTOTAL_ERR_{} {}\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in range(8):
        pci(tmp_path, f"0000:{0x1B + 0x10 * number:02x}:00.0", driver="nvidia")
    pci(tmp_path, "0000:05:00.0", vendor="0x15b3", kind="0x020700", driver="mlx5_core")
    pci(tmp_path, "0000:c1:00.0", kind="0x068000")  # an NVSwitch
    for number in range(4):
        port(tmp_path, f"mlx5_{number}")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def pci(
    root: Path, bus: str, *, vendor: str = "0x10de", kind: str = "0x030200", driver: str = ""
) -> Path:
    folder = root / "sys/bus/pci/devices" / bus
    write(folder / "vendor", vendor)
    write(folder / "class", kind)
    write(folder / "revision", "0xa1")
    (folder / "config").write_bytes(b"\xde\x10" + bytes(62))
    write(folder / "aer_dev_fatal", AER.format("FATAL", 0))
    write(folder / "aer_dev_nonfatal", AER.format("NONFATAL", 0))
    write(folder / "aer_dev_correctable", AER.format("COR", 3))
    if driver:
        (folder / "driver").symlink_to(f"../../drivers/{driver}")
    return folder


def port(root: Path, device: str, number: int = 1, *, state: str = "4: ACTIVE") -> Path:
    folder = root / "sys/class/infiniband" / device / "ports" / str(number)
    write(folder / "state", state)
    write(folder / "phys_state", "5: LinkUp" if "ACTIVE" in state else "3: Disabled")
    write(folder / "rate", "400 Gb/sec (4X NDR)")
    write(folder / "link_layer", "InfiniBand")
    for name in ("symbol_error", "link_downed", "port_rcv_errors"):
        write(folder / "counters" / name, "14" if name == "port_rcv_errors" else "0")
    write(folder / "hw_counters/rnr_nak_retry_err", "0")
    return folder


def process(
    root: Path, pid: int, *, device: str = "/dev/nvidia3", job: str = "", uid: int = 1000
) -> None:
    folder = root / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "fd/0").symlink_to("/dev/null")
    (folder / "fd/7").symlink_to(device)
    write(folder / "comm", f"python{pid}")
    write(folder / "status", f"Name:\tpython\nUid:\t{uid}\t{uid}\t{uid}\t{uid}")
    scope = f"/system.slice/slurmstepd.scope/job_{job}/step_0/user/task_0" if job else "/user.slice"
    write(folder / "cgroup", f"0::{scope}")


def of(parts: sysfs.Parts, kind: str) -> list[s.Value]:
    return [signal.value for signal in parts.signals if signal.kind == kind]


def test_a_healthy_node_is_read(root: Path) -> None:
    parts = sysfs.read_sysfs(deadline_s=60, root=root)
    assert not parts.failures
    assert of(parts, s.GPU_COUNT_PCI) == [8]
    assert of(parts, s.GPU_LOST) == []
    assert of(parts, s.AER_FATAL) == [0] * 8 and of(parts, s.AER_CORRECTABLE) == [3] * 8
    assert of(parts, s.RDMA_STATE) == ["ACTIVE"] * 4
    assert of(parts, s.RDMA_PHYS_STATE) == ["LinkUp"] * 4
    assert of(parts, s.RDMA_RATE) == [400.0] * 4
    counters = {x.where: x.value for x in parts.signals if x.kind == s.RDMA_COUNTER}
    assert counters["mlx5_2/1/port_rcv_errors"] == 14
    assert counters["mlx5_2/1/rnr_nak_retry_err"] == 0
    assert len(counters) == 16
    assert {signal.kind for signal in parts.signals} <= s.KINDS


def test_a_node_without_gpus_or_rdma_has_none(tmp_path: Path) -> None:
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    parts = sysfs.read_sysfs(deadline_s=60, root=tmp_path)
    assert [(x.kind, x.value) for x in parts.signals] == [(s.GPU_COUNT_PCI, 0)]
    assert not parts.failures


def test_pci_that_cannot_be_listed_is_a_failure_and_not_a_count(tmp_path: Path) -> None:
    parts = sysfs.read_sysfs(deadline_s=60, root=tmp_path)
    assert not parts.signals and len(parts.failures) == 1


def test_a_function_that_reads_all_ones_is_lost_and_still_counts(root: Path) -> None:
    config = root / "sys/bus/pci/devices/0000:2b:00.0/config"
    config.write_bytes(b"\xff" * 64)
    parts = sysfs.read_sysfs(deadline_s=60, root=root)
    (lost,) = [signal for signal in parts.signals if signal.kind == s.GPU_LOST]
    assert lost.gpu == s.Gpu(None, "", "0000:2b:00")
    assert of(parts, s.GPU_COUNT_PCI) == [8]
    config.write_bytes(b"")  # unreadable is not lost
    assert of(sysfs.read_sysfs(deadline_s=60, root=root), s.GPU_LOST) == []


def test_functions_that_the_driver_does_not_show_do_not_count(root: Path) -> None:
    pci(root, "0000:e1:00.0", driver="vfio-pci")
    virtual = pci(root, "0000:e2:00.4", driver="nvidia")
    (virtual / "physfn").symlink_to("../0000:1b:00.0")
    pci(root, "0000:e3:00.1", kind="0x040300", driver="snd_hda_intel")
    assert of(sysfs.read_sysfs(deadline_s=60, root=root), s.GPU_COUNT_PCI) == [8]


def test_a_gpu_without_a_driver_counts(root: Path) -> None:
    (root / "sys/bus/pci/devices/0000:3b:00.0/driver").unlink()
    assert of(sysfs.read_sysfs(deadline_s=60, root=root), s.GPU_COUNT_PCI) == [8]


def test_counters_of_a_port_that_is_down_are_not_read(root: Path) -> None:
    folder = port(root, "mlx5_9", state="1: DOWN")
    (folder / "counters/link_downed").unlink()
    (folder / "counters/link_downed").mkdir()  # reading it would be an error
    parts = sysfs.read_sysfs(deadline_s=60, root=root)
    told = [(x.kind, x.value) for x in parts.signals if x.where.startswith("mlx5_9/")]
    assert told == [(s.RDMA_STATE, "DOWN"), (s.RDMA_PHYS_STATE, "Disabled")]


def test_a_counter_at_its_end_says_so(root: Path) -> None:
    write(root / "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed", "255")
    parts = sysfs.read_sysfs(deadline_s=60, root=root)
    (full,) = [signal for signal in parts.signals if signal.where == "mlx5_0/1/link_downed"]
    assert full.value == 255


def test_a_port_that_hangs_costs_the_deadline_and_keeps_the_rest(root: Path) -> None:
    os.mkfifo(root / "sys/class/infiniband/mlx5_1/ports/1/counters/local_link_integrity_errors")
    parts = sysfs.read_sysfs(deadline_s=10, root=root)
    assert [failure.source for failure in parts.failures] == ["sysfs"]
    assert "mlx5_1/1" in parts.failures[0].text
    assert of(parts, s.GPU_COUNT_PCI) == [8] and len(of(parts, s.RDMA_STATE)) == 2
    assert of(parts, s.DRIVER_HANG) == []


def test_leftovers_are_those_of_the_job_and_of_nobody_else(root: Path) -> None:
    write(root / "proc/driver/nvidia/gpus/0000:4b:00.0/information", "Model: x\nDevice Minor: \t 3")
    process(root, 101, job="77")
    process(root, 102, job="78")  # another job on the node
    process(root, 103, uid=0)  # a daemon
    process(root, 104)  # escaped its cgroup, the job's user
    process(root, 105, uid=1001)
    process(root, 106, job="77", device="/dev/nvidiactl")
    process(root, 107, job="777")
    parts = sysfs.read_sysfs(deadline_s=60, root=root, job="77", uid=1000)
    left = [signal for signal in parts.signals if signal.kind == s.LEFTOVER_PROCESS]
    assert [(x.value, x.text) for x in left] == [(101, "python101"), (104, "python104")]
    assert left[0].gpu == s.Gpu(None, "", "0000:4b:00")
    as_root = sysfs.read_sysfs(deadline_s=60, root=root, job="77", uid=0)
    assert of(as_root, s.LEFTOVER_PROCESS) == [101], "a daemon is not a job of root"
    assert of(sysfs.read_sysfs(deadline_s=60, root=root), s.LEFTOVER_PROCESS) == []


def test_the_fabric_manager_is_missed_only_where_there_are_switches(root: Path) -> None:
    assert of(sysfs.read_sysfs(deadline_s=60, root=root), s.FABRIC_MANAGER) == []
    write(root / "proc/1/comm", "systemd")
    assert of(sysfs.read_sysfs(deadline_s=60, root=root), s.FABRIC_MANAGER) == ["no process"]
    write(root / "proc/900/comm", "nv-fabricmanage")
    assert of(sysfs.read_sysfs(deadline_s=60, root=root), s.FABRIC_MANAGER) == ["active"]
    write(root / "sys/bus/pci/devices/0000:c1:00.0/vendor", "0x8086")
    assert of(sysfs.read_sysfs(deadline_s=60, root=root), s.FABRIC_MANAGER) == []


def test_the_boot_is_named(tmp_path: Path) -> None:
    assert sysfs.read_boot_id(tmp_path) == ""
    write(tmp_path / "proc/sys/kernel/random/boot_id", "8f2c-ab12")
    assert sysfs.read_boot_id(tmp_path) == "8f2c-ab12"
    assert sysfs.read_boot_id(), "this machine has one"
    assert sysfs.gres_signal(8) == s.Signal(s.GPU_COUNT_GRES, 8)


def test_the_real_files_of_a_machine_raise_nothing() -> None:
    parts = sysfs.read_sysfs(deadline_s=60, job="1", uid=1)
    assert not [failure for failure in parts.failures if "ended" in failure.text]


def test_garbage_in_any_file_raises_nothing_and_invents_no_signal(root: Path) -> None:
    rng = random.Random(7)
    process(root, 101, job="77")
    healthy = {(x.kind, x.value, x.where) for x in looked(root)}
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name != "config")
    for path in rng.sample(files, 60):
        kept = path.read_bytes()
        for garbage in (b"", b"\xff\x00\n", rng.randbytes(40), b"-1\n", b"9" * 5000):
            path.write_bytes(garbage)
            new = [x for x in looked(root) if (x.kind, x.value, x.where) not in healthy]
            # A spoiled `vendor` or `class` hides a function, which is told as it is seen.
            assert {x.kind for x in new} <= {s.GPU_COUNT_PCI, s.LEFTOVER_PROCESS}, path
        path.write_bytes(kept)


def looked(root: Path) -> list[s.Signal]:
    found = list(sysfs.pci_signals(root)) + list(sysfs.leftover_signals(root, job="77", uid=1000))
    for folder in sysfs.rdma_ports(root):
        found += sysfs.port_signals(folder)
    return found
