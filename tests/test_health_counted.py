"""Which of the kernel's messages count: not what was over before the first look, and nothing that a
user's file name has put into the log; but an error of the hardware always."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.nvml.nodes import STATE_VARIABLE
from health_nodes import GPUS
from health_probes import BUSES, ECC, XID_13, XID_95, ProbedNode, codes, hard
from kernel_lines import SHAPES, SILENT

from ftslurm.health.kernel_counted import Begin, first_begin
from ftslurm.health.kernel_line import parse_line
from ftslurm.health.kernel_log import Cursor, read_kmsg, read_new, signals_of
from ftslurm.health.kernel_tally import Tally

XID_48 = "NVRM: Xid (PCI:0000:2b:00): 48, pid=7, name=python3, An uncorrectable double bit error (DBE) has been detected"  # noqa: E501
HOUR_S = 3600.0
CRASH = "python3[4242]: segfault at 0 ip 0000000000401000 sp 00007ffd error 4 in "


@pytest.fixture
def node(tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch) -> ProbedNode:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "gpus"))
    return ProbedNode(tmp_path, library, model="A100")


# Before the first look.


@pytest.mark.parametrize("context", ["prolog", "epilog", "periodic", "probe"])
def test_what_was_said_before_the_installation_is_told_and_not_acted_upon(
    node: ProbedNode, context: str
) -> None:
    """A reset since is known to nobody, on a driver that has no recovery action."""
    node.log(XID_48, at=node.now - 1200)
    probe = node.look(context, installed_at=node.now - 600)
    assert hard(probe) == []
    assert "1 kernel messages are too old to count: xid 48 of 0000:2b:00" in probe.notes
    assert len(probe.complaints) == 1 and "told of XID48 of 0000:2b:00" in probe.complaints[0]


def test_what_earlier_looks_have_left_may_be_lost_and_the_complaint_does_not_say_there_were_none(
    node: ProbedNode,
) -> None:
    node.log(XID_48, at=node.now - 1200)
    node.look("periodic")
    (node.folder / "state/memory.json").write_text("{")
    os.utime(node.folder / "state/memory.json", (node.now, node.now))
    probe = node.look("periodic")
    assert any("earlier looks have left is lost" in note for note in probe.notes)
    assert "before what this look knows of, the kernel told of XID48" in probe.complaints[0]


def test_a_persons_own_look_is_not_told_each_time_of_what_was_long_ago(node: ProbedNode) -> None:
    node.log(XID_48, at=node.now - 1200)
    assert not node.look("probe", state=None, installed_at=node.now - 600).complaints
    node.look("periodic", installed_at=node.now - 600)
    assert not node.look("periodic", installed_at=node.now - 600).complaints, "once"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("NVRM: GPU at 0000:2b:00.0 has fallen off the bus.", "GPU-LOST of 0000:2b:00"),
        ("nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 12020, Fatal, Link 3 x", "SXID12020 of nvidia-nvswitch0 0000:c3:00"),  # noqa: E501
        ("nvidia 0000:2b:00.0: AER: PCIe Bus Error: severity=Uncorrectable (Fatal), type=x, (y)", "AER-FATAL of 0000:2b:00"),  # noqa: E501
        ("NVRM: Xid (PCI:0000:2b:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot)", "ACTION2 of 0000:2b:00"),  # noqa: E501
        ("NVRM: Xid (PCI:0000:2b:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 09 (0x1 0x2)", "XID149 of 0000:2b:00"),  # noqa: E501
    ],
)  # fmt: skip
def test_whatever_would_drain_is_told_when_it_is_too_old(
    node: ProbedNode, line: str, told: str
) -> None:
    node.log(line, at=node.now - 1200)
    probe = node.look("periodic", installed_at=node.now - 600)
    assert hard(probe) == [] and len(probe.complaints) == 1
    assert f"the kernel told of {told};" in probe.complaints[0]
    node.log(line)
    new = hard(node.look("periodic", installed_at=node.now - 600))
    assert new == [told.split()[0]], "the same, new"


def test_what_nvml_says_is_over_is_no_complaint(
    tmp_path: Path, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that has a recovery action says that none is needed."""
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "gpus"))
    node = ProbedNode(tmp_path, library, model="H100")
    node.log("NVRM: Xid (PCI:0000:2b:00): 46, GPU has stopped processing", at=node.now - 1200)
    assert not node.look("periodic", installed_at=node.now - 600).complaints


