"""A child with a deadline: it ends in time, or it is abandoned and said to be."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ftslurm.health import child
from ftslurm.health.look import Emitter, look_in_child
from ftslurm.health.signals import Failure, Gpu, Signal

Write = Callable[[bytes], None]
SHORT_S = 8.0
"""Above the time that a busy machine takes to start a child."""


@pytest.fixture
def long_term(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "TERM_WAIT_S", 60.0)
    monkeypatch.setattr(child, "_ORPHAN_S", 60.0)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_command_gives_its_output_and_status() -> None:
    ended = child.run_command(["sh", "-c", "echo out; echo err >&2; exit 3"], deadline_s=60)
    assert (ended.code, ended.stdout, ended.stderr) == (3, b"out\n", b"err\n")
    assert not (ended.is_late or ended.is_cut or ended.is_abandoned)


def test_a_command_runs_in_a_group_of_its_own_with_nothing_to_read() -> None:
    script = "import os; print(os.getpgid(0) == os.getpid(), os.read(0, 1))"
    ended = child.run_command([sys.executable, "-c", script], deadline_s=60)
    assert ended.stdout == b"True b''\n"


def test_a_lock_of_the_parent_is_not_held_on_by_its_child(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        ended = child.run_command(["ls", "-l", "/proc/self/fd"], deadline_s=60)
    assert b"/dev/null" in ended.stdout and b"/lock" not in ended.stdout


def test_the_environment_is_the_one_given() -> None:
    ended = child.run_command(["/usr/bin/env"], deadline_s=60, env={"ONLY": "this"})
    assert ended.stdout == b"ONLY=this\n"


def test_a_command_that_is_not_there_is_not_run() -> None:
    ended = child.run_command(["/nowhere/at-all"], deadline_s=60)
    assert ended.code == child.NOT_RUN
    assert b"No such file" in ended.stderr


def test_a_late_command_gets_term_and_may_clean_up(long_term: None) -> None:
    script = "trap 'echo cleaned; exit 9' TERM; echo begun; while :; do sleep 0.05; done"
    ended = child.run_command(["sh", "-c", script], deadline_s=SHORT_S)
    assert ended.is_late and ended.code == 9
    assert ended.stdout == b"begun\ncleaned\n"


def test_a_command_deaf_to_term_is_killed_once() -> None:
    ended = child.run_command(["sh", "-c", "trap '' TERM; while :; do sleep 0.05; done"],
                              deadline_s=SHORT_S)  # fmt: skip
    assert ended.is_late and ended.code == -signal.SIGKILL
    assert ended.wall_s >= SHORT_S + child.TERM_WAIT_S


def test_what_a_child_leaves_in_its_group_is_ended_with_it() -> None:
    ended = child.run_command(["sh", "-c", "sleep 300 & echo $!"], deadline_s=60)
    assert ended.code == 0 and not ended.is_late, "a pipe held by a grandchild is not waited for"
    deadline = time.monotonic() + 60
    while is_alive(int(ended.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_output_is_bounded_and_the_writer_not_blocked() -> None:
    ended = child.run_command(
        ["sh", "-c", "head -c 3000000 /dev/zero; echo end >&2"], deadline_s=60, limit_bytes=1000
    )
    assert (len(ended.stdout), ended.stderr, ended.code) == (1000, b"end\n", 0)
    assert ended.is_cut


def test_an_endless_writer_ends_at_the_deadline(long_term: None) -> None:
    ended = child.run_command(["yes"], deadline_s=SHORT_S, limit_bytes=1000)
    assert ended.is_late and ended.is_cut and len(ended.stdout) == 1000


def test_one_that_cannot_be_killed_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(child, "_signal_group", lambda _pid, number: sent.append(number))
    began = time.monotonic()
    ended = child.run_command(["sleep", "60"], deadline_s=0.2)
    try:
        assert sent == [signal.SIGTERM, signal.SIGKILL], "no signal is sent a second time"
        assert ended.is_abandoned and ended.code is None and ended.is_late
        assert time.monotonic() - began < 20
        assert child.is_running(ended.pid, ended.start_ticks)
        assert not child.is_running(ended.pid, "1")
    finally:
        os.kill(ended.pid, signal.SIGKILL)
        os.waitpid(ended.pid, 0)
    assert not child.is_running(ended.pid, ended.start_ticks)


def test_a_function_keeps_what_it_wrote_before_it_hung(long_term: None) -> None:
    def function(write: Write) -> None:
        write(b"first")
        time.sleep(60)

    ended = child.run_function(function, deadline_s=SHORT_S)
    assert ended.is_late and ended.stdout == b"first" and ended.code == -signal.SIGTERM


def test_a_function_that_raises_says_so_in_one_line() -> None:
    def function(write: Write) -> None:
        raise ValueError("no such thing")

    ended = child.run_function(function, deadline_s=60)
    assert (ended.code, ended.stderr) == (1, b"ValueError: no such thing\n")


def test_a_function_that_leaves_does_not_run_the_parents_way_out() -> None:
    marks: list[str] = []
    try:
        ended = child.run_function(lambda write: sys.exit(5), deadline_s=60)
    finally:
        marks.append("parent")
    assert ended.code == 1 and b"SystemExit" in ended.stderr
    assert marks == ["parent"]


def test_a_child_whose_parent_is_gone_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_ORPHAN_S", 0.2)
    monkeypatch.setattr(child, "_signal_group", lambda _pid, _number: None)
    monkeypatch.setattr(child, "KILL_WAIT_S", 20.0)
    ended = child.run_command(["sleep", "60"], deadline_s=0.2)
    assert ended.code == -signal.SIGALRM


def test_fds_are_not_leaked() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        child.run_function(lambda write: write(b"x"), deadline_s=60)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_look_gives_back_the_values_it_was_given() -> None:
    gpu = Gpu(0, "GPU-1", "0000:1b:00")
    things = (gpu, Signal("gpu_lost", True, gpu=gpu), Failure("nvml", "no word"))

    def looker(emitter: Emitter) -> None:
        for thing in things:
            emitter.emit(thing)
        os.write(1, b"a library prints\nthis without asking")
        emitter.emit(Signal("pcie_width", 16, gpu=gpu))

    parts, ended = look_in_child(looker, source="nvml", deadline_s=60)
    assert (parts.gpus, parts.failures, ended.code) == ([gpu], [things[2]], 0)
    assert parts.signals == [things[1], Signal("pcie_width", 16, gpu=gpu)]


def test_a_look_that_cannot_be_killed_says_whom_to_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child, "_signal_group", lambda _pid, _number: None)
    parts, _ = look_in_child(lambda _emitter: time.sleep(60), source="nvml", deadline_s=0.1)
    assert parts.abandoned is not None
    assert child.is_running(*parts.abandoned)
    os.kill(parts.abandoned[0], signal.SIGKILL)
    os.waitpid(parts.abandoned[0], 0)
    assert not child.is_running(*parts.abandoned)


def test_a_look_that_dies_names_the_call_it_died_in() -> None:
    def looker(emitter: Emitter) -> None:
        emitter.calling("nvmlInit_v2")
        os.abort()

    parts, _ = look_in_child(looker, source="nvml", deadline_s=60)
    assert "-6 in nvmlInit_v2" in parts.failures[0].text
