"""What happens on good nodes every day, as a whole look meets it: nothing of it drains one."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.nvml.nodes import STATE_VARIABLE
from health_nodes import NOW, looks, node, signal
from health_probes import ProbedNode, found, hard, late, write

from ftslurm.health import kernel_log, kernel_tally, nvml_read, probe, sources, sysfs
from ftslurm.health import signals as s
from ftslurm.health.history import History
from ftslurm.health.look import Parts
from ftslurm.health.probe import Probe
from ftslurm.health.verdicts import judge

XID_31 = "NVRM: Xid (PCI:0000:2b:00): 31, pid=7, name=python3, Ch 8, MMU Fault: ENGINE GRAPHICS"


@pytest.fixture
def probed(tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> ProbedNode:
    made = ProbedNode(tmp_path / "node", library)
    monkeypatch.setenv(STATE_VARIABLE, str(made.gpus.path))
    return made


# The fabric.


@pytest.mark.parametrize("context", ["prolog", "epilog", "periodic"])
def test_a_fabric_manager_that_is_restarted_drains_nothing_and_one_that_stays_away_does(
    probed: ProbedNode, context: str
) -> None:
    switch = probed.root / "sys/bus/pci/devices/0000:07:00.0"
    write(switch / "vendor", "0x10de")
    write(switch / "class", "0x068000")
    write(probed.root / "proc/1/comm", "systemd")
    assert found(probed.look(context)) == [("warn", "FABRICMGR")]
    probed.sleep(100.0)
    assert found(probed.look(context)) == [("warn", "FABRICMGR")]
    probed.sleep(100.0)
    assert hard(probed.look(context)) == ["FABRICMGR"]
    write(probed.root / "proc/900/comm", "nv-fabricmanage")
    assert found(probed.look("periodic")) == []


def test_what_the_fabric_says_while_it_is_set_up_is_not_its_last_word() -> None:
    def rules(state: str) -> set[str]:
        given = [signal(s.FABRIC_STATE, state), signal(s.FABRIC_STATUS, 24)]
        readings = [node("h100", *given, at=NOW + 60 * look) for look in range(5)]
        return {one.rule for one in looks(readings, None) if one.word == "drain"}

    assert rules("in_progress") == {"fabric-state"} and rules("completed") == {"fabric-status"}


# What others than the job leave on a GPU.


def test_a_server_of_mps_and_a_folder_named_as_slurm_names_its_own_are_no_leftovers(
    probed: ProbedNode,
) -> None:
    probed.process(4711, job="7")
    write(probed.root / "proc/4711/comm", "nvidia-cuda-mps")
    assert found(probed.look("epilog")) == []
    mine = "user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_7/step_0"
    for path, is_slurms in (
        (mine, False),
        ("app.slice/job_7", False),
        ("system.slice/slurmstepd.scope/job_7/step_0/user/task_0", True),
        ("system.slice/node1_slurmstepd.scope/job_7", True),
        ("slurm/uid_1000/job_7/step_extern", True),
        ("slurm_node1/uid_1000/job_7", True),
    ):
        write(probed.root / "proc/4711/comm", "python3")
        write(probed.root / "proc/4711/cgroup", f"1:name=systemd:/\n0::/{path}")
        (left,) = sysfs.leftover_signals(probed.root, job="7", uid=1000)
        assert left.where == f"4711-9/{'job' if is_slurms else 'user'}", path


def test_a_process_of_a_job_that_is_requeued_to_its_node_is_no_leftover(probed: ProbedNode) -> None:
    probed.process(4711, job="7", start=100)
    probed.look("prolog")
    assert found(probed.look("epilog")) == [("warn", "LEFTOVER")]
    probed.look("prolog")
    probed.process(4711, job="7", start=900)  # its pid by chance, and another by rights
    probed.process(4713, job="7", start=901)
    probed.sleep(300.0)
    assert found(probed.look("periodic")) == []


def test_a_process_outside_of_jobs_never_drains(probed: ProbedNode) -> None:
    probed.process(4711, job="")
    probed.look("prolog")
    for _ in range(3):
        assert found(probed.look("epilog")) == [("warn", "LEFTOVER")]
        probed.sleep(300.0)
    probed.look("prolog", "8")
    assert found(probed.look("epilog", "7")) == [], "job 8 has the same user, and is still here"


# Counts.


def test_a_node_whose_only_gpu_is_a_display_card_without_a_driver_has_none(tmp_path: Path) -> None:
    card = tmp_path / "sys/bus/pci/devices/0000:03:00.0"
    for name, text in (("vendor", "0x10de"), ("class", "0x030000"), ("revision", "0xa1")):
        write(card / name, text)
    assert sysfs.nvidia_functions(tmp_path) == []
    write(tmp_path / "proc/driver/nvidia/version", "NVRM version: 570")
    assert [one.bus for one in sysfs.nvidia_functions(tmp_path) or ()] == ["0000:03:00"]
    (tmp_path / "proc/driver/nvidia/version").unlink()
    write(card / "class", "0x030200")
    assert len(sysfs.nvidia_functions(tmp_path) or ()) == 1, "made to compute on"


def test_what_gres_says_counts_where_there_are_gpus_and_none_is_cut() -> None:
    def counted(model: str, pci: int, gres: int) -> list[str]:
        given = [signal(s.GPU_COUNT_PCI, pci, None), signal(s.GPU_COUNT_GRES, gres, None)]
        verdicts = looks([node(model, *given, at=NOW + look) for look in range(3)], None)
        return [one.word for one in verdicts if one.rule == "gpu-count-pci"]

    assert counted("h100", 8, 9) == ["drain"]
    assert counted("mig", 8, 56) == counted("none", 0, 8) == []


# A driver that is slow.


@pytest.mark.parametrize(("mode", "text", "word"), [
    (True, "", "drain"),
    (False, "", "unknown"),
    (None, "", "unknown"),
    (False, f"nvmlInit_v2 did not come back; its child {s.UNKILLABLE}", "drain"),
])  # fmt: skip
def test_a_hang_is_a_slow_start_unless_the_driver_was_kept_up_or_nothing_ends_it(
    mode: bool | None, text: str, word: str
) -> None:
    modes = [] if mode is None else [signal(s.PERSISTENCE_MODE, mode, 0)]
    before = node("none" if mode is None else "h100", *modes, at=NOW - 60)
    hang = signal(s.DRIVER_HANG, True, None, text=text)
    verdicts = looks([node("h100", hang, at=NOW + 9 * look) for look in range(2)], before)
    assert [one.word for one in verdicts if one.rule == "driver-hang"] == [word]


def test_the_second_look_at_a_driver_has_all_the_time_that_is_left(
    probed: ProbedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    probed.is_hasty = True

    def timed(*, deadline_s: float, **_: object) -> Parts:
        given.append(deadline_s)
        return late()

    monkeypatch.setattr(nvml_read, "read_nvml", timed)
    probed.look("epilog")
    first, second = given
    assert first == pytest.approx(6.3, abs=0.2) and second > 2 * first


def test_no_time_to_ask_nvml_is_no_silence_of_it(
    probed: ProbedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_most_nvml_s", lambda *_: 0.0)
    for look in range(6):
        context = ("prolog", "epilog", "periodic")[look % 3]
        assert hard(probed.look(context)) == []
        probed.now += 60.0
    assert not probed.slept


def test_two_looks_in_one_count_what_they_cannot_read_once(
    probed: ProbedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml_read, "read_nvml", late)
    for _ in range(2):
        assert hard(probed.look("epilog")) == []
        probed.sleep(60.0)
    assert probed.slept.count(3.0) == 2, "each has looked twice"
    assert "NVML-SILENT" in hard(probed.look("epilog")), "three"


# Faults of programs, on a node of several jobs.


def test_a_programs_fault_counts_for_a_user_who_was_alone_on_the_node_and_for_no_other(
    probed: ProbedNode,
) -> None:
    probed.look("prolog", "1", user="alice", gpus=(1,))
    for job in ("2", "3"):
        probed.look("prolog", job, user="bob", gpus=(0,))
        probed.log(XID_31)
        assert found(probed.look("epilog", job, user="bob", gpus=(0,))) == [("warn", "XID31")]
    probed.log(XID_31)
    assert found(probed.look("epilog", "1", user="alice", gpus=(1,))) == [("warn", "XID31")]


def test_the_same_fault_of_two_users_who_were_alone_is_the_gpus(probed: ProbedNode) -> None:
    for job, user, word in (("1", "alice", "warn"), ("2", "bob", "warn"), ("3", "alice", "after")):
        probed.look("prolog", job, user=user)
        probed.log(XID_31)
        assert found(probed.look("epilog", job, user=user)) == [(word, "XID31")]


def handed(looked: Probe) -> list[str]:
    return [one.code for one in (*looked.verdicts, *looked.during) if one.hands_to_run]


def test_a_prolog_blames_the_program_that_is_to_begin_for_nothing(probed: ProbedNode) -> None:
    probed.log(XID_31)
    assert [handed(probed.look(one)) for one in ("prolog", "epilog")] == [[], []]
    probed.log(XID_31)
    assert handed(probed.look("epilog")) == ["XID31"]


# What is kept and what is said.


def test_that_something_was_settled_while_another_looks_is_not_lost_in_silence(
    probed: ProbedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_SETTLE_WAIT_S", 0.1)
    probed.log("NVRM: Xid (PCI:0000:2b:00): 48, DBE")
    looked = probed.look("epilog", settles=False)
    with probed.state() as other, other.lock(0.0) as is_held, probed.state() as state:
        assert is_held and "another look has not ended" in probe.settle(state, looked)
    with probed.state() as state:
        assert probe.settle(state, looked) == ""


def test_a_log_that_cannot_be_read_is_complained_of_when_it_lasts_and_then_once_an_hour(
    probed: ProbedNode,
) -> None:
    probed.settings.kernel_log = str(probed.folder / "none.log")
    said = []
    for _ in range(30):
        looked = probed.look("periodic")
        said.append(len(looked.complaints))
        assert all("none.log" in text for text in looked.complaints)
        probed.sleep(300.0)
    assert said[:4] == [0, 0, 1, 0] and sum(said) == 3, said


def test_the_end_of_the_time_for_dev_kmsg_is_said_and_its_rest_comes_with_the_next_look() -> None:
    def read(seq: int, has_time: Callable[[], bool]) -> tuple[list[int], int, str]:
        records = iter(range(5))

        def one() -> bytes:
            number = next(records, None)
            if number is None:
                raise BlockingIOError(errno.EAGAIN, "no more")
            return f"4,{number},99,-;NVRM: Xid (PCI:0000:9b:00): {40 + number}".encode()

        tally = kernel_tally.Tally(None, None, is_new_boot=False)
        newest, text = kernel_log.read_kmsg(one, seq, tally, has_time)
        return [event.number for event in tally.events()], newest, text

    left = iter([True, True, False])
    events, newest, text = read(-1, lambda: next(left))
    assert (events, newest) == ([40, 41], 1) and "in the time there was" in text
    assert read(newest, lambda: True) == ([42, 43, 44], 4, "")


def test_a_crash_whose_names_a_user_chose_is_no_lost_gpu(probed: ProbedNode) -> None:
    probed.log(
        "NVRM: a[4242]: segfault at 0 ip 0 sp 0 error 4 in 0000:2b:00 fallen off the bus[1+2]"
    )
    assert found(probed.look("epilog")) == []
    probed.log("NVRM: GPU at 0000:2b:00.0 has fallen off the bus.")
    assert hard(probed.look("epilog")) == ["GPU-LOST"]


def test_a_driver_that_is_not_there_still_drains_a_node_to_compute_on() -> None:
    unusable = signal(s.NVML_UNUSABLE, 12, None, where="nvmlInit_v2")
    assert [one.code for one in judge(node("h100", unusable), baseline=None, history=History())
            if one.rule == "driver"] == ["DRIVER"]  # fmt: skip
    assert (
        looks([node("h100", unusable, at=NOW + look) for look in range(2)], None)[0].word == "drain"
    )
