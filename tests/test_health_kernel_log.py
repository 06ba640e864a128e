"""The kernel log, line by line and look by look: whole, cut, rotated, flooded, of another boot."""

import errno
import os
import random
import resource
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_lines import LOST, SHAPES, SILENT, XID

from ftslurm.health import kernel_log, kernel_tally
from ftslurm.health.history import History
from ftslurm.health.kernel_line import parse_line
from ftslurm.health.kernel_log import Cursor, NewEvents, read_new, signals_of
from ftslurm.health.signals import Gpu, Reading
from ftslurm.health.verdicts import judge, remember

BOOT_AT = 1000.0


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[0][:60])
def test_a_line_is_read_in_every_shape(shape: tuple) -> None:
    line, kind, number, bus, more = shape
    for form in (line, line.encode(), line.encode() + b"\r\n"):
        event = parse_line(form, boot_at=BOOT_AT, now=1.8e9)
        assert event is not None, form
        assert (event.kind, event.number, event.bus) == (kind, number, bus)
        assert {key: getattr(event, key) for key in more} == more


@pytest.mark.parametrize("name", ["Linux version ", "Linux version 6"])
def test_a_process_cannot_make_what_was_said_before_it_one_of_another_boot(name: str) -> None:
    tally = kernel_tally.Tally(0.0, 100.0, is_new_boot=True)
    tally.add_all([f"6,1,9,-;{XID}79, {LOST}".encode()])
    tally.add_all([f"6,2,99,-;{name}[77]: segfault at 0 ip 0 in .1-generic[1+2]".encode()])
    assert [event.number for event in tally.events()] == [79]
    tally.add_all([b"6,3,99,-;Linux version 6.8.0-60-generic (buildd@host)"])
    assert tally.events() == ()


def test_there_are_enough_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    shapes, silent = len({line for line, *_ in SHAPES}), len(set(SILENT))
    with capsys.disabled():
        print(f"\nkernel log: {shapes} shapes of lines that say something, {silent} that do not")
    assert shapes >= 40 and silent >= 20


@pytest.mark.parametrize("line", SILENT)
def test_what_is_no_event_gives_none(line: str) -> None:
    assert parse_line(line, boot_at=BOOT_AT, now=1.8e9) is None


@pytest.mark.parametrize("line", [line for line, *_ in SHAPES])
def test_a_line_cut_anywhere_never_raises_and_never_grows_worse(line: str) -> None:
    whole = parse_line(line)
    assert whole is not None
    for end in range(len(line)):
        event = parse_line(line[:end].encode())
        if event is not None and event.number != whole.number:
            assert str(whole.number).startswith(str(event.number))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.sampled_from([line.encode() for line, *_ in SHAPES]))
def test_garbage_never_raises(garbage: bytes, line: bytes) -> None:
    assert parse_line(garbage, boot_at=BOOT_AT, now=1.8e9) is None
    middle = len(line) // 2
    for data in (garbage, garbage + line, line[:middle] + garbage + line[middle:]):
        parse_line(data, boot_at=BOOT_AT, now=1.8e9)
        parse_line(data.decode("latin-1"))


class Log:
    """A log file and the cursor of whoever reads it."""

    def __init__(self, path: Path) -> None:
        self.path, self.cursor, self.boot_id = path, None, "boot-1"

    def say(self, *lines: str) -> None:
        with self.path.open("a") as stream:
            stream.writelines(f"{line}\n" for line in lines)

    def read(self, **options: object) -> NewEvents:
        new = read_new(self.path, self.cursor, boot_id=self.boot_id, **options)
        self.cursor = kernel_log.parse_cursor(kernel_log.cursor_record(new.cursor))
        return new

    def numbers(self, **options: object) -> list[tuple[int, int]]:
        return [(event.number, event.count) for event in self.read(**options).events]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    log = Log(tmp_path / "kern.log")
    log.path.touch()
    return log


def test_a_line_counts_once(log: Log) -> None:
    log.say(XID + "79, " + LOST, "something else")
    assert log.numbers() == [(79, 1)]
    assert log.numbers() == []
    log.say(XID + "48", XID + "48")
    assert log.numbers() == [(48, 2)]