def test_an_old_xid_of_a_program_is_nobodys_business(node: ProbedNode) -> None:
    node.log(XID_13, at=node.now - 1200)
    probe = node.look("periodic", installed_at=node.now - 600)
    assert not probe.complaints and len(probe.notes) == 1


def test_what_was_said_since_the_installation_and_within_an_hour_counts_in_a_first_look(
    node: ProbedNode,
) -> None:
    node.log(XID_48, at=node.now - 1200)
    assert hard(node.look("periodic", installed_at=node.now - 7 * 86400)) == ["XID48"]


def test_an_old_xid_of_memory_counts_in_a_first_look_while_nvml_still_counts_its_error(
    node: ProbedNode,
) -> None:
    node.log(XID_48, at=node.now - 7 * HOUR_S)
    node.gpus.set(0, ECC, 1)
    assert hard(node.look("periodic", installed_at=node.now - 600, state=None)) == []
    node.gpus.set(1, ECC, 1)
    assert hard(node.look("periodic", installed_at=node.now - 600)) == ["XID48"]


def test_a_line_without_a_time_may_be_old_in_a_first_look_and_is_new_in_a_later_one(
    node: ProbedNode,
) -> None:
    with (node.folder / "kern.log").open("a") as log:
        log.write(f"{XID_48}\n")
    assert hard(node.look("periodic")) == []
    with (node.folder / "kern.log").open("a") as log:
        log.write(f"{XID_95}\n")
    assert hard(node.look("periodic")) == ["XID95"]


def test_what_comes_after_a_first_look_counts_whatever_that_has_left_out(node: ProbedNode) -> None:
    node.log(XID_48, at=node.now - 1200)
    assert hard(node.look("prolog", installed_at=node.now - 600)) == []
    node.log(XID_48)
    assert hard(node.look("epilog", installed_at=node.now - 600)) == ["XID48"]


def test_a_boot_that_an_earlier_look_knows_of_is_read_from_its_beginning(node: ProbedNode) -> None:
    node.look("periodic", installed_at=node.now - 600)
    node.now += 2 * HOUR_S
    node.boot("boot-two", at=node.now - 1.5 * HOUR_S)
    node.log(XID_95, at=node.now - 1.4 * HOUR_S)
    assert hard(node.look("periodic", installed_at=node.now - 600)) == ["XID95"]


def test_an_installation_ahead_of_the_clock_hides_nothing() -> None:
    assert first_begin(1e9, 1e9 + 5.0) == Begin(1e9 - HOUR_S, is_first=True)
    assert first_begin(1e9, 1e9 - 5.0).at == 1e9 - 5.0


# GPUs that are gone.


def lose(node: ProbedNode) -> None:
    """As pciehp does, which says so before the driver speaks; NVML and PCI then agree."""
    shutil.rmtree(node.root / "sys/bus/pci/devices" / f"{BUSES[1]}.0")
    node.gpus.set("*", "gpus", 1)
    node.log("pciehp: Slot(0): Card not present", GONE)


GONE = "NVRM: Xid (PCI:0000:2b:00): 79, GPU has fallen off the bus."


@pytest.mark.parametrize("boot", ["boot-one", "boot-two"])
def test_a_gpu_that_has_gone_from_pci_drains_in_each_boot(node: ProbedNode, boot: str) -> None:
    node.look("prolog")
    node.now += 600
    node.boot(boot, at=node.now - 60)
    lose(node)
    assert "XID79" in hard(node.look("periodic"))


