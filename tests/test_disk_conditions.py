"""A run whose disk fills up, whose quota is used up, whose folders are closed or read-only: real
file systems on loop devices, an ordinary user's run on them, and root who breaks and mends.

The run goes on training, what it had committed stays whole, and it saves again once it can.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from fakes.project import RANK, Run

from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.run.attempts import numbers, read_events

ROOT = Path(__file__).resolve().parent.parent
UID = 23_517  # nobody's: root would be bound by neither rights nor quotas
STEPS = 1_000_000  # the test ends the run
DEADLINE_S = 120
FAILS = 4
"""Saves that have to fail: more than checkpoint.max_failed_saves."""
STORAGE_RANK = RANK.with_name("storage_rank.py")
LOOP = RANK.with_name("slow_loop.py")

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make and break a file system"),
    pytest.mark.skipif(not Path("/dev/loop-control").exists(), reason="needs loop devices"),
    pytest.mark.timeout(500),
]


def run_as_root(*argv):
    done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout


class Disk:
    """A small file system of its own, mounted at `self.path`."""

    def __init__(self, folder, kind, size):
        self.path, self._image = folder / "disk", folder / "image"
        self.path.mkdir()
        run_as_root("truncate", f"--size={size}", str(self._image))
        options = {"ext4": ["-q", "-m", "0"], "btrfs": ["-q", "--mixed"]}[kind]
        run_as_root(f"mkfs.{kind}", *options, str(self._image))
        run_as_root("mount", "-o", "loop", str(self._image), str(self.path))

    def close(self):
        run_as_root("umount", "--lazy", str(self.path))


class UserRun:
    """A run of an ordinary user on this machine, its run directory on the disk; without torch
    unless `entry` says otherwise."""

    def __init__(self, folder, runs, *overrides, entry="rank:tests.fakes.storage_rank:main"):
        self.folder = folder / "project"
        target = self.folder / "tests" / "fakes"
        target.mkdir(parents=True, exist_ok=True)
        for source in (RANK, STORAGE_RANK, LOOP):
            shutil.copy(source, target)
        for path in (self.folder, *self.folder.rglob("*"), runs):
            os.chown(path, UID, UID)
        self.beacon = self.folder / "beacon.json"
        told = self.ftslurm(
            "submit", "--json", "cluster=local", f"entry={entry}", f"runs_dir={runs}",
            f"steps={STEPS}", "checkpoint.interval_steps=5", "checkpoint.interval_s=0",
            "+user.step_s=0.02", f"+user.beacon={self.beacon}", *overrides,
        )  # fmt: skip
        self.job_id = json.loads(told)["job_id"]
        self.run = Run(json.loads(told)["run_dir"])

    def ftslurm(self, *arguments):
        identity = {"HOME": str(self.folder), "USER": "storage", "LOGNAME": "storage"}
        environ = {**os.environ, **identity, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", "ftslurm", *arguments], cwd=self.folder, env=environ, user=UID,
            group=UID, extra_groups=[], capture_output=True, text=True, timeout=DEADLINE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def shown(self):
        """Rank 0's word, kept outside the disk."""
        try:
            return json.loads(self.beacon.read_text())
        except FileNotFoundError:
            return {"step": 0, "failed": 0, "committed": None, "attempt": 0, "pid": None}

    def wait(self, reached):
        deadline = time.monotonic() + DEADLINE_S
        while not reached(self.shown()):
            assert time.monotonic() < deadline, f"{self.shown()}\n{self.run.says()}"
            time.sleep(0.05)
        return self.shown()

    def go_on_in_spite_of(self, condition, *, status=""):
        """Save, be broken, train on without saves, be mended, save again; all in one attempt."""
        before = self.wait(lambda now: now["committed"] is not None)
        with condition:
            broken = self.wait(lambda now: now["failed"] > before["failed"])
            during = self.wait(lambda now: now["failed"] >= before["failed"] + FAILS)
            assert during["step"] > broken["step"]
            assert self.newest().ok
            assert status in self.ftslurm("status", str(self.run.layout.root))
        after = self.wait(lambda now: (now["committed"] or 0) > during["step"])
        assert after["attempt"] == before["attempt"]

    def newest(self):
        store = CheckpointStore(self.run.layout)
        return store.verify(store.published()[0].path, full=True)

    def close(self):
        """Told to leave, the ranks save; a person ends the job."""
        layout = self.run.layout
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                environ = (entry / "environ").read_bytes()
                if f"{layout.root}".encode() in environ and entry.stat().st_uid == UID:
                    os.kill(int(entry.name), 9)