def test_a_line_that_is_still_being_written_is_read_when_it_is_whole(log: Log) -> None:
    with log.path.open("a") as stream:
        stream.write(XID + "1")
    assert log.numbers() == []
    with log.path.open("a") as stream:
        stream.write("19, pid=1, name=x, Timeout\n")
    assert log.numbers() == [(119, 1)]


@pytest.mark.parametrize("name", ["kern.log.1", "kern.log-20260901"])
def test_what_was_written_before_a_rotation_is_not_lost(log: Log, name: str) -> None:
    log.say(XID + "13")
    log.numbers()
    log.say(XID + "79, " + LOST)
    log.path.rename(log.path.with_name(name))
    log.say(XID + "48")
    new = log.read()
    assert [event.number for event in new.events] == [79, 48]
    assert new.failures == ()
    assert log.numbers() == []


def test_a_file_that_was_copied_and_cut_goes_on(log: Log) -> None:
    log.say(XID + "13")
    log.numbers()
    log.say(XID + "79, " + LOST)
    log.path.with_name("kern.log.1").write_bytes(log.path.read_bytes())
    log.path.write_text("")
    log.say(XID + "48")
    assert log.numbers() == [(79, 1), (48, 1)]


def test_a_cut_file_is_read_from_its_beginning_and_the_gap_is_told(log: Log) -> None:
    log.say(XID + "13, a longer line than the next one")
    log.numbers()
    log.path.write_text(XID + "48\n")
    new = log.read()
    assert [event.number for event in new.events] == [48]
    assert "cut or rotated" in new.failures[0].text


def test_a_planted_link_is_not_taken_for_the_rotated_log(log: Log, tmp_path: Path) -> None:
    log.say(XID + "13")
    log.numbers()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(log.path.read_bytes() + f"{XID}79\n".encode())
    log.path.unlink()
    log.path.with_name("kern.log.1").symlink_to(elsewhere)
    log.say("nothing")
    assert log.numbers() == []


def test_what_was_before_the_boot_is_old(log: Log) -> None:
    log.say(XID + "79, " + LOST, "[    0.000000] Linux version 6.1.0", XID + "13")
    assert log.numbers() == [(13, 1)]


def test_lines_dated_before_the_boot_are_old_where_the_log_does_not_show_it(log: Log) -> None:
    log.say("2026-09-02T10:00:00+00:00 n kernel: " + XID + "79")
    log.say("2026-09-02T12:00:00+00:00 n kernel: " + XID + "13")
    assert log.numbers(boot_at=1788346800.0, now=1788350400.0) == [(13, 1)]


def test_after_a_restart_only_what_came_since_counts(log: Log) -> None:
    log.say(XID + "79, " + LOST)
    assert log.numbers() == [(79, 1)]
    log.say(XID + "48", "[    0.000000] Linux version 6.1.0", XID + "79, " + LOST)
    log.boot_id = "boot-2"
    assert log.numbers() == [(79, 1)]
    assert log.numbers() == []


def test_a_process_cannot_hide_lines_by_talking_of_a_boot(log: Log) -> None:
    log.say(XID + "79, " + LOST, "Sep  2 10:00:00 n mallory: [    0.000000] Linux version 6.1.0")
    assert log.numbers() == [(79, 1)]
    log.say(XID + "48", "[    0.000000] Linux version 6.1.0")
    assert log.numbers() == [(48, 1)]


def test_a_jump_of_the_clock_changes_nothing(log: Log) -> None:
    log.say("2026-09-02T10:00:00+00:00 n kernel: " + XID + "13")
    log.numbers(boot_at=1788340000.0, now=1788343200.0)
    log.say("1970-01-01T00:00:09+00:00 n kernel: " + XID + "79")
    log.say("2099-01-01T00:00:09+00:00 n kernel: " + XID + "48")
    assert log.numbers(boot_at=1788340000.0, now=9.0) == [(79, 1), (48, 1)]


def test_a_message_over_three_lines_names_its_gpu(log: Log) -> None:
    for bus in ("18", "3a"):
        log.say(
            f"[ 1.0] NVRM: The NVIDIA GPU 0000:{bus}:00.0",
            "               NVRM: (PCI ID: 10de:26b5) installed in this system has",
            "               NVRM: fallen off the bus and is not responding to commands.",
        )
    assert [event.bus for event in log.read().events] == ["0000:18:00", "0000:3a:00"]