@pytest.mark.parametrize("context", ["prolog", "epilog", "periodic", "probe"])
def test_a_gpu_that_has_gone_from_pci_drains_in_a_first_look(
    node: ProbedNode, context: str
) -> None:
    lose(node)
    assert "XID79" in hard(node.look(context, installed_at=node.now - 7 * 86400))


def test_a_gpu_that_has_gone_from_pci_is_seen_by_a_runs_own_look(node: ProbedNode) -> None:
    lose(node)
    assert "XID79" in hard(node.look("probe", state=None, since=node.now - 60))


# Line breaks in names.


def logged(folder: Path, *records: str, stamp: Callable[[int], str]) -> list[str]:
    """As syslog keeps what it reads from /proc/kmsg: each line of a record behind the same time."""
    path = folder / "kern.log"
    lines = [
        f"2026-09-02T10:00:00.{number:06d}+02:00 node1 kernel: {stamp(number)}{line}\n"
        for number, record in enumerate(records)
        for line in record.split("\n")
    ]
    path.write_text("".join(lines))
    new = read_new(path, None, boot_id="boot-1")
    told = [failure.text for failure in new.failures]
    return [f"{one.kind} {one.value}" for one in signals_of(new.events, GPUS)] + told


def uptime(number: int) -> str:
    return f"[{100 + number:5d}.{number:06d}] "


REAL = (
    "a\nNVRM: Xid (PC[32709]: segfault at 0 ip 0000557cf3fbb132 sp 00007ffd224ff720 error 6 in a\n"
    "NVRM: Xid (PCI:0000:2b:00): 79, GPU has fallen off the bus.[1132,557cf3fbb000+1000] likely on "
    "CPU 1 (core 1, socket 0)"
)
"""What Linux 6.18 printed of an unprivileged program with such a name, by syslog(2)."""

OPTION = "tmpfs: Unknown parameter 'a\n"
"""So Linux 6.18 says to a user who mounts, in a namespace of his own, with such an option."""

FORGED = (
    REAL,
    OPTION + XID_95 + "'",
    "overlayfs: failed to resolve 'a'\n" + XID_95 + "': -2",
    "overlay filesystem being mounted at /tmp/a\n" + XID_95 + " supports timestamps until 2038",
    "traps: python3[42] general protection fault ip:0 sp:0 error:0 in a\n" + XID_95,
    CRASH + "a\n" + XID_95,
    CRASH + "a\nNVRM: GPU at PCI:0000:2b:00: GPU-1\n" + XID_95,
    CRASH + "a\n" + "\n" * 130 + XID_95,
    "NVRM: GPU at PC[4242]: segfault at 0 ip 0 sp 0 error 4 in a\n" + XID_95,
    CRASH + "a\nLinux version 6.8.0\n" + XID_95,
    "oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/a\nNVRM: GPU at 0000:2b:00.0 has fallen off "
    "the bus.,task=python3,pid=7",
)


@pytest.mark.parametrize("record", FORGED)
def test_a_line_break_in_a_users_file_name_makes_no_error_of_a_gpu(
    tmp_path: Path, record: str
) -> None:
    told = logged(tmp_path, "usb 1-1: new device", record, stamp=uptime)
    assert len(told) == 1 and "may have put them" in told[0], told


def test_read_from_the_device_it_is_one_line_and_says_nothing() -> None:
    """As /dev/kmsg of the same kernel had it."""
    record = "6,1588,1884079052,-;" + REAL.replace("\n", "\\x0a")
    assert parse_line(record) is None
    assert parse_line("4,9,99,-;" + XID_95) is not None


BOOT = "Linux version 6.8.0-60-generic (buildd@host) #63-Ubuntu SMP"
OF_BOOT = (
    "microcode: microcode updated early to revision 0xf0, date = 2021-11-12",
    "Booting Linux on physical CPU 0x0000000000 [0x410fd4f0]",
)
"""Before a boot's first line on Intel's and on Arm's processors, both of the time 0."""


