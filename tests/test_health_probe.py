"""One look at a node as a whole: what is asked, when it ends, and one at a time."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from fakes.nvml.nodes import STATE_VARIABLE
from health_probes import (
    BUSES,
    ECC,
    XID_95,
    ProbedNode,
    found,
    hard,
    late,
    values,
)

from ftslurm.health import child, nvidia_smi, nvml_read, sources
from ftslurm.health import signals as s
from ftslurm.health.memory import Memory
from ftslurm.health.probe import MEMORY, Probe

CONTEXTS = ("prolog", "epilog", "periodic", "probe")
SMI = Path(__file__).resolve().parent / "fakes" / "nvml" / "nvidia-smi"
SMI_DATA = Path(__file__).resolve().parent / "data" / "health" / "smi"


@pytest.fixture
def node(tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> ProbedNode:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "gpus"))
    return ProbedNode(tmp_path, library)


# A healthy node.


@pytest.mark.parametrize("model", ["H100", "H200", "A100", "B200", "V100"])
def test_a_healthy_node_is_found_healthy_from_the_first_look_on(
    tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    node = ProbedNode(tmp_path / "eight", library, model, gpus=8)
    monkeypatch.setenv(STATE_VARIABLE, str(node.gpus.path))
    node.port("mlx5_0")
    for context in (*CONTEXTS, "epilog"):
        probe = node.look(context)
        assert (found(probe), probe.notes, probe.is_stored) == ([], (), False)
        assert len(probe.reading.gpus) == 8 and not probe.reading.failures
    assert node.slept == [], "a second look needs a reason"


def test_an_epilog_of_eight_healthy_gpus_takes_less_than_a_second(
    tmp_path: Path,
    library: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    node = ProbedNode(tmp_path, library, gpus=8)
    monkeypatch.setenv(STATE_VARIABLE, str(node.gpus.path))
    walls, began = [], os.times()
    for job in map(str, range(3)):
        node.look("prolog", job)
        walls.append(node.look("epilog", job).wall_s)
    cpu_s = sum(os.times()[:4]) - sum(began[:4])
    load = os.getloadavg()[0]
    with capsys.disabled():
        told = ", ".join(f"{one:.2f}" for one in walls)
        print(f"\nepilog, 8 healthy GPUs: {told} s at load {load:.0f}, {cpu_s / 6:.2f} s of CPU")
    assert cpu_s / 6 < 0.5
    if load <= (os.cpu_count() or 1):  # else it is the others' time that is measured
        assert min(walls) < 1.0


# A driver that hangs.


def hanging(node: ProbedNode, context: str) -> Probe:
    assert hard(node.look("periodic")) == [], "its driver is kept up"
    node.is_hasty = True
    node.gpus.set(1, "hang:nvmlDeviceGetEccMode", 1)
    began = time.monotonic()
    probe = node.look(context, sleep=time.sleep)
    budget_s = getattr(node.settings, f"{context}_s", 10.0)
    # By its own clock it ends in time; this machine may stand still for some seconds.
    assert time.monotonic() - began < budget_s + 10, f"{context} has {budget_s} s"
    assert any("nvmlDeviceGetEccMode of GPU 1" in one.text for one in probe.reading.failures)
    assert len(probe.reading.gpus) == 2, "what was read before the hang is kept"
    return probe


@pytest.mark.parametrize("context", ["prolog", "probe"])
def test_a_look_of_seconds_ends_in_time_and_calls_no_driver_dead(
    node: ProbedNode, context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than the site's few seconds: a busy machine needs some to read the GPU before.
    monkeypatch.setattr(sources, "_NVML_SHORT_S", 8.0)
    monkeypatch.setattr(sources, "_NVML_SHARE", 0.8)
    node.settings.prolog_s = 15.0
    assert hard(hanging(node, context)) == []


@pytest.mark.parametrize("context", ["epilog", "periodic"])
def test_other_looks_at_a_hanging_driver_end_in_time_too(node: ProbedNode, context: str) -> None:
    # Less time, and all else in proportion to it; the next test has it whole.
    node.settings.epilog_s, node.settings.periodic_s = 24.0, 24.0
    probe = hanging(node, context)
    assert hard(probe) == (["DRV-HANG"] if context == "epilog" else [])


@pytest.mark.full
@pytest.mark.parametrize("context", ["epilog", "periodic"])
def test_looks_at_a_hanging_driver_end_within_30_and_45_seconds(
    node: ProbedNode, context: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (node.settings.epilog_s, node.settings.periodic_s) == (30.0, 45.0)
    probe = hanging(node, context)
    with capsys.disabled():
        print(f"\n{context}, hanging driver: {probe.wall_s:.1f} s")
    assert probe.wall_s < getattr(node.settings, f"{context}_s")
    assert hard(probe) == (["DRV-HANG"] if context == "epilog" else [])


def test_prologs_alone_never_drain_a_slow_driver_and_behind_an_epilog_one_does(
    node: ProbedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.look("periodic")
    monkeypatch.setattr(nvml_read, "read_nvml", late)
    for job in map(str, range(6)):
        probe = node.look("prolog", job)
        assert found(probe) == [("unknown", "UNREAD")]
    assert found(node.look("periodic"))[0] == ("unknown", "DRV-HANG")
    assert hard(node.look("prolog")) == ["DRV-HANG"]


def test_a_driver_that_hangs_twice_in_an_epilog_drains_and_once_does_not(
    node: ProbedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = nvml_read.read_nvml
    monkeypatch.setattr(nvml_read, "read_nvml", late)

    def mend(seconds: float) -> None:
        node.sleep(seconds)
        monkeypatch.setattr(nvml_read, "read_nvml", real)

    assert hard(node.look("epilog", sleep=mend)) == []
    monkeypatch.setattr(nvml_read, "read_nvml", late)
    assert hard(node.look("epilog")) == ["DRV-HANG"]
    assert node.slept == [3.0, 3.0]


def test_a_look_that_cannot_be_killed_is_not_repeated_while_it_is_there(
    node: ProbedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.look("prolog")
    node.gpus.set("*", "stuck:nvmlInit_v2", 1)
    with monkeypatch.context() as unkillable:
        unkillable.setattr(child, "_signal_group", lambda _pid, _number: None)
        unkillable.setattr(sources, "_NVML_S", 0.5)
        assert hard(node.look("periodic")) == []
    with node.state() as state:
        pid, ticks = (state.read_json(MEMORY) or {})["abandoned"]["driver"]
    try:
        assert child.is_running(pid, ticks)
        with monkeypatch.context() as unasked:
            unasked.setattr(nvml_read, "read_nvml", lambda **_: pytest.fail("stacked on a hang"))
            probe = node.look("periodic")
        assert hard(probe) == ["DRV-HANG"], "that it is still there is a second time"
        assert any(f"process {pid} " in one.text for one in probe.reading.failures)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    node.gpus.rows = [row for row in node.gpus.rows if "stuck" not in row[1]]
    node.gpus.write()
    assert found(node.look("periodic")) == []


# Two looks at once.


def under_way(node: ProbedNode, context: str, job: str = "7", **more: object) -> Probe:
    with node.state() as first, first.lock(0):
        return node.look(context, job, settles=False, **more)


def test_who_waits_looks_as_soon_as_the_first_is_done(node: ProbedNode) -> None:
    first = node.state()
    stack = first.lock(0)
    assert stack.__enter__()
    timer = threading.Timer(0.3, stack.__exit__, [None, None, None])
    timer.start()
    probe = node.look("epilog")
    timer.join()
    first.close()
    assert not probe.is_stored and found(probe) == [] and probe.wall_s > 0.3


def test_who_waited_in_vain_takes_what_was_found_within_the_minute(node: ProbedNode) -> None:
    node.gpus.set(1, "remap_failure", 1)
    node.look("periodic")
    began = time.monotonic()
    probe = under_way(node, "prolog", "8")
    assert time.monotonic() - began < 20
    assert probe.is_stored and hard(probe) == ["REMAP-FAIL"]
    node.now += 61
    old = under_way(node, "prolog", "8")
    assert found(old) == [("unknown", "UNREAD")], "could not tell is not sick"
    assert "another look" in old.reading.failures[0].text


def test_a_prolog_that_did_not_get_to_look_gives_its_job_a_beginning(node: ProbedNode) -> None:
    node.gpus.set(1, ECC, 5)
    node.look("periodic")
    assert under_way(node, "prolog", "8").is_stored
    assert found(node.look("epilog", "8")) == []
    node.look("periodic")
    under_way(node, "prolog", "9")
    node.gpus.set(1, ECC, 6)
    node.look("periodic")
    assert hard(node.look("epilog", "9")) == ["ECC-DRAM"], "since the job began, not since then"


def test_four_looks_at_once_are_one_after_the_other(node: ProbedNode) -> None:
    node.look("prolog")
    node.log(XID_95)
    pids = []
    for job in "1234":
        pid = os.fork()
        if pid == 0:
            node.look("epilog", job, settles=False)
            os._exit(0)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0, 0]
    probe = node.look("periodic")
    assert hard(probe) == ["XID95"], "of a look that nobody has settled"
    assert [one.what for one in probe.history.past] == ["XID95"], "one of the four has read it"


# In a job, by a user.


def test_a_look_within_a_job_does_not_miss_the_gpus_of_others(node: ProbedNode) -> None:
    node.gpus.set("*", "gpus", 1)
    assert hard(node.look("probe", state=None, gpus=(0,))) == []
    looks = [hard(node.look("periodic")) for _ in range(2)]
    assert looks == [[], ["GPU-COUNT"]], "root sees all, and one is missing"


def test_a_log_that_a_user_may_not_read_is_no_failure(node: ProbedNode) -> None:
    node.settings.kernel_log = str(node.folder / "nothing")
    probe = node.look("probe", state=None)
    assert found(probe) == [] and any("kernel_log" in note for note in probe.notes)
    assert found(node.look("periodic")) == [("unknown", "UNREAD")]


def test_a_look_without_memory_counts_lines_since_the_attempt_began(node: ProbedNode) -> None:
    node.log(XID_95, at=node.now - 60)
    assert hard(node.look("probe", state=None, since=node.now - 30)) == []
    assert hard(node.look("probe", state=None, since=node.now - 90)) == ["XID95"]


def test_a_probe_leaves_nothing_for_the_next_look(node: ProbedNode) -> None:
    node.look("prolog")
    before = (node.folder / "state" / MEMORY).read_bytes()
    node.log(XID_95)
    assert hard(node.look("probe")) == ["XID95"]
    assert (node.folder / "state" / MEMORY).read_bytes() == before
    assert hard(node.look("epilog")) == ["XID95"]


# Sources.


def with_smi(node: ProbedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = node.folder / "smi"
    folder.mkdir()
    (folder / "q-x").write_text((SMI_DATA / "x-v13.xml").read_text())
    monkeypatch.setenv("FTSLURM_FAKE_SMI", str(folder))
    node.settings.nvidia_smi = str(SMI)


def test_nvidia_smi_stands_in_where_nvml_cannot_be_used(
    node: ProbedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.settings.nvml_library = str(node.folder / "missing.so")
    assert ("unknown", "DRIVER") in found(node.look("periodic"))
    with_smi(node, monkeypatch)
    probe = node.look("periodic")
    assert values(probe, s.RECOVERY_ACTION) and not probe.reading.of(s.NVML_UNUSABLE)
    assert not probe.reading.failures and "DRIVER" not in hard(probe)
    assert "nvidia-smi stood in for NVML: nvmlInit_v2 gives 12" in probe.notes


def test_nvidia_smi_is_not_asked_after_a_hang_nor_where_there_is_no_gpu(
    node: ProbedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_smi(node, monkeypatch)
    asked: list[object] = []
    monkeypatch.setattr(nvidia_smi, "read_nvidia_smi", lambda **more: asked.append(more))
    with monkeypatch.context() as hangs:
        hangs.setattr(nvml_read, "read_nvml", late)
        node.look("periodic")
    for bus in BUSES[:2]:
        (node.root / "sys/bus/pci/devices" / f"{bus}.0" / "vendor").write_text("0x1002\n")
    node.settings.nvml_library = str(node.folder / "missing.so")
    assert found(node.look("periodic")) == [] and asked == []


def test_a_library_that_kills_its_process_is_read_by_nvidia_smi(
    node: ProbedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_smi(node, monkeypatch)
    node.gpus.set(1, "crash:nvmlDeviceGetEccMode", 1)
    probe = node.look("periodic")
    assert any("ended with -11" in note for note in probe.notes)
    assert not probe.reading.failures


@pytest.mark.parametrize("source", ["nvml", "kernel_log", "sysfs", "rdma"])
def test_a_source_that_is_skipped_is_not_asked(node: ProbedNode, source: str) -> None:
    node.port("mlx5_0")
    node.log(XID_95)
    node.settings.skip = [source, "nvidia_smi"]
    probe = node.look("periodic")
    read = {signal.kind for signal in probe.reading.signals}
    of_source = {
        "nvml": s.TEMPERATURE, "kernel_log": s.XID, "sysfs": s.GPU_COUNT_PCI, "rdma": s.RDMA_STATE
    }  # fmt: skip
    for name, kind in of_source.items():
        is_skipped = name == source or (name == "rdma" and source == "sysfs")
        assert (kind in read) != is_skipped, name
    assert not probe.reading.failures
    node.settings.skip = []
    if source == "kernel_log":
        assert hard(node.look("periodic")) == [], "what it said meanwhile does not count"
    node.log(XID_95)
    assert hard(node.look("periodic")).count("XID95") == 1


def test_a_lost_gpu_has_its_number_from_nvml_and_its_bus_from_pci(node: ProbedNode) -> None:
    node.gpus.set(1, "code:nvmlDeviceGetHandleByIndex_v2", 15)
    probe = node.look("periodic")
    (verdict,) = [one for one in probe.verdicts if one.code == "GPU-LOST"]
    assert verdict.gpu is not None and (verdict.gpu.index, verdict.gpu.bus) == (1, BUSES[1])


def test_what_gres_says_is_compared_with_what_is_there(node: ProbedNode) -> None:
    node.settings.gpus_per_node = 2
    assert found(node.look("periodic")) == []
    node.settings.gpus_per_node = 3
    assert set(found(node.look("periodic"))) == {("warn", "GPU-COUNT")}
    assert set(hard(node.look("periodic"))) == {"GPU-COUNT"}
    assert hard(node.look("probe", state=None)) == [], "a job may have fewer"


def test_a_memory_of_nothing_tells_nothing() -> None:
    assert Memory("boot-one").told(frozenset()) == [] and Memory("boot-one").baseline() is None