def test_800000_equal_lines_cost_bounded_time_and_memory(
    log: Log, capsys: pytest.CaptureFixture[str]
) -> None:
    with log.path.open("w") as stream:
        for number in range(800_000):
            stream.write(f"Sep  2 10:00:00 n kernel: [{number}.0] {XID}95, pid=7, name=p, LTC\n")
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s = time.process_time()
    assert log.numbers(budget_s=100.0) == [(95, 800_000)]
    took_s = time.process_time() - began_s
    more_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    with capsys.disabled():
        print(f"\nkernel log: 800,000 equal lines in {took_s:.1f} s of CPU and {more_kib} KiB")
    assert took_s < 15.0 and more_kib < 64 * 1024


def test_a_flood_of_different_lines_hides_no_worse_one(log: Log) -> None:
    log.say(*(f"{XID}145, RLW Nonfatal XC0 i0 Link 1 (0x{n:x})" for n in range(20_000)))
    log.say(*(f"{XID}45, pid=7, name=p, Ch {n:08x}" for n in range(20_000)))
    log.say(f"{XID}145, RLW Fatal XC0 i0 Link 1 (0x1)", f"{XID}79, {LOST}")
    events = log.read(budget_s=100.0).events
    assert len(events) < 200
    assert sum(event.count for event in events) == 40_002
    assert [event.number for event in events if event.severity != "nonfatal"][-2:] == [145, 79]


def test_a_flood_of_mild_nvlink_errors_hides_no_worse_one_of_the_same_link(log: Log) -> None:
    mild = f"{XID}74, pid=%d, name=p, NVLink: fatal error detected on link 3(0x100000, 0x0, 0x0)"
    log.say(*(mild % number for number in range(5_000)))
    log.say(f"{XID}74, pid=1, name=p, NVLink: fatal error detected on link 3(0x10000, 0x0, 0x0)")
    events = log.read(budget_s=100.0).events
    assert len(events) < 20
    assert sum("(0x10000," in event.text for event in events) == 1


def test_a_flood_of_many_errors_is_judged_in_time(log: Log) -> None:
    numbers = (13, 31, 43, 45, 48, 62, 74, 79, 95, 119, 144, 149)
    log.say(*(
        f"[{at}.0] NVRM: Xid (PCI:0000:{at % 8}b:00): {numbers[at % 97 % 12]}, pid={at}, name=p{at}"
        f", Fatal text number {at}" for at in range(60_000)
    ))  # fmt: skip
    began_s = time.process_time()
    events = log.read(budget_s=100.0, boot_at=BOOT_AT).events
    reading = Reading("b", "n", "prolog", 1.0, signals=tuple(signals_of(events, [])))
    history = History()
    for _ in range(3):
        verdicts = judge(reading, baseline=None, history=history)
        history = remember(history, reading, verdicts, baseline=None)
    assert time.process_time() - began_s < 6.0
    assert len(events) <= 2048 and len({event.number for event in events}) == 12
    assert verdicts[0].word == "drain"


def test_what_is_said_again_has_the_time_of_its_last_line(log: Log) -> None:
    log.say(f"[  1.0] {XID}79, {LOST}", f"[  2.0] {XID}13", f"[900.0] {XID}79, {LOST}")
    assert [
        (event.number, event.at, event.count) for event in log.read(boot_at=BOOT_AT).events
    ] == [
        (13, BOOT_AT + 2, 1),
        (79, BOOT_AT + 900, 2),
    ]


def test_more_different_errors_than_are_counted_are_told(log: Log) -> None:
    log.say(*(f"NVRM: Xid (PCI:{n:04x}:00:00): 13" for n in range(2_000)))
    new = log.read(budget_s=100.0)
    assert len(new.events) == 1024
    assert "976 lines were left out" in new.failures[0].text


def test_what_there_is_no_time_for_comes_with_the_next_look(log: Log) -> None:
    log.say(*(f"{XID}13, {number:0900d}" for number in range(3_000)))
    ticks = iter([0.0, 0.0, 0.5, 2.0])
    first = log.read(budget_s=1.0, clock=lambda: next(ticks))
    assert "the rest comes with the next look" in first.failures[0].text
    rest = log.read(budget_s=100.0)
    assert sum(event.count for event in (*first.events, *rest.events)) == 3_000


