"""What a look counts, what it keeps for those after it, and what a kill or a full disk costs."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.nvml.nodes import STATE_VARIABLE
from health_probes import (
    ECC,
    XID_13,
    XID_95,
    ProbedNode,
    codes,
    found,
    hard,
    late,
    values,
)

from ftslurm.health import kernel_log, nvml_read
from ftslurm.health import signals as s
from ftslurm.health.probe import MEMORY, Probe
from ftslurm.health.state_dir import StateDir

CONTEXTS = ("prolog", "epilog", "periodic", "probe")
SMI = Path(__file__).resolve().parent / "fakes" / "nvml" / "nvidia-smi"
SMI_DATA = Path(__file__).resolve().parent / "data" / "health" / "smi"


@pytest.fixture
def node(tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> ProbedNode:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "gpus"))
    return ProbedNode(tmp_path, library)


# What counts: since the job began.


def test_what_counters_had_before_the_job_does_not_count(node: ProbedNode) -> None:
    node.gpus.set(1, ECC, 5)
    node.look("prolog")
    node.now += 3600
    assert found(node.look("epilog")) == []
    node.look("prolog", "8")
    node.gpus.set(1, ECC, 6)
    probe = node.look("epilog", "8")
    assert hard(probe) == ["ECC-DRAM"]
    assert probe.baseline is not None and probe.baseline.job == "8"
    assert hard(node.look("epilog", "9")) == [], "of a job that began without a prolog"


def test_each_job_of_a_shared_node_has_its_own_beginning(node: ProbedNode) -> None:
    node.look("prolog", "8")
    node.gpus.set(1, ECC, 1)
    node.look("prolog", "9")
    node.look("periodic")
    assert hard(node.look("epilog", "9")) == []
    assert hard(node.look("epilog", "8")) == ["ECC-DRAM"]
    assert [path.name for path in (node.folder / "state").glob("baseline-*")] == []


def test_a_restart_between_prolog_and_epilog_begins_anew(node: ProbedNode) -> None:
    node.look("prolog")
    node.log(XID_95)
    node.now += 600
    node.boot("boot-two", at=node.now - 60)
    node.gpus.set(1, ECC, 3)
    probe = node.look("epilog")
    assert hard(probe) == [], "the counter and the line are older than this boot"
    assert probe.baseline is None
    node.log(XID_95)
    assert hard(node.look("periodic")) == ["XID95"]
    node.look("prolog", "8")
    names = [path.name for path in (node.folder / "state").glob("baseline-*")]
    assert names == ["baseline-boottwo-8-1000.json"], "jobs of the boot before had no epilog"


def test_a_port_that_went_down_between_jobs_drains_in_time(node: ProbedNode) -> None:
    """Were it compared with the look before only, it would be down in one look, and fine then."""
    node.port("mlx5_0")
    node.look("periodic")
    node.port("mlx5_0", "1: DOWN")
    told = []
    for _ in range(4):
        node.now += 150
        told.append(hard(node.look("periodic")))
    assert told[0] == told[1] == [] and "IB-DOWN" in told[2] and "IB-DOWN" in told[3]
    node.port("mlx5_0")
    assert found(node.look("periodic")) == []


def test_a_look_that_could_not_read_all_is_no_beginning(
    node: ProbedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.gpus.set(1, ECC, 5)
    node.look("periodic")
    with monkeypatch.context() as broken:
        broken.setattr(nvml_read, "read_nvml", late)
        node.look("prolog")
    node.gpus.set(1, ECC, 6)
    assert hard(node.look("epilog")) == ["ECC-DRAM"], "by the look before the prolog"


def test_leftovers_are_those_of_the_job_and_drain_when_they_stay_for_minutes(
    node: ProbedNode,
) -> None:
    for pid, job in ((4711, "7"), (4712, "9")):
        node.process(pid, job=job)
    node.look("prolog")
    assert found(node.look("epilog")) == [("warn", "LEFTOVER")] and node.slept == []
    node.sleep(60.0)
    probe = node.look("periodic")
    assert found(probe) == [("warn", "LEFTOVER")], "not for long enough"
    assert values(probe, s.LEFTOVER_PROCESS) == [4711], "job 9 is still here"
    node.sleep(60.0)
    assert hard(node.look("prolog", "8")) == ["LEFTOVER"]
    (node.root / "proc/4711/fd/7").unlink()
    node.sleep(60.0)
    assert found(node.look("periodic")) == []


# Second looks.


def test_a_dead_nvlink_is_looked_at_again_before_it_drains(node: ProbedNode) -> None:
    node.look("prolog")
    node.gpus.set(1, "link:3", 0)
    probe = node.look("epilog")
    assert set(hard(probe)) == {"NVLINK-DOWN"} and node.slept == [3.0]

    def retrained(seconds: float) -> None:
        node.sleep(seconds)
        node.gpus.set(1, "link:3", 1)

    node.gpus.set(1, "link:3", 1)
    node.look("prolog", "8")
    node.gpus.set(1, "link:3", 0)
    assert hard(node.look("epilog", "8", sleep=retrained)) == []


def test_an_epilog_waits_for_a_port_where_it_has_the_time(node: ProbedNode) -> None:
    node.port("mlx5_0")
    node.look("prolog")
    node.port("mlx5_0", "1: DOWN")
    assert "IB-DOWN" in hard(node.look("epilog")) and node.slept == [10.5]
    node.settings.epilog_s = 12.0
    node.port("mlx5_0")
    node.look("prolog", "8")
    node.port("mlx5_0", "1: DOWN")
    node.is_hasty = True
    assert hard(node.look("epilog", "8")) == [] and node.slept == [10.5]


@pytest.mark.parametrize("context", ["prolog", "probe"])
def test_a_short_look_sees_a_dead_nvlink_too(node: ProbedNode, context: str) -> None:
    node.gpus.set(1, "link:3", 0)
    assert set(hard(node.look(context, state=None))) == {"NVLINK-DOWN"}
    assert node.slept == [1.0]


def test_a_second_look_counts_the_kernels_lines_once(node: ProbedNode) -> None:
    node.look("prolog")
    node.gpus.set(1, "link:3", 0)
    node.log(XID_13)

    def meanwhile(seconds: float) -> None:
        node.sleep(seconds)
        node.log(XID_95)

    probe = node.look("epilog", sleep=meanwhile)
    assert "XID95" in hard(probe) and ("warn", "XID13") in codes(probe)
    past = [one.what for one in probe.history.past if one.what.startswith("XID")]
    assert sorted(past) == ["XID13", "XID95"]
    assert hard(node.look("periodic")).count("XID95") == 0


# The kernel log: a line counts once.


def test_a_line_counts_once(node: ProbedNode) -> None:
    node.look("prolog")
    node.log(XID_95)
    assert hard(node.look("epilog")) == ["XID95"]
    for context in ("prolog", "epilog", "periodic"):
        assert hard(node.look(context)) == []


def test_a_first_look_does_not_dig_up_what_is_long_over(node: ProbedNode) -> None:
    node.log(XID_95, at=node.now - 4000)
    probe = node.look("periodic")
    said = "1 kernel messages are too old to count: xid 95 of 0000:2b:00"
    assert hard(probe) == [] and said in probe.notes
    assert hard(node.look("periodic")) == []
    node.log(XID_95)
    assert hard(node.look("periodic")) == ["XID95"]


def test_old_lines_that_a_first_look_had_no_time_for_stay_old(
    node: ProbedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.log(XID_95, at=node.now - 4000)
    real = kernel_log.read_new

    def no_time(path: Path, cursor: object, **more: object) -> kernel_log.NewEvents:
        end = kernel_log.Cursor("boot-one", offset=0, seq=3)
        return kernel_log.NewEvents((), end, (s.Failure("kernel_log", "read to byte 0"),))

    with monkeypatch.context() as hurried:
        hurried.setattr(kernel_log, "read_new", no_time)
        node.look("periodic")
    assert kernel_log.read_new is real
    assert hard(node.look("periodic")) == []


def killed(node: ProbedNode, monkeypatch: pytest.MonkeyPatch, at: Callable[..., object]) -> None:
    """A look whose process is killed where `at` stands in for StateDir.write_json."""
    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(StateDir, "write_json", at)
        node.look("epilog", settles=False)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    node.now += 1


def count(probe: Probe, what: str) -> int:
    return sum(one.what == what for one in probe.history.past)


def test_a_look_killed_before_it_is_kept_loses_nothing_and_counts_nothing(
    node: ProbedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.look("prolog")
    node.log(XID_95)
    killed(node, monkeypatch, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    probe = node.look("epilog")
    assert hard(probe) == ["XID95"] and count(probe, "XID95") == 1


def test_a_look_killed_before_it_is_acted_upon_loses_nothing_and_counts_once(
    node: ProbedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.look("prolog")
    node.log(XID_95)
    write_json = StateDir.write_json

    def kept_and_killed(self: StateDir, name: str, record: dict) -> None:
        write_json(self, name, record)
        os.kill(os.getpid(), signal.SIGKILL)

    killed(node, monkeypatch, kept_and_killed)
    assert hard(node.look("periodic", settles=False)) == ["XID95"]
    probe = node.look("periodic")
    assert hard(probe) == ["XID95"] and count(probe, "XID95") == 1
    assert hard(node.look("periodic")) == [], "settled"


def test_what_was_settled_may_be_found_again(node: ProbedNode) -> None:
    node.log(XID_95)
    assert hard(node.look("periodic")) == ["XID95"]
    node.log(XID_95)
    assert hard(node.look("periodic", settles=False)) == ["XID95"]
    assert hard(node.look("periodic")) == ["XID95"]
    assert hard(node.look("periodic")) == []


def test_what_is_not_settled_ends_with_the_boot_and_with_its_rule(node: ProbedNode) -> None:
    node.log(XID_95)
    node.look("periodic", settles=False)
    node.settings.skip = ["xid-95"]
    assert hard(node.look("periodic", settles=False)) == []
    node.settings.skip = []
    assert hard(node.look("periodic", settles=False)) == ["XID95"]
    node.boot("boot-two")
    assert hard(node.look("periodic")) == []


# A memory that is lost.


@pytest.mark.parametrize("damage", ["torn", "newer", "foreign", "a link"])
def test_a_memory_that_cannot_be_read_begins_anew_and_says_so(
    node: ProbedNode, damage: str
) -> None:
    node.now = time.time()
    node.boot("boot-one")
    node.log(XID_95, at=node.now - 5)
    assert hard(node.look("periodic")) == ["XID95"]
    path = node.folder / "state" / MEMORY
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:1000])
    elif damage == "newer":
        path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 9'))
    elif damage == "foreign":
        path.write_text('{"schema_version": 1, "boot_id": "boot-one", "last": 5}')
    else:
        path.unlink()
        path.symlink_to("/etc/passwd")
    os.utime(path, (node.now, node.now), follow_symlinks=False)  # however slow this machine is
    probe = node.look("periodic")
    assert any("what earlier looks have left is lost" in note for note in probe.notes)
    assert hard(probe) == [], "the line is of before that memory was written"
    again = node.look("periodic")
    assert again.notes == () and again.baseline is not None
    node.log(XID_95, at=node.now)
    assert hard(node.look("periodic")) == ["XID95"]


def test_the_beginning_of_a_job_that_is_torn_costs_it_alone(node: ProbedNode) -> None:
    node.look("prolog", "8")
    node.look("prolog", "9")
    (node.folder / "state/baseline-bootone-8-1000.json").write_text("{")
    node.gpus.set(1, ECC, 1)
    probe = node.look("epilog", "9")
    assert hard(probe) == ["ECC-DRAM"] and probe.notes == ()
    probe = node.look("epilog", "8")
    assert hard(probe) == [], "by the look before"
    assert any("beginning is lost" in note for note in probe.notes)


def test_on_a_full_disk_a_look_still_tells_what_it_found(
    node: ProbedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.look("prolog")
    node.log(XID_95)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(StateDir, "write_json", full)
        for _ in range(2):
            probe = node.look("periodic", settles=False)
            assert hard(probe) == ["XID95"], "not kept, so found again"
            assert any("No space left" in note for note in probe.notes)
    probe = node.look("epilog")
    assert hard(probe) == ["XID95"] and count(probe, "XID95") == 1


def test_a_lock_that_a_full_disk_does_not_give_does_not_stop_a_look(
    node: ProbedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StateDir, "lock", full)
    node.gpus.set(1, "remap_failure", 1)
    probe = node.look("periodic", settles=False)
    assert hard(probe) == ["REMAP-FAIL"] and "no lock can be had" in probe.notes[0]


# What a run is told.


def test_what_a_periodic_look_used_up_is_told_to_the_job_it_came_from(node: ProbedNode) -> None:
    node.look("prolog", "8", gpus=(1,))
    node.look("prolog", "9", gpus=(0,))
    node.log(XID_13)
    node.look("periodic")
    other = node.look("epilog", "9", gpus=(0,))
    own = node.look("epilog", "8", gpus=(1,))
    assert [(one.code, one.hands_to_run) for one in other.during] == [("XID13", False)]
    assert [(one.code, one.hands_to_run) for one in own.during] == [("XID13", True)]
    node.look("prolog", "10")
    assert node.look("epilog", "10").during == (), "it is of before that job"


def test_a_fault_that_was_settled_during_the_job_is_told_and_not_acted_on_again(
    node: ProbedNode,
) -> None:
    node.look("prolog")
    node.log(XID_95)
    node.look("periodic")
    probe = node.look("epilog")
    assert hard(probe) == [] and [one.code for one in probe.during] == ["XID95"]


def test_a_periodic_look_knows_whose_job_it_is_that_is_alone(node: ProbedNode) -> None:
    node.look("prolog", "8", user="bob")
    assert (node.look("periodic").reading.job, node.look("periodic").reading.user) == ("8", "bob")
    node.look("prolog", "9")
    assert node.look("periodic").reading.job == ""