@contextlib.contextmanager
def full(disk):
    """Not a byte left for anybody."""
    filler = disk.path / "filler"
    fd = os.open(filler, os.O_WRONLY | os.O_CREAT)
    for size in (1 << 20, 1 << 12, 1):
        with contextlib.suppress(OSError):
            while True:
                os.write(fd, bytes(size))
    os.close(fd)
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def closed(*folders):
    """Root takes the folders away from their owner."""
    for folder in folders:
        os.chown(folder, 0, 0)
        folder.chmod(0o755)
    try:
        yield
    finally:
        for folder in folders:
            os.chown(folder, UID, UID)
            folder.chmod(0o700)


@contextlib.contextmanager
def read_only(folder):
    """A mount of the same file system lies over the run that takes no writes."""
    run_as_root("mount", "--bind", str(folder), str(folder))
    try:
        run_as_root("mount", "-o", "remount,bind,ro", str(folder))
        yield
    finally:
        run_as_root("umount", "--lazy", str(folder))


@contextlib.contextmanager
def over_quota(disk, runs):
    """The folder may not grow by another byte."""
    shown = run_as_root("btrfs", "qgroup", "show", "--raw", "-f", str(runs))
    group, used = re.search(r"(\d+/\d+)\s+(\d+)", shown).groups()
    # Asked of the whole file system: through the full subvolume even that is over quota.
    run_as_root("btrfs", "qgroup", "limit", used, group, str(disk.path))
    try:
        yield
    finally:
        run_as_root("btrfs", "qgroup", "limit", "none", group, str(disk.path))


@pytest.fixture
def folder():
    """Readable by the user, unlike pytest's own."""
    made = Path(tempfile.mkdtemp(prefix="ftslurm-disk-", dir="/var/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def stack():
    with contextlib.ExitStack() as undo:
        yield undo


def failures(run):
    """What the journal says of saves that failed, over all attempts."""
    layout = run.run.layout
    events = [event for n in numbers(layout) for event in read_events(layout.attempt(n))]
    return "\n".join(event["reason"] for event in events if event["kind"] == "save_failed")


def test_a_full_a_closed_and_a_read_only_disk_stop_the_saves_and_not_the_training(folder, stack):
    disk = Disk(folder, "ext4", "24M")
    stack.callback(disk.close)
    runs = disk.path / "runs"
    runs.mkdir()
    run = UserRun(folder, runs)
    stack.callback(run.close)
    layout = run.run.layout
    run.go_on_in_spite_of(full(disk), status="the run's file system is full")
    run.wait(lambda now: now["committed"] is not None)
    run.go_on_in_spite_of(closed(layout.steps, layout.attempt(1).root))
    run.go_on_in_spite_of(read_only(layout.root), status="the run's file system is read-only")

    # A rank dies while nothing can be written: neither decision nor claim has room.
    before = run.shown()
    with full(disk):
        os.kill(before["pid"], 9)
        time.sleep(2.0)
    after = run.wait(lambda now: now["attempt"] > before["attempt"] and now["committed"])
    assert after["committed"] >= before["committed"]
    told = failures(run)
    for words in ("No space left on device", "Permission denied", "Read-only file system"):
        assert words in told, told


@pytest.mark.skipif(shutil.which("mkfs.btrfs") is None, reason="needs btrfs-progs")
def test_a_quota_that_is_used_up_stops_the_saves_and_not_the_training(folder, stack):
    disk = Disk(folder, "btrfs", "128M")
    stack.callback(disk.close)
    runs = disk.path / "runs"
    run_as_root("btrfs", "subvolume", "create", str(runs))
    run_as_root("btrfs", "quota", "enable", str(disk.path))
    run = UserRun(folder, runs)
    stack.callback(run.close)
    run.go_on_in_spite_of(over_quota(disk, runs))
    assert "Disk quota exceeded" in failures(run)


@pytest.mark.full
@pytest.mark.torch
def test_real_ranks_train_through_a_full_disk_to_the_same_bits(folder, stack):
    disk = Disk(folder, "ext4", "64M")
    stack.callback(disk.close)
    runs = disk.path / "runs"
    runs.mkdir()

    def start(name):
        overrides = [f"name={name}", "steps=500", "checkpoint.interval_steps=10"]
        run = UserRun(folder, runs, *overrides, entry="tests.fakes.slow_loop:train")
        stack.callback(run.close)
        return run

    def finish(run):
        run.wait(lambda _: run.run.layout.done.exists())
        return run.run

    undisturbed = finish(start("undisturbed"))
    run = start("full")
    run.wait(lambda _: len(list(run.run.layout.steps.glob("step-*"))) > 1)
    with full(disk):
        time.sleep(8.0)
    disturbed = finish(run)
    assert numbers(disturbed.layout) == [1]
    assert failures(run).count("No space left on device") >= FAILS
    assert disturbed.digest == undisturbed.digest
    assert run.newest().ok
