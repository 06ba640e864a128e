"""The ranks' environment on a node: whole, once, ours, or a sentence."""

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
from timeit import repeat

import pytest

from ftslurm.errors import RunError, SpecError
from ftslurm.files import read_json, write_json
from ftslurm.node import unpack
from ftslurm.node.environment import find_environment
from ftslurm.node.unpack import AskedToLeave, provide
from ftslurm.recovery.actions import REQUEUED, RESTART
from ftslurm.recovery.evidence import read_evidence, read_history
from ftslurm.recovery.policy import decide
from ftslurm.run.attempts import STOPPED, AdoptedStep, Attempt, claim, read_outcome
from ftslurm.run.layout import RunLayout
from ftslurm.run.rank import RankEnvironment, write_rank_error
from ftslurm.run.record import read_record
from ftslurm.run.spec import ClusterSpec, RecoverySpec, RunSpec, to_dict

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
        thread.join(90)
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


@pytest.mark.parametrize("gone", ["a file", "the bytes of one", "a link", "a folder", "the stamp"])
def test_a_folder_that_lost_something_is_unpacked_again(packed, node, gone):
    """As systemd-tmpfiles, or a node without power, leaves it."""
    environment = found(packed(), node)
    unpacked(environment)
    folder = environment.folder
    if gone == "a file":
        (folder / "lib" / "module.py").unlink()
    elif gone == "the bytes of one":
        (folder / "lib" / "module.py").write_text("")
    elif gone == "a link":
        (folder / "bin" / "python").unlink()
    elif gone == "a folder":
        shutil.rmtree(folder / "lib")
    else:
        (stamp,) = folder.glob(".ftslurm-*")
        stamp.unlink()
    assert unpacked(environment) is True
    assert (folder / "lib" / "module.py").read_text() == "x = 1\n"
    subprocess.run([environment.python, "-c", ""], check=True)
    assert unpacked(environment) is False
    assert {path.name for path in node.iterdir()} == {folder.name, f"{folder.name}.lock"}


def test_what_programs_have_added_to_the_folder_does_not_count(packed, node):
    environment = found(packed(), node)
    unpacked(environment)
    cache = environment.folder / "lib" / "__pycache__"
    cache.mkdir()
    (cache / "module.cpython-311.pyc").write_text("")
    (environment.folder / "lib" / "downloaded").write_text("")
    assert unpacked(environment) is False
    shutil.rmtree(cache)
    assert unpacked(environment) is False


def test_to_look_through_a_thousand_files_takes_a_few_hundredths_of_a_second(
    packed, node, tmp_path
):
    """An environment with torch has some 30,000."""
    for number in range(1000):
        (tmp_path / "venv" / "lib" / f"{number}.py").touch()
    environment = found(packed(), node)
    unpacked(environment)
    assert unpacked(environment) is False
    assert min(repeat(lambda: unpacked(environment), timer=time.process_time, number=1)) < 0.033


def test_an_interpreter_that_only_a_container_has_is_no_fault_of_the_archive(
    packed, node, tmp_path
):
    link = tmp_path / "venv" / "bin" / "python"
    link.unlink()
    link.symlink_to("/inside/only/python")
    environment = found(packed(), node)
    with pytest.raises(RunError, match="cannot be run"):
        unpacked(environment)
    assert provide(environment, python=None, leave=stay) is False


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


def new_run(tmp_path):
    """In its second attempt, on two nodes of four ranks."""
    layout = RunLayout(tmp_path / "run")
    layout.attempts.mkdir(parents=True)
    for steps in ([], [AdoptedStep(40, "d")]):
        claim(layout, Attempt(0, "7", 0, ["n1", "n2"], 0.0, adopted=steps))
    spec = RunSpec(cluster=ClusterSpec(nodes=2, tasks_per_node=4))
    write_json(layout.run_json, {
        "schema_version": 1, "run_id": "r", "created_at": 0.0, "scheduler": "local",
        "spec": to_dict(spec),
    })  # fmt: skip
    return layout


