"""Ranks forked from a node's standby: like cold ones to whoever looks, dead with either end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftslurm.node import standby, standby_link
from ftslurm.scheduler.process import ProcessName

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 60

LOADED = """
import os
PID = os.getpid()
"""

RANK = """
import json, os, signal, subprocess, sys, time
import loaded
from ftslurm.run.rank import stop_flag

def main(argv):
    what, *rest = argv
    if what == "tell":
        facts = {"pid": os.getpid(), "parent": os.getppid(), "loaded_by": loaded.PID,
                 "argv": sys.argv, "folder": os.getcwd(), "path": sys.path[0],
                 "environ": dict(os.environ), "stdin": sys.stdin.read(),
                 "cpus": sorted(os.sched_getaffinity(0)),
                 "descriptors": len(os.listdir("/proc/self/fd")),
                 "main": sys.modules["__main__"].__spec__.name}
        print(json.dumps(facts))
    elif what == "leave":
        sys.exit(int(rest[0]))
    elif what == "die":
        os.kill(os.getpid(), int(rest[0]))
        time.sleep(20)
    elif what == "raise":
        raise ValueError("no such thing")
    elif what == "wait":
        child = subprocess.Popen(["sleep", "60"])
        print(os.getpid(), child.pid, flush=True)
        while not stop_flag.is_set:
            time.sleep(0.01)
        print(stop_flag.signal_name, flush=True)
        child.kill()
        sys.exit(75)

if __name__ == "__main__":
    stop_flag.install()
    main(sys.argv[1:])
"""


class Node:
    """A node of a job: its standby, and ranks started as Slurm would."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "loaded.py").write_text(LOADED)
        (folder / "own_rank.py").write_text(RANK)
        long_ago = time.time() - 100
        for path in folder.glob("*.py"):
            os.utime(path, (long_ago, long_ago))
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "FTSLURM_RUN_DIR": str(folder),
            "SLURM_JOB_ID": f"test-{os.getpid()}",
        }
        self.started = []
        self.standby = None

    def start(self, *argv, **options):
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", *argv],
            **{
                "cwd": self.folder,
                "env": self.environ,
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
                **options,
            },
        )
        self.started.append(process)
        return process

    def start_standby(self, **options):
        self.standby = self.start("ftslurm.node.standby", "loaded", **options)
        line = self.standby.stderr.readline()
        assert "is ready after" in line, line + self.standby.stderr.read()
        return self.standby

    def start_rank(self, *arguments, more=(), **options):
        environ = {**self.environ, "SLURM_PROCID": "3", "FTSLURM_ATTEMPT": "7", **dict(more)}
        return self.start(
            "ftslurm.node.standby_rank", "own_rank", *arguments, env=environ, **options
        )

    def run_rank(self, *arguments, **options):
        rank = self.start_rank(*arguments, **options)
        out, err = rank.communicate(timeout=DEADLINE_S)
        return rank.returncode, out, err

    def end(self):
        if self.standby is not None and self.standby.poll() is None:
            # Stopped, it forks no more. What its ranks have started dies with none of the others,
            # and holds their streams.
            self.standby.send_signal(signal.SIGSTOP)
            pid = self.standby.pid
            for rank in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(rank), signal.SIGKILL)
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate(timeout=DEADLINE_S)


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path)
    yield node
    node.end()


def facts_of(node, **options):
    code, out, err = node.run_rank("tell", "a b", **options)
    assert code == 0, err
    return standby_link.json.loads(out), err


def is_gone(pid, within_s=DEADLINE_S):
    deadline = time.monotonic() + within_s
    while ProcessName.of(pid) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def test_a_forked_rank_is_what_a_cold_one_would_be(node):
    (node.folder / "input").write_text("read me")
    told = {}
    for kind in ("cold", "forked"):
        if kind == "forked":
            node.start_standby()
        with (node.folder / "input").open() as stdin:
            told[kind] = facts_of(node, stdin=stdin, more={"SLURM_STEP_ID": "5"})
    cold, said = told["cold"]
    assert "this rank starts cold: this node has no standby that is ready" in said
    forked, said = told["forked"]
    assert said == f"ftslurm: this rank is forked from standby {node.standby.pid}\n"
    assert forked["parent"] == forked["loaded_by"] == node.standby.pid, "it shares the imports"
    assert cold["loaded_by"] == cold["pid"]
    for name in ("argv", "folder", "environ", "stdin", "cpus", "descriptors"):
        assert forked[name] == cold[name], name
    assert forked["environ"]["SLURM_STEP_ID"] == "5"
    assert Path(forked["path"] or node.folder) == Path(cold["path"] or node.folder)
    assert forked["main"] == "own_rank"


