"""A file system that hangs is told as one, holds nobody up, and nothing is left in it."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from doctor_runs import BEGAN, OldRun

from ftslurm.cli import main
from ftslurm.doctor import checklist_command, command, folder_checks, in_time
from ftslurm.doctor.in_time import SilentError
from ftslurm.doctor.line import ok
from ftslurm.errors import RunError, UsageError


def wait_for(is_so, what):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


class Reader:
    """Waits for a value however long it takes, until the trial has begun to hang."""

    def __init__(self, of, hangs):
        self.of, self.hangs = of, hangs
        self.recv, self.close = of.recv, of.close

    def poll(self, _):
        return self.of in select.select([self.of, self.hangs], [], [])[0]


@pytest.fixture
def hanging(monkeypatch):
    """A trial that no signal but KILL ends, as long as the file that is given back is open."""
    (waits, lets_go), (hangs, has_begun) = os.pipe(), os.pipe()

    def hanging_trial(name, own):
        os.close(lets_go)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGHUP])
        os.write(has_begun, b"x")
        os.read(waits, 1)
        return ok(name, "it came back")

    def pipe(duplex):
        reader, writer = Pipe(duplex)
        return Reader(reader, hangs), writer

    trials = {**folder_checks._TRIALS, "folder.fsync": hanging_trial}
    monkeypatch.setattr(folder_checks, "_TRIALS", trials)
    monkeypatch.setattr(in_time, "LEAVES_S", 0.1)
    monkeypatch.setattr(in_time, "Pipe", pipe)
    with os.fdopen(lets_go, "wb") as held:
        yield held
    for fd in (waits, hangs, has_begun):
        os.close(fd)


def test_a_folder_that_hangs_is_told_and_all_else_is_looked_at(tmp_path, hanging, capsys):
    argv = ["doctor", "--here", "--runs", str(tmp_path), "--write-gb", "0"]
    assert main(argv) == 1
    told = capsys.readouterr()
    (line,) = [line for line in told.out.splitlines() if "FAIL" in line]
    assert "folder.answers" in line
    assert f"`{tmp_path}`: no answer within 120 s, after folder.rename" in line
    assert "host.interface" in told.out
    assert "has not answered for 10 s" in told.err
    (left,) = tmp_path.iterdir()
    hanging.close()
    wait_for(lambda: not left.exists(), "what came back did not take its folder away")


def test_no_job_is_asked_for_where_the_folder_hangs(tmp_path, hanging, monkeypatch, capsys):
    monkeypatch.setattr(command, "check_across", lambda *_, **__: pytest.fail("a job"))
    monkeypatch.setenv("PATH", str(tmp_path))
    argv = ["doctor", "--across", "2", "--runs", str(tmp_path), "--write-gb", "0"]
    assert main(argv) == 1
    assert "folder.answers" in capsys.readouterr().out


def test_where_children_are_nobodys_to_wait_for_the_folder_is_tried_all_the_same(tmp_path):
    ignored = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    argv = ["doctor", "--here", "--write-gb", "0", "--runs", str(tmp_path)]
    code = f"{ignored}; from ftslurm.cli import main; raise SystemExit(main({argv!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "folder.exclusive_create  of 8 processes" in done.stdout


def silent_after(values):
    def in_time(make, *, say):
        yield from islice(make(), values)
        raise SilentError("no answer within 120 s")

    return in_time


def test_a_checklist_names_the_folder_that_hangs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checklist_command, "in_time", silent_after(0))
    assert main(["doctor", "--checklist", "--runs", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert f"`{tmp_path}`: no answer within 120 s; its file server is away" in told


def three_runs(folder):
    """The newest first."""
    runs = [OldRun(folder, name) for name in ("c", "b", "a")]
    for age, run in enumerate(runs):
        os.utime(run.layout.run_json, (BEGAN - age, BEGAN - age))
    return [str(run.layout.root) for run in runs]


def test_a_checklist_answers_by_the_runs_that_were_read_before_the_folder_hung(
    tmp_path, monkeypatch, capsys
):
    names = three_runs(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(checklist_command, "in_time", silent_after(2))
    argv = ["doctor", "--checklist", "--runs", str(tmp_path)]
    assert main(argv) == 0
    last = capsys.readouterr().out.splitlines()[-2:]
    assert "by 1 run, the newest;" in last[0]
    assert last[1] == f"not read: {names[1]}, {names[2]} (no answer within 120 s)"
    assert main([*argv, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["runs"] == ["c"] and list(record["not_read"]) == names[1:]


@pytest.mark.parametrize("is_within", [False, True])
def test_a_checklist_answers_by_the_runs_that_were_read_before_its_reader_was_killed(
    tmp_path, monkeypatch, is_within
):
    """`is_within`: of a value, larger than what a pipe holds."""
    names = three_runs(tmp_path)
    read, parent = checklist_command.read_past_run, os.getpid()

    def killed_at_the_second(past, *, now):
        found = read(past, now=now)
        if past.name == "b":
            assert os.getpid() != parent
            if not is_within:
                os.kill(os.getpid(), signal.SIGKILL)
            found.entry = "x" * (1 << 22)
        return found

    class Killed(Connection):
        def _send(self, buf, write=os.write):
            if len(buf) > 1 << 20:
                super()._send(buf[:4096])
                os.kill(os.getpid(), signal.SIGKILL)
            super()._send(buf)

    def pipe(duplex):
        reader, writer = Pipe(duplex)
        return reader, Killed(os.dup(writer.fileno()), readable=False)

    monkeypatch.setattr(checklist_command, "read_past_run", killed_at_the_second)
    if is_within:
        monkeypatch.setattr(in_time, "Pipe", pipe)
    asked = checklist_command.read_asked("", tmp_path, None)
    assert [run.name for run in asked.runs] == ["c"]
    why = "the process that tried the file system was killed"
    assert asked.not_read == dict.fromkeys(names[1:], why)


def test_a_checklist_begins_no_run_when_its_time_is_up_and_says_so(tmp_path):
    names = three_runs(tmp_path)
    clock = iter([0.0, 1.0, checklist_command.READ_S + 1.0])
    asked = checklist_command.read_asked("", tmp_path, None, clock=lambda: next(clock))
    assert [run.name for run in asked.runs] == ["c", "b"]
    assert asked.not_read == {names[2]: "the others took 60 s"}


UNTIL_IT_IS_GONE = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from ftslurm.cli import main
from ftslurm.doctor import folder_checks, in_time

def trial(name, own):
    while os.getppid() == doctor:
        time.sleep(0.02)
    return folder_checks.ok(name, "it came back")

doctor = os.getpid()
folder_checks._TRIALS, in_time.LEAVES_S = {"folder.fsync": trial}, 0.1
main(["doctor", "--here", "--write-gb", "0", "--runs", sys.argv[1]])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_doctor_that_is_killed_leaves_no_folder(tmp_path, how):
    argv = [sys.executable, "-c", UNTIL_IT_IS_GONE, str(tmp_path)]
    doctor = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: any(tmp_path.iterdir()) or doctor.poll() is not None, "no folder was made")
    assert doctor.poll() is None
    doctor.send_signal(how)
    doctor.wait(60)
    wait_for(lambda: not any(tmp_path.iterdir()), "the folder was left")


def test_values_come_as_they_are_made_and_an_error_as_itself():
    def some():
        yield Path("/a")
        yield ok("a", "b")
        raise UsageError("no such thing")

    values = in_time.in_time(some)
    assert [next(values), next(values)] == [Path("/a"), ok("a", "b")]
    with pytest.raises(UsageError, match="no such thing"):
        next(values)


def test_a_child_that_was_killed_is_not_taken_for_one_that_is_done():
    def dies():
        yield 1
        os.kill(os.getpid(), signal.SIGKILL)

    values = in_time.in_time(dies)
    assert next(values) == 1
    with pytest.raises(RunError, match="was killed"):
        next(values)


def test_what_nobody_reads_any_more_is_closed(tmp_path):
    def many():
        try:
            while True:
                yield 1
        finally:
            (tmp_path / "closed").touch()

    values = in_time.in_time(many)
    next(values)
    values.close()
    wait_for((tmp_path / "closed").exists, "it was not closed")


def test_silence_is_an_error_of_its_own(monkeypatch):
    waits, lets_go = os.pipe()

    def silent():
        os.close(lets_go)  # so that it ends when ours is closed
        yield os.read(waits, 1)

    monkeypatch.setattr(in_time, "LEAVES_S", 0.1)
    said = []
    with pytest.raises(SilentError, match="within 1 s"):
        next(in_time.in_time(silent, limit_s=1.0, warn_s=0.1, say=said.append))
    assert said == ["the file system has not answered for 0 s"]
    os.close(waits)
    os.close(lets_go)
