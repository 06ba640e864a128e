"""The ranks' environment on a node: whole, once, ours, or a sentence."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest

from ftslurm.errors import RunError, SpecError
from ftslurm.files import read_json
from ftslurm.node import unpack
from ftslurm.node.environment import find_environment
from ftslurm.node.unpack import AskedToLeave, provide
from ftslurm.run.attempts import STOPPED, AdoptedStep, Attempt, claim, read_outcome
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import ClusterSpec

ROOT = Path(__file__).resolve().parent.parent
WRITE = {"env.tar": "w", "env.tar.gz": "w:gz", "env.tgz": "w:gz", "env.tar.xz": "w:xz"}


def stay():
    return False


@pytest.fixture
def packed(tmp_path):
    """A folder that looks like an environment; returns a packer of it."""
    source = tmp_path / "venv"
    (source / "bin").mkdir(parents=True)
    (source / "lib").mkdir()
    (source / "bin" / "python").symlink_to(sys.executable)
    (source / "lib" / "module.py").write_text("x = 1\n")

    def pack(name="env.tar"):
        archive = tmp_path / name
        if archive.suffix == ".squashfs":
            argv = ["mksquashfs", source, archive, "-quiet", "-no-progress"]
            subprocess.run(argv, check=True, capture_output=True)
            return archive
        with tarfile.open(archive, WRITE[name]) as tar:
            tar.add(source, arcname=".")
        return archive

    return pack


@pytest.fixture
def node(tmp_path):
    """A node's own folder, sticky as /tmp is."""
    folder = tmp_path / "node"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def found(archive, node):
    cluster = ClusterSpec(environment=str(archive), environment_dir=str(node))
    return find_environment(cluster, Path("/"))


def unpacked(environment):
    return provide(environment, python=environment.python, leave=stay)


@pytest.mark.parametrize("name", WRITE)
def test_an_archive_is_unpacked_once_and_then_used_as_it_is(packed, node, name):
    environment = found(packed(name), node)
    assert unpacked(environment) is True
    assert (environment.folder / "lib" / "module.py").read_text() == "x = 1\n"
    assert stat.S_IMODE(environment.folder.stat().st_mode) == 0o700
    assert environment.folder.stat().st_uid == os.getuid()
    subprocess.run([environment.python, "-c", ""], check=True)
    assert unpacked(environment) is False
    others = {path.name for path in node.iterdir()} - {environment.folder.name}
    assert others == {f"{environment.folder.name}.lock"}


@pytest.mark.parametrize("tool", ["unsquashfs", "squashfuse"])
def test_a_squashfs_is_unpacked_by_the_tool_that_is_there(packed, node, tool, monkeypatch):
    if not shutil.which("mksquashfs") or not shutil.which(tool):
        pytest.skip(f"mksquashfs or {tool} is not installed")
    if tool == "squashfuse":
        if not shutil.which("fusermount") or not os.access("/dev/fuse", os.W_OK):
            pytest.skip("fusermount or /dev/fuse is not there")
        which = shutil.which
        monkeypatch.setattr(
            unpack.shutil, "which", lambda name: None if name == "unsquashfs" else which(name)
        )
    environment = found(packed("env.squashfs"), node)
    assert unpacked(environment) is True
    assert (environment.folder / "lib" / "module.py").read_text() == "x = 1\n"
    assert (environment.folder / "bin" / "python").is_symlink()
    subprocess.run([environment.python, "-c", ""], check=True)


def test_another_archive_of_the_same_name_is_another_folder(packed, node):
    archive = packed()
    first = found(archive, node)
    os.utime(archive, ns=(1, 1))
    assert found(archive, node).folder != first.folder


def test_two_jobs_of_a_user_on_one_node_unpack_it_once(packed, node):
    environment = found(packed(), node)
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(unpacked(environment))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(results) == [False] * 7 + [True]


def test_what_a_killed_one_left_is_removed(packed, node):
    environment = found(packed(), node)
    leftover = node / f"{environment.folder.name}.tmp-abc"
    leftover.mkdir()
    assert unpacked(environment) and not leftover.exists()


def test_a_torn_archive_leaves_nothing_and_says_so(packed, node):
    archive = packed("env.tar.gz")
    archive.write_bytes(archive.read_bytes()[:-20])
    environment = found(archive, node)
    with pytest.raises(RunError, match=r"cluster\.environment .*env.tar.gz` cannot be unpacked"):
        unpacked(environment)
    assert [path.suffix for path in node.iterdir()] == [".lock"]


def test_an_archive_that_reaches_outside_of_its_top_is_refused(tmp_path, node):
    archive = tmp_path / "env.tar"
    (tmp_path / "far").write_text("")
    with tarfile.open(archive, "w") as tar:
        tar.add(tmp_path / "far", arcname="../far")
    with pytest.raises(RunError, match=r"holds `\.\./far`"):
        unpacked(found(archive, node))


def test_an_archive_that_changed_after_submit_is_not_unpacked(packed, node):
    archive = packed()
    environment = found(archive, node)
    os.utime(archive, ns=(1, 1))
    with pytest.raises(RunError, match="has changed since the run was submitted"):
        unpacked(environment)


