"""A rank behind a container's words: signals reach it, its code comes back."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftslurm.scheduler.process import ProcessName

ROOT = Path(__file__).resolve().parent.parent

# Says `up`, then each signal it gets; leaves with 75 on TERM.
RANK = """
import os, signal, sys, time
time.sleep(float(sys.argv[2]))
def say(number, frame):
    with open(sys.argv[1], "a") as out:
        out.write(f"{signal.Signals(number).name}\\n")
    if number == signal.SIGTERM:
        os._exit(75)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, say)
with open(sys.argv[1], "a") as out:
    out.write("up\\n")
while True:
    time.sleep(0.05)
"""
BWRAP = ["bwrap", "--dev-bind", "/", "/", "--die-with-parent"]
PREFIXES = {
    "nothing": [],
    "a program that becomes the rank": ["env", "A=1"],
    "a program that stays beside it": ["sh", "-c", '"$@"; exit $?', "sh"],
    "bwrap": BWRAP,
    "bwrap with processes of its own": [*BWRAP, "--unshare-pid", "--proc", "/proc"],
}


STARTED = []


@pytest.fixture(autouse=True)
def nothing_is_left():
    """With the first process, only its own child is killed; a rank that `sh` started is not."""
    yield
    while STARTED:
        process = STARTED.pop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def prefixed(words, *command):
    if words and words[0] == "bwrap" and not _bwrap_works():
        pytest.skip("bwrap is not installed, or may not make namespaces here")
    argv = [sys.executable, "-m", "ftslurm.node.prefix", *words, *command]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(argv, env=environ, start_new_session=True)
    STARTED.append(process)
    return process


def _bwrap_works():
    return bool(shutil.which("bwrap")) and subprocess.run([*BWRAP, "true"]).returncode == 0


def rank(words, said, *, starts_after_s=0.0):
    return prefixed(words, sys.executable, "-c", RANK, str(said), str(starts_after_s))


def wait_for(look, what):
    deadline = time.monotonic() + 60
    while not look():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def lines(path):
    return path.read_text().split() if path.exists() else []


@pytest.mark.parametrize("words", PREFIXES.values(), ids=PREFIXES)
def test_a_signal_to_the_first_process_alone_reaches_the_rank(words, tmp_path):
    """As proctrack/cgroup sends it."""
    said = tmp_path / "said"
    process = rank(words, said)
    wait_for(lambda: lines(said) == ["up"], "the rank did not start")
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        process.send_signal(number)
        wait_for(lambda name=number.name: name in lines(said), lines(said))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75


@pytest.mark.parametrize("words", PREFIXES.values(), ids=PREFIXES)
def test_a_signal_to_every_process_ends_none_but_as_the_rank_wants_it(words, tmp_path):
    """As proctrack/linuxproc sends it."""
    said = tmp_path / "said"
    process = rank(words, said)
    wait_for(lambda: lines(said) == ["up"], "the rank did not start")
    os.killpg(process.pid, signal.SIGUSR1)
    wait_for(lambda: "SIGUSR1" in lines(said), lines(said))
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(60) == 75


def test_a_signal_that_comes_while_the_rank_starts_is_kept_for_it(tmp_path):
    said = tmp_path / "said"
    process = rank(["sh", "-c", '"$@"; exit $?', "sh"], said, starts_after_s=0.6)
    wait_for(lambda: children(process.pid), "no sh")
    os.killpg(process.pid, signal.SIGUSR1)
    wait_for(lambda: lines(said) == ["up", "SIGUSR1"], lines(said))


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_the_command_dies_with_its_first_process(tmp_path):
    said = tmp_path / "said"
    process = rank([], said)
    wait_for(lambda: lines(said) == ["up"], "the rank did not start")
    (child,) = children(process.pid)
    process.kill()
    process.wait(60)
    wait_for(lambda: not Path(f"/proc/{child}").exists(), "the rank outlives it")


# PR_SET_NAME (prctl(2)) with bytes that are no UTF-8, and a parenthesis.
ODDLY_NAMED = r"import ctypes; assert not ctypes.CDLL(None).prctl(15, b'\xff) \xfe', 0, 0, 0)"


def test_a_process_of_any_name_neither_ends_nor_hides_the_rank(tmp_path):
    """Looked at are all processes of the node, the rank among them."""
    said = tmp_path / "said"
    process = prefixed([], sys.executable, "-c", f"{ODDLY_NAMED}\n{RANK}", str(said), "0")
    wait_for(lambda: lines(said) == ["up"], "the rank did not start")
    (child,) = children(process.pid)
    assert b"\xff) \xfe" in Path(f"/proc/{child}/stat").read_bytes()
    name = ProcessName.of(int(child))
    assert name is not None and name.is_alive
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: "SIGUSR1" in lines(said) or process.poll() is not None, lines(said))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert not name.is_alive


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_the_code_of_the_command_is_its_own(script, code):
    assert prefixed([], "sh", "-c", script).wait(60) == code


def test_the_command_gets_words_environment_and_signals_as_they_are():
    words = ["a b", "", "$(id)", "--", "-x"]
    argv = [sys.executable, "-m", "ftslurm.node.prefix", sys.executable, "-c"]
    program = (
        "import os, signal, sys; assert os.environ['X'] == '1\\n2'; print(sys.argv[1:]); "
        "assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "X": "1\n2"}
    done = subprocess.run([*argv, program, *words], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{words}\n"


def test_a_command_that_is_not_there_is_named():
    argv = [sys.executable, "-m", "ftslurm.node.prefix", "no-such-container", "exec"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True)
    assert done.returncode == 127
    assert done.stderr.startswith("ftslurm: error: `no-such-container` of cluster.container")
    assert "Traceback" not in done.stderr