def test_a_line_without_an_end_is_passed_over(log: Log) -> None:
    log.path.write_bytes(os.urandom(3 << 20).replace(b"\n", b" ") + b"\n")
    log.say(XID + "79, " + LOST)
    assert log.numbers(budget_s=100.0) == [(79, 1)]


def test_a_log_of_garbage_has_no_events(log: Log) -> None:
    chance = random.Random(7)
    hints = (b"Xid (", b"fallen off", b"mlx5_core", b"error", b"Linux version ", b"NVIDIA GPU")
    for _ in range(20):
        noise = bytearray(chance.randbytes(50_000))
        for _ in range(200):
            at, hint = chance.randrange(40_000), chance.choice(hints)
            noise[at : at + len(hint)] = hint
        log.path.write_bytes(bytes(noise))
        log.cursor = None
        assert log.read(budget_s=100.0).events == ()


def test_a_log_that_is_not_there_is_a_failure_and_keeps_the_cursor(tmp_path: Path) -> None:
    cursor = Cursor("boot-1", 5, 7)
    new = read_new(tmp_path / "none", cursor, boot_id="boot-1")
    assert new.cursor == cursor
    assert "No such file" in new.failures[0].text


def test_a_fifo_in_place_of_the_log_does_not_hold_the_probe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kern.log")
    assert read_new(tmp_path / "kern.log", None, boot_id="b").failures


@pytest.mark.parametrize(
    "record",
    [
        None,
        7,
        "x",
        [],
        {},
        {"boot_id": 3},
        {"boot_id": "b", "x": 1},
        {"boot_id": "b", "offset": -1},
        {"boot_id": "b", "mark": "m"},
    ],
)
def test_a_torn_cursor_is_none(record: object) -> None:
    assert kernel_log.parse_cursor(record) is None


def kmsg(seq: int, *steps: object) -> tuple[list[tuple[int, int]], int, str]:
    tally = kernel_tally.Tally(None, None, is_new_boot=False)
    script = iter(steps)

    def read() -> bytes:
        step = next(script)
        if isinstance(step, OSError):
            raise step
        assert isinstance(step, bytes)
        return step

    newest, text = kernel_log.read_kmsg(read, seq, tally, lambda: True)
    return [(event.number, event.count) for event in tally.events()], newest, text


END = BlockingIOError(errno.EAGAIN, "no more")


def record(seq: int, message: str, prefix: int = 4) -> bytes:
    return f"{prefix},{seq},99,-;{message}\n SUBSYSTEM=pci\n".encode()


def test_records_of_dev_kmsg_count_once() -> None:
    steps = [record(3, XID + "13"), record(4, XID + "79, " + LOST), record(5, "x")]
    assert kmsg(-1, *steps, END) == ([(13, 1), (79, 1)], 5, "")
    assert kmsg(3, *steps, END) == ([(79, 1)], 5, "")
    assert kmsg(5, *steps, END) == ([], 5, "")


def test_records_that_were_overwritten_are_told() -> None:
    events, newest, text = kmsg(3, BrokenPipeError(errno.EPIPE, "lost"), record(9, XID + "79"), END)
    assert (events, newest) == ([(79, 1)], 9)
    assert text == "5 records were overwritten before they were read"


def test_what_a_process_wrote_into_dev_kmsg_is_not_the_kernels() -> None:
    assert kmsg(-1, record(3, XID + "79", prefix=12), END)[0] == []


def test_the_kernel_log_of_this_machine_can_be_read() -> None:
    path = Path("/dev/kmsg")
    if not os.access(path, os.R_OK):
        pytest.skip("no right to read /dev/kmsg")
    first = read_new(path, None, boot_id="b")
    again = read_new(path, first.cursor, boot_id="b")
    assert first.cursor.seq >= 0 and again.cursor.seq >= first.cursor.seq


def test_signals_name_the_gpu_where_it_is_known() -> None:
    gpu = Gpu(3, "GPU-3", "0000:9b:00")
    lines = [XID + "79", "NVRM: Xid (PCI:0000:11:00): 79",
             "mlx5_core 0000:0c:00.0: cmd_exec timeout"]  # fmt: skip
    events = [event for line in lines if (event := parse_line(line)) is not None]
    known, other, nic = signals_of(events, [gpu])
    assert known.gpu == gpu and known.value == 79
    assert other.gpu == Gpu(None, "", "0000:11:00")
    assert nic.gpu is None and nic.value == "command_timeout"