def task_environment(layout, *, rank):
    return {
        **os.environ, "PYTHONPATH": str(ROOT), "FTSLURM_RUN_DIR": str(layout.root),
        "FTSLURM_ATTEMPT": "2", "FTSLURM_TASKS_PER_NODE": "4", "MASTER_ADDR": "n1",
        "MASTER_PORT": "20000", "SLURM_NTASKS": "2", "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0", "SLURMD_NODENAME": f"n{rank + 1}",
    }  # fmt: skip


def open_file(descriptor):
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:  # closed since it was listed
        return ""


class Task:
    """The program as the batch script starts it, in a run's second attempt."""

    def __init__(self, tmp_path, environment, *, rank=0, layout=None):
        self.layout = layout or new_run(tmp_path)
        environ = task_environment(self.layout, rank=rank)
        words = [str(environment.archive), str(environment.folder), environment.python]
        argv = [sys.executable, "-m", "ftslurm.node.unpack", *words]
        self.process = subprocess.Popen(argv, env=environ, stderr=subprocess.PIPE, text=True)

    def wait_for_lock(self):
        """Its handlers are in place before it opens the lock."""
        fds = Path(f"/proc/{self.process.pid}/fd")
        deadline = time.monotonic() + 60
        while not any(open_file(fd).endswith(".lock") for fd in fds.iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def end(self):
        _, said = self.process.communicate(timeout=90)
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


@pytest.fixture
def asked_to_leave(packed, node, tmp_path):
    """Sends a signal to the program on each of `ranks` while it waits; the run's folder."""
    environment = found(packed(), node)

    def ask(name, ranks):
        layout = new_run(tmp_path)
        lock = os.open(f"{environment.folder}.lock", os.O_CREAT | os.O_RDWR, 0o600)
        unpack.fcntl.flock(lock, unpack.fcntl.LOCK_EX)  # as another job that unpacks it
        tasks = [Task(tmp_path, environment, rank=rank, layout=layout) for rank in ranks]
        for task in tasks:
            task.wait_for_lock()
            task.process.send_signal(signal.Signals[f"SIG{name}"])
        for task in tasks:
            code, said = task.end()
            assert code == 75 and f"on SIG{name}" in said and "Traceback" not in said, said
        os.close(lock)
        return layout

    return ask


def decision(layout, *, term=False):
    known = layout, read_record(layout), 2
    return decide(read_history(*known), read_evidence(*known, rc=75, term=term), RecoverySpec())


@pytest.mark.parametrize(("name", "ranks"), [("USR1", [0]), ("USR2", [1]), ("USR1", [0, 1])])
def test_whichever_node_leaves_when_it_is_asked_to_says_so_for_ranks_that_have_not_begun(
    asked_to_leave, name, ranks
):
    layout = asked_to_leave(name, ranks)
    outcome = read_outcome(layout.attempt(2))
    assert (outcome.result, outcome.step, outcome.committed_step) == (STOPPED, 40, 40)
    assert outcome.signal == f"SIG{name}"
    decided = decision(layout)
    assert (decided.action, decided.failures_in_a_row) == (REQUEUED, 0)


def test_a_node_that_failed_is_not_hidden_by_the_others_that_srun_then_ends(asked_to_leave):
    layout = asked_to_leave("TERM", [0])
    environ = {**task_environment(layout, rank=1), "SLURM_NODEID": "1"}
    error = RunError("cluster.environment `env.tar` cannot be unpacked")
    write_rank_error(RankEnvironment.read({**environ, "SLURM_PROCID": "4"}), error, step=None)
    assert read_outcome(layout.attempt(2)) is None
    decided = decision(layout)
    assert (decided.action, decided.failures_in_a_row) == (RESTART, 1)
    assert "rank 4 on n2 failed first" in decided.reason and f"{error}" in decided.reason


def test_a_job_that_is_told_to_end_while_it_unpacks_has_not_failed(asked_to_leave):
    layout = asked_to_leave("TERM", [0, 1])
    decided = decision(layout, term=True)
    assert (decided.action, decided.failures_in_a_row) == (REQUEUED, 0)