@pytest.mark.parametrize("kind", ["cold", "forked"])
def test_a_rank_ends_as_its_process_ends(node, kind):
    if kind == "forked":
        node.start_standby()
    assert node.run_rank("leave", "78")[0] == 78
    assert node.run_rank("die", str(int(signal.SIGSEGV)))[0] == -signal.SIGSEGV
    assert node.run_rank("die", str(int(signal.SIGKILL)))[0] == -signal.SIGKILL
    code, _, err = node.run_rank("raise")
    assert code == 1 and "ValueError: no such thing" in err


@pytest.mark.parametrize("kind", ["cold", "forked"])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_reaches_the_rank(node, kind, number):
    if kind == "forked":
        node.start_standby()
    rank = node.start_rank("wait")
    rank.stdout.readline()
    rank.send_signal(number)
    out, err = rank.communicate(timeout=DEADLINE_S)
    assert (rank.returncode, out) == (75, f"{number.name}\n"), err


def test_a_signal_that_comes_while_the_rank_starts_is_kept(node):
    source = node.folder / "own_rank.py"
    source.write_text("import time\nopen('begun', 'w').close()\ntime.sleep(0.5)\n" + RANK)
    node.start_standby()
    rank = node.start_rank("wait")
    while not (node.folder / "begun").exists():
        time.sleep(0.01)
    rank.send_signal(signal.SIGUSR1)
    out, err = rank.communicate(timeout=DEADLINE_S)
    assert rank.returncode == 75 and "SIGUSR1" in out, err


def test_a_rank_dies_with_its_client_and_so_does_what_it_started(node):
    node.start_standby()
    rank = node.start_rank("wait")
    pid, child = map(int, rank.stdout.readline().split())
    rank.kill()
    assert is_gone(pid) and is_gone(child)
    assert facts_of(node)[0]["parent"] == node.standby.pid, "the next one is served"