@pytest.mark.parametrize("before", [(), OF_BOOT[:1], OF_BOOT[1:]])
@pytest.mark.parametrize("dated", [True, False])
def test_what_was_said_before_a_boot_is_old_whatever_the_boot_begins_with(
    tmp_path: Path, before: tuple[str, ...], dated: bool
) -> None:
    """45 s before, as of a virtual machine or by kexec."""
    lines = [f"[ 9999.123456] {XID_95}", *(f"[    0.000000] {one}" for one in (*before, BOOT))]
    lines += ["[    0.000000] Command line: BOOT_IMAGE=/vmlinuz", f"[   30.000000] {XID_48}"]
    stamps = (0, 45, 45, 45, 45, 75)
    path = tmp_path / "kern.log"
    with path.open("w") as log:
        for at, line in zip(stamps, lines):
            log.write(f"2026-09-02T10:{at // 60:02d}:{at % 60:02d}+00:00 node1 " if dated else "")
            log.write(f"kernel: {line}\n" if dated else f"{line}\n")
    booted_at = 1788343245.0
    new = read_new(path, Cursor("boot-1"), boot_id="boot-2", boot_at=booted_at, now=booted_at + 90)
    assert [event.number for event in new.events] == [48]


def test_such_a_line_does_not_make_what_was_said_before_it_one_of_another_boot(
    tmp_path: Path,
) -> None:
    for head in (CRASH + "a\n", OPTION):
        assert logged(tmp_path, XID_95, head + BOOT, stamp=uptime) == ["xid 95"]
    assert logged(tmp_path, XID_95, BOOT, XID_48, stamp=uptime) == ["xid 48"]


@pytest.mark.parametrize("record", FORGED)
def test_a_message_that_two_looks_have_a_part_of_each_makes_no_error_of_a_gpu(
    tmp_path: Path, record: str
) -> None:
    assert len(logged(tmp_path, "usb 1-1: new device", record, stamp=uptime)) == 1
    path = tmp_path / "kern.log"
    whole, rotated = path.read_bytes(), tmp_path / "kern.log.1"
    ends = [at for at, letter in enumerate(whole, 1) if letter == ord("\n")]
    for end in (each + more for each in ends for more in (0, 60)):  # a buffer of syslog's ends so
        path.write_bytes(whole[:end])
        first = read_new(path, None, boot_id="boot-1")
        path.write_bytes(whole)
        second = read_new(path, first.cursor, boot_id="boot-1")
        path.rename(rotated)
        path.write_text("")
        other = read_new(path, first.cursor, boot_id="boot-1")
        rotated.unlink()
        assert not (*first.events, *second.events, *other.events), whole[:end]


def test_a_message_whose_blanks_were_cut_off_is_one_message(tmp_path: Path) -> None:
    logged(tmp_path, CRASH + "a\n\n\n" + XID_95, stamp=uptime)
    path = tmp_path / "kern.log"
    path.write_text("".join(f"{line.rstrip()}\n" for line in path.read_text().splitlines()))
    assert not read_new(path, None, boot_id="boot-1").events


def test_a_line_of_syslogs_own_does_not_part_a_message(tmp_path: Path) -> None:
    logged(tmp_path, CRASH + "a\n\n\n" + XID_95, stamp=uptime)
    path = tmp_path / "kern.log"
    lines = path.read_text().splitlines(keepends=True)
    lines[2] = "2026-09-02T10:00:00+02:00 node1 kernel: last message repeated 2 times\n"
    path.write_text("".join(lines))
    assert not read_new(path, None, boot_id="boot-1").events


def test_such_a_line_is_told_and_no_verdict_against_the_node(node: ProbedNode) -> None:
    node.look("prolog")
    with (node.folder / "kern.log").open("a") as log:
        for line in (CRASH + "a", XID_95):
            log.write(f"2027-01-15T08:00:00+00:00 node1 kernel: [  123.456789] {line}\n")
    probe = node.look("epilog")
    assert hard(probe) == [] and ("unknown", "UNREAD") in codes(probe)