def test_an_archive_without_an_interpreter_at_its_top_is_named(packed, node, tmp_path):
    with tarfile.open(tmp_path / "deep.tar", "w") as tar:
        packed()
        tar.add(tmp_path / "venv", arcname="venv")
    with pytest.raises(RunError, match="needs bin/python at its top"):
        unpacked(found(tmp_path / "deep.tar", node))


@pytest.mark.parametrize("made", ["writable", "link", "file", "foreign"])
def test_a_folder_that_somebody_else_could_have_made_is_never_used(packed, node, tmp_path, made):
    environment = found(packed(), node)
    trap = tmp_path / "trap"
    trap.mkdir()
    if made == "link":
        environment.folder.symlink_to(trap)
    elif made == "file":
        environment.folder.write_text("")
    else:
        environment.folder.mkdir()
    if made == "writable":
        environment.folder.chmod(0o777)
    if made == "foreign":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(environment.folder, 12345, 12345)
    with pytest.raises(RunError, match="is no folder of yours alone"):
        unpacked(environment)
    assert not list(trap.iterdir())


def test_a_place_where_others_could_swap_the_folder_is_refused(packed, node):
    node.chmod(0o777)
    with pytest.raises(RunError, match="others could replace what is in"):
        unpacked(found(packed(), node))


def test_asked_to_leave_it_leaves_nothing(packed, node):
    environment = found(packed(), node)
    with pytest.raises(AskedToLeave):
        provide(environment, python=environment.python, leave=lambda: True)
    assert not environment.folder.exists() and not list(node.glob("*.tmp-*"))


@pytest.mark.parametrize(
    ("name", "says"),
    [("none.tar", "tar -C VENV -cf none.tar"), ("env.zip", "give a file of .tar, .tar.gz")],
)
def test_what_is_no_archive_is_refused_at_submit(tmp_path, name, says):
    (tmp_path / "env.zip").write_text("")
    with pytest.raises(SpecError, match=says):
        find_environment(ClusterSpec(environment=name), tmp_path)


class Task:
    """The program as the batch script starts it, in a run's second attempt."""

    def __init__(self, tmp_path, environment, *, rank=0):
        self.layout = RunLayout(tmp_path / "run")
        self.layout.attempts.mkdir(parents=True)
        for steps in ([], [AdoptedStep(40, "d")]):
            claim(self.layout, Attempt(0, "7", 0, ["n1", "n2"], 0.0, adopted=steps))
        environ = {
            **os.environ, "PYTHONPATH": str(ROOT), "FTSLURM_RUN_DIR": str(self.layout.root),
            "FTSLURM_ATTEMPT": "2", "FTSLURM_TASKS_PER_NODE": "4", "MASTER_ADDR": "n1",
            "MASTER_PORT": "20000", "SLURM_NTASKS": "2", "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": "0", "SLURMD_NODENAME": f"n{rank + 1}",
        }  # fmt: skip
        words = [str(environment.archive), str(environment.folder), environment.python]
        argv = [sys.executable, "-m", "ftslurm.node.unpack", *words]
        self.process = subprocess.Popen(argv, env=environ, stderr=subprocess.PIPE, text=True)

    def end(self):
        _, said = self.process.communicate(timeout=30)
        return self.process.returncode, said


def test_a_failure_is_on_record_under_the_first_rank_of_its_node(packed, node, tmp_path):
    environment = found(packed(), node)
    environment.archive.unlink()
    task = Task(tmp_path, environment, rank=1)
    code, said = task.end()
    assert code == 1
    assert said.startswith("ftslurm: node n2: cluster.environment") and "Traceback" not in said
    record = read_json(task.layout.attempt(2).ranks / "rank-00004.json")
    assert record["node"] == "n2" and "cannot be unpacked" in record["message"]


def test_success_says_how_long_it_took_and_a_second_attempt_says_nothing(packed, node, tmp_path):
    environment = found(packed(), node)
    code, said = Task(tmp_path / "a", environment).end()
    assert code == 0 and "unpacked" in said and said.rstrip().endswith(" s")
    assert Task(tmp_path / "b", environment).end() == (0, "")


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_asked_to_leave_it_says_so_for_ranks_that_have_not_begun(packed, node, tmp_path, name):
    environment = found(packed(), node)
    lock = os.open(f"{environment.folder}.lock", os.O_CREAT | os.O_RDWR, 0o600)
    unpack.fcntl.flock(lock, unpack.fcntl.LOCK_EX)  # as another job that unpacks it
    task = Task(tmp_path, environment)
    # Its handlers are in place before it opens the lock.
    fds = Path(f"/proc/{task.process.pid}/fd")
    deadline = time.monotonic() + 20
    while not any(str(fd.readlink()).endswith(".lock") for fd in fds.iterdir() if fd.is_symlink()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    task.process.send_signal(signal.Signals[f"SIG{name}"])
    code, said = task.end()
    os.close(lock)
    assert code == 75 and f"on SIG{name}" in said, said
    outcome = read_outcome(task.layout.attempt(2))
    assert (outcome.result, outcome.step, outcome.committed_step) == (STOPPED, 40, 40)
    assert json.loads(task.layout.attempt(2).outcome_json.read_text())["signal"] == f"SIG{name}"