def test_a_rank_dies_with_the_standby_and_the_next_starts_cold(node):
    node.start_standby()
    rank = node.start_rank("wait")
    pid, child = map(int, rank.stdout.readline().split())
    node.standby.kill()
    _, err = rank.communicate(timeout=DEADLINE_S)
    assert is_gone(pid) and is_gone(child)
    assert rank.returncode == 1 and "the standby has ended" in err
    facts, said = facts_of(node)
    assert "starts cold" in said and facts["loaded_by"] == facts["pid"]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"OMP_NUM_THREADS": "3secret"}, "environment: OMP_NUM_THREADS"),
        ({"LD_LIBRARY_PATH": "/3secret"}, "environment: LD_LIBRARY_PATH"),
        ({"PYTHONPATH": f"{ROOT}:/3secret"}, "environment: PYTHONPATH"),
        ({"CUDA_VISIBLE_DEVICES": "3secret"}, "environment: CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_rank_that_would_read_another_environment_starts_cold(node, more, named):
    node.start_standby()
    facts, said = facts_of(node, more=more)
    assert facts["loaded_by"] == facts["pid"]
    assert named in said and "secret" not in said, "values are nobody's business"
    assert len(said.splitlines()) == 1


def test_another_folder_or_limit_starts_cold(node):
    node.start_standby()
    other = node.folder / "other"
    other.mkdir()
    _, said = facts_of(node, cwd=other, more={"PYTHONPATH": f"{ROOT}:{node.folder}"})
    assert "PYTHONPATH" in said
    limit = ["prlimit", "--nofile=500:500", sys.executable, "-u", "-m"]
    done = subprocess.run(
        [*limit, "ftslurm.node.standby_rank", "own_rank", "leave", "3"],
        cwd=node.folder, env=node.environ, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 3 and "limits: RLIMIT_NOFILE" in done.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_rank_keeps_to_its_own_cpus(node):
    first, second = sorted(os.sched_getaffinity(0))[:2]

    def bound(*cpus):
        return {"preexec_fn": lambda: os.sched_setaffinity(0, cpus)}

    node.start_standby()
    facts, said = facts_of(node, **bound(second))
    assert "forked" in said and facts["cpus"] == [second]
    node.standby.terminate()
    node.standby.wait(DEADLINE_S)
    node.start_standby(**bound(first))
    facts, said = facts_of(node, **bound(first, second))
    assert "cold" in said and "CPUs" in said and facts["cpus"] == [first, second]


def test_changed_code_is_never_run_as_it_was(node):
    node.start_standby()
    (node.folder / "loaded.py").write_text("PID = 'new'\n")
    facts, said = facts_of(node)
    assert facts["loaded_by"] == "new"
    assert "loaded.py` is not as the standby has imported it" in said
    assert facts["parent"] == node.standby.pid, "it is watched all the same"


def test_code_written_during_the_import_is_not_trusted(tmp_path, monkeypatch):
    (tmp_path / "just_written.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    began = time.time_ns()
    os.utime(tmp_path / "just_written.py")
    import just_written  # noqa: F401

    found = standby.stamps(began)
    assert standby.first_changed(found) == str(tmp_path / "just_written.py")


def test_a_standby_that_says_nothing_costs_some_seconds(node):
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(standby_link.address(node.environ))
        mute.listen()
        began = time.monotonic()
        _, said = facts_of(node)
    assert "gave no answer (timed out)" in said
    assert time.monotonic() - began >= standby_link.ANSWER_S


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to be another user")
def test_another_user_with_the_standbys_name_learns_nothing(node):
    reader, writer = os.pipe()
    name = standby_link.address(node.environ)
    squatter = os.fork()
    if squatter == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
            server.listen()
            os.write(writer, b"up")
            connection, _ = server.accept()
            os.write(writer, connection.recv(100))
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 2) == b"up"
    _, said = facts_of(node)
    assert "another user's process has the standby's name" in said
    os.waitpid(squatter, 0)
    assert os.read(reader, 100) == b""
    os.close(reader)


def test_a_standby_that_is_told_to_leave_waits_for_its_ranks(node):
    node.start_standby()
    rank = node.start_rank("wait")
    rank.stdout.readline()
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        node.standby.send_signal(number)
    assert "about to leave" in facts_of(node)[1]
    assert node.standby.poll() is None
    rank.send_signal(signal.SIGTERM)
    assert rank.wait(DEADLINE_S) == 75
    assert node.standby.wait(DEADLINE_S) == 0


def test_an_idle_standby_leaves_at_once(node):
    node.start_standby().terminate()
    assert node.standby.wait(DEADLINE_S) == 0


def test_ranks_leave_nothing_open_behind(node):
    node.start_standby()
    opened = Path(f"/proc/{node.standby.pid}/fd")
    before = len(list(opened.iterdir()))
    for _ in range(3):
        ranks = [node.start_rank("leave", "0") for _ in range(4)]
        assert [rank.wait(DEADLINE_S) for rank in ranks] == [0] * 4
    assert all("forked" in rank.stderr.read() for rank in ranks)
    # A rank has its code before the standby closes what it had it from.
    deadline = time.monotonic() + DEADLINE_S
    while len(list(opened.iterdir())) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(list(opened.iterdir())) == before


def test_a_process_that_has_threads_serves_nobody(node):
    (node.folder / "threads.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    server = node.start("ftslurm.node.standby", "threads")
    _, err = server.communicate(timeout=DEADLINE_S)
    assert server.returncode == 1 and "have started 1 threads" in err


def test_a_process_that_holds_a_gpu_is_told(tmp_path):
    (tmp_path / "5").symlink_to("/dev/null")
    assert standby.open_device(tmp_path) is None
    (tmp_path / "6").symlink_to("/dev/nvidiactl")
    assert standby.open_device(tmp_path) == "/dev/nvidiactl"


def test_one_standby_a_node(node, monkeypatch):
    monkeypatch.setattr(standby, "_BIND_PATIENCE_S", 0.0)
    for name in ("FTSLURM_RUN_DIR", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, node.environ[name])
    node.start_standby()
    with pytest.raises(standby.RunError, match="its address is taken"):
        standby._listen()