@pytest.mark.parametrize(
    ("records", "counted_as"),
    [
        ((CRASH + "a", XID_95), ["xid 95"]),
        (("NVRM: GPU at PCI:0000:2b:00: GPU-1\nNVRM: GPU Board Serial Number: 156\n" + XID_95,),
         ["xid 95"]),
        ((XID_95 + "\n" + XID_48,), ["xid 95", "xid 48"]),
        (("NVRM: The NVIDIA GPU 0000:2b:00.0\nNVRM: (PCI ID: 10de:2330) installed in this system "
          "has\nNVRM: fallen off the bus and is not responding to commands.",),
         ["kernel_lost True"]),
    ],
)  # fmt: skip
def test_what_the_driver_says_in_several_lines_or_right_behind_a_crash_counts(
    tmp_path: Path, records: tuple[str, ...], counted_as: list[str]
) -> None:
    assert logged(tmp_path, *records, stamp=uptime) == counted_as


def other_lines() -> list[str]:
    """That are no user's: the drivers', and of a CPU that has nothing to do with it."""
    forms = ("NVRM: ", "nvidia", "mlx5_core ", "pcieport ")
    known = [*(shape[0] for shape in SHAPES), *SILENT]
    drivers = [one for one in known if one.startswith(forms) and "]: segfault" not in one]
    return [
        *(one for one in drivers if "page allocation failure" not in one),
        "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 20034, Data {0x00000001, 0x00000000}",
        "NVRM: nvAssertFailedNoLog: Assertion failed: 0 @ gpu_rpc.c:1234",
        "NVRM: Xid (PCI:0000:9b:00): 45, pid='<unknown>', name=<unknown>, Ch 00000001",
        "pcieport 0000:00:03.0:    [20] UnsupReq               (First)",
        "nvidia 0000:9b:00.0: AER:    [20] UnsupReq",
        "mlx5_core 0000:0c:00.0: print_health_info:420:(pid 0): Health issue observed",
        "mlx5_core 0000:0c:00.0: cmd[1]: ACCESS_REG(0x805) Async, recovered after timeout",
        "TCP: request_sock_TCP: Possible SYN flooding on port 0.0.0.0:8080. Sending cookies.",
        "perf: interrupt took too long (2501 > 2500), lowering kernel.perf_event_max_sample_rate",
        "pciehp: Slot(0): Card not present",
    ]


@pytest.mark.parametrize("line", other_lines())
def test_an_error_in_the_same_microsecond_as_another_line_counts(tmp_path: Path, line: str) -> None:
    """As it is on a machine whose clock goes in ticks."""
    for message in (
        XID_48,
        "nvidia 0000:2b:00.0: AER: PCIe Bus Error: severity=Uncorrectable (Fatal), type=x, (y)",
    ):  # noqa: E501
        told = logged(tmp_path, line, message, stamp=lambda number: "[  100.004000] ")
        assert told[-1] in ("xid 48", "aer fatal"), told


def test_in_the_kernels_own_device_an_error_in_the_microsecond_of_a_crash_counts() -> None:
    tally = Tally(0.0, 100.0, is_new_boot=False)
    steps = iter([f"6,7,99,-;{CRASH}a".encode(), f"4,8,99,-;{XID_95}".encode(), b""])
    read_kmsg(lambda: next(steps), -1, tally, lambda: True)
    tally.add_all([f"[  1.000000] {CRASH}a".encode(), f"[  1.000000] {XID_48}".encode()])
    assert [event.number for event in tally.events()] == [95, 48] and not tally.complaint()


def test_without_the_kernels_time_nobody_can_tell_and_the_line_counts(tmp_path: Path) -> None:
    assert logged(tmp_path, CRASH + "a", XID_95, stamp=lambda number: "") == ["xid 95"]


def test_every_message_of_a_driver_behind_a_line_of_another_time_counts(tmp_path: Path) -> None:
    forms = ("NVRM: ", "nvidia", "mlx5_core ", "pcieport ")
    messages = [shape[0] for shape in SHAPES if shape[0].startswith(forms)]
    assert len(messages) >= 30
    for message in messages:
        told = logged(tmp_path, CRASH + "a", message, stamp=uptime)
        assert len(told) == 1 and "may have put" not in told[0], (message, told)
