"""Stacks of ranks that cannot answer by themselves, and none of a process that is not the rank."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ftslurm.agent import stacks
from ftslurm.agent.stacks import take_stacks
from ftslurm.run.heartbeat import RankView, read_views

RANK = """
    import ctypes, re, sys, threading, time
    from pathlib import Path
    from ftslurm.run.pulse import Pulse
    from ftslurm.run.rank import RankEnvironment
    from ftslurm.run.stack_dump import write_stacks_on_signal
    rank = int(sys.argv[2])
    env = RankEnvironment(Path("/run"), 1, rank, 2, rank, 2, "n1", 0, "127.0.0.1", 1)
    pulse = Pulse.open(env, {"FTSLURM_BEATS": sys.argv[1]})
    if sys.argv[3] != "none":
        write_stacks_on_signal(pulse)
    threading.Thread(target=time.sleep, args=(60,), name="other", daemon=True).start()
    with pulse.collective("all_reduce f32[7]"):
        pass

    def held_by_a_library():
        print("ready", flush=True)
        while ctypes.PyDLL(None).sleep(60):
            pass  # any signal ends sleep(3) early

    def held_by_a_regular_expression():
        print("ready", flush=True)
        re.match("(a+)+$", "a" * 60 + "b")

    def asleep():
        pulse.enter("barrier")
        print("ready", flush=True)
        time.sleep(60)

    def none():
        print("ready", flush=True)
        time.sleep(60)

    globals()[sys.argv[3]]()
"""

Start = Callable[[str], "tuple[subprocess.Popen[bytes], RankView]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started = []

    def start_one(doing: str) -> "tuple[subprocess.Popen[bytes], RankView]":
        rank = len(started)
        argv = [sys.executable, "-c", textwrap.dedent(RANK), str(tmp_path), str(rank), doing]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(0.2)  # what holds the lock is begun now
        return process, read_views(tmp_path / "attempt-0001", "n1")[rank]

    yield start_one
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def taken(tmp_path: Path, *views: RankView, deadline_s: float = 40.0) -> "dict[int, str]":
    return take_stacks(views, tmp_path / "attempt-0001", deadline_s=deadline_s)


@pytest.mark.parametrize("doing", ["held_by_a_library", "held_by_a_regular_expression"])
def test_a_rank_that_holds_the_interpreter_lock_shows_where(
    tmp_path: Path, start: Start, doing: str
) -> None:
    process, view = start(doing)
    began_at = time.monotonic()
    text = taken(tmp_path, view)[0]
    assert time.monotonic() - began_at < 20
    assert f"in {doing}" in text, text
    assert "most recent call first" in text and text.count("Thread 0x") >= 1, "the other thread"
    assert "all_reduce f32[7]" in text and f"pid {process.pid}" in text
    assert process.poll() is None


def test_all_ranks_at_once_and_each_time_anew(tmp_path: Path, start: Start) -> None:
    views = [start("asleep")[1], start("held_by_a_library")[1]]
    for _ in range(2):
        texts = taken(tmp_path, *views)
        assert texts[0].count("in asleep") == 1 and texts[1].count("in held_by_a_library") == 1
    assert "last entered collective 2 (barrier)" in texts[0] and "still inside" in texts[0]


def test_a_stopped_rank_is_told_and_goes_on_afterwards(tmp_path: Path, start: Start) -> None:
    process, view = start("asleep")
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    text = taken(tmp_path, view)[0]
    assert "the process is stopped (state T)" in text and "State: T (stopped)" in text
    process.send_signal(signal.SIGCONT)
    time.sleep(0.2)
    assert process.poll() is None
    assert "in asleep" in taken(tmp_path, view)[0]


def test_silent_ranks_cost_one_deadline_together(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = [start("asleep") for _ in range(4)]
    _, other = start("asleep")
    for process, _ in stopped:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
    # As if each were stopped between the look at its state and the signal: no answer comes.
    monkeypatch.setattr(stacks, "process_state", lambda pid, start_ticks: "S")
    began_at = time.monotonic()
    texts = taken(tmp_path, *(view for _, view in stopped), other, deadline_s=10.0)
    assert time.monotonic() - began_at < 35, "one after the other: 40 s"
    assert "in asleep" in texts[4]


def test_a_process_that_does_not_expect_the_signal_is_left_alone(
    tmp_path: Path, start: Start
) -> None:
    process, view = start("none")
    text = taken(tmp_path, view)[0]
    assert "had not come as far" in text and "thread" in text
    time.sleep(0.1)
    assert process.poll() is None


def test_a_record_of_nccl_is_asked_for_where_there_is_one(tmp_path: Path, start: Start) -> None:
    """Not with NCCL, which needs a GPU: with a pipe as its watchdog makes it."""
    _, view = start("asleep")
    pipe = tmp_path / "attempt-0001" / "nccl-0.pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    taken(tmp_path, view)
    assert os.read(reader, 100) == b"1\n"
    os.close(reader)
    began_at = time.monotonic()
    taken(tmp_path, view)
    assert time.monotonic() - began_at < 20, "nobody reads it: no wait"


def test_a_container_s_numbers_are_not_signalled(tmp_path: Path, start: Start) -> None:
    process, view = start("asleep")
    text = taken(tmp_path, replace(view, proc_state="?"))[0]
    assert "a container's number" in text and "in asleep" not in text
    assert process.poll() is None


def test_another_process_with_the_ranks_number_is_not_signalled(
    tmp_path: Path, start: Start
) -> None:
    process, view = start("asleep")
    text = taken(tmp_path, replace(view, start_ticks=view.start_ticks - 5))[0]
    assert "the process has ended" in text and "in asleep" not in text
    process.kill()
    process.wait()
    assert "the process has ended" in taken(tmp_path, view)[0]


def test_who_has_started_whom_is_looked_at_once_for_all_ranks_of_a_program(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, view = start("asleep")
    looks = []
    monkeypatch.setattr(stacks, "children_by_parent", lambda: looks.append(1) or {})
    views = [replace(view, rank=rank, counted=True) for rank in range(3)]
    assert sorted(take_stacks(views, tmp_path / "attempt-0001", deadline_s=0.1)) == [0, 1, 2]
    assert looks == [1]
