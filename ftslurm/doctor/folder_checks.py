"""Does this folder keep what a commit relies on? Tried, not asked: with files of its own in it.

Makes a folder of its own below the one that is tested, and takes it away again, whatever happens.
Nothing else in there is touched. What two nodes see of each other is across.py's.
"""

from __future__ import annotations

import errno
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Optional

from ftslurm.doctor.line import Line, fail, ok, skipped, warn
from ftslurm.doctor.mounts import check_mount
from ftslurm.doctor.room import Need, check_room
from ftslurm.run.mounts import mount_of

SLOW_FSYNC_S = 0.5
BLOCK_BYTES = 4 << 20
SPEED_S = 10.0
CLAIMANTS, CLAIMS = 8, 10
OWN = ".ftslurm-doctor-"
LEFT_S = 3600.0
"""No trial lives so long: a folder of its own that is older was left by one that was killed."""


@contextmanager
def own_folder(folder: Path, *, now: Callable[[], float] = time.time) -> Iterator[Path]:
    """OSError when nothing can be made in `folder`. One that was left in there is taken away."""
    for left in folder.glob(f"{OWN}*"):
        with suppress(OSError):
            found = left.lstat()
            if found.st_uid == os.geteuid() and found.st_mtime < now() - LEFT_S:
                shutil.rmtree(left)
    made = Path(tempfile.mkdtemp(prefix=OWN, dir=folder))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def nearest(folder: Path) -> Path:
    """What is there of it, as far as may be seen: a folder for runs is made by the first submit."""
    folder = folder.absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    return folder


def check_folder(folder: Path, *, need: Optional[Need], size_bytes: int) -> Iterator[Line]:
    """`need`: of the checkpoints, None where nobody has said; `size_bytes`: written to measure the
    speed. Each line as soon as its trial is over."""
    try:
        with own_folder(folder) as own:
            trials: list[tuple[str, Callable[[], Line]]] = [
                (name, partial(trial, name, own)) for name, trial in _TRIALS.items()
            ]
            trials.append(("folder.room", partial(check_room, folder, need)))
            trials.append(("folder.speed", partial(_speed, "folder.speed", own, size_bytes)))
            yield check_mount(mount_of(own))
            yield from (_tried(name, trial) for name, trial in trials)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        todo = _ROOM if full else "name a folder that you can write to, with --runs"
        yield fail("folder.writable", f"`{folder}`: {error.strerror or error}", todo)


def _tried(name: str, trial: Callable[[], Line]) -> Line:
    """A trial that is refused is a finding of its own, and the others go on."""
    try:
        return trial()
    except OSError as error:
        told = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return fail(name, told, _ROOM)
        return fail(name, told, _ANOTHER)


def _exclusive_create(name: str, own: Path) -> Line:
    """Claims of an attempt rest on it: of many who make a file, one may win."""
    for number in range(CLAIMS):
        won = _winners(own / f"claim-{number}")
        if won != 1:
            told = f"of {CLAIMANTS} processes that made the same file at once, {won} did"
            return fail(name, told, _ANOTHER)
    told = f"of {CLAIMANTS} processes that made the same file at once, 1 did, {CLAIMS} times"
    return ok(name, told)


def _winners(path: Path) -> int:
    """OSError where somebody could neither make it nor see that it is there."""
    waiting, go = os.pipe()
    pids: list[int] = []
    ended: list[int] = []
    try:
        for _ in range(CLAIMANTS):
            pid = os.fork()
            if pid == 0:
                code = errno.EIO
                try:
                    os.close(go)
                    os.read(waiting, 1)  # comes back when the parent closes its end
                    os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
                    code = 0
                except OSError as error:
                    code = error.errno or code
                finally:
                    os._exit(code)
            pids.append(pid)
    finally:
        os.close(waiting)
        os.close(go)
        ended += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    for code in set(ended) - {0, errno.EEXIST}:
        number = code if code > 0 else errno.EIO  # it was killed
        raise OSError(number, os.strerror(number))
    return ended.count(0)


def _rename(name: str, own: Path) -> Line:
    """A step is published by renaming its folder; a pointer by renaming over the old one."""
    (own / "step.tmp").mkdir()
    (own / "step.tmp" / "data").write_bytes(b"1")
    (own / "step.tmp").rename(own / "step")
    (own / "new").write_bytes(b"2")
    (own / "old").write_bytes(b"1")
    (own / "new").replace(own / "old")
    (own / "other").mkdir()
    (own / "other" / "data").write_bytes(b"3")
    try:
        (own / "other").rename(own / "step")
        replaced = "a folder that is not empty was replaced by a rename"
        return fail(name, replaced, _ANOTHER)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            return fail(name, f"rename: {error.strerror}", _ANOTHER)
    if (own / "old").read_bytes() != b"2" or (own / "step" / "data").read_bytes() != b"1":
        return fail(name, "what was renamed is not what is read", _ANOTHER)
    return ok(name, "files replace each other, folders that are not empty do not")


def _fsync(name: str, own: Path) -> Line:
    """Not refused and not slow; whether the disk keeps its word cannot be seen from here."""
    took_s = []
    for number in range(8):
        began = time.perf_counter()
        with (own / f"synced-{number}").open("wb") as stream:
            stream.write(b"x" * 4096)
            os.fsync(stream.fileno())
        folder = os.open(own, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        took_s.append(time.perf_counter() - began)
    middle_s = statistics.median(took_s)
    told = f"a small file and its folder are on disk in {1e3 * middle_s:.1f} ms"
    if middle_s > SLOW_FSYNC_S:
        return warn(name, told, "commits and journals wait for it; choose a faster folder")
    return ok(name, told)


def _append(name: str, own: Path) -> Line:
    """Journals are appended to by several writers, one write each."""
    path = own / "journal"
    first = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    second = os.open(path, os.O_APPEND | os.O_WRONLY)
    try:
        for number in range(50):
            os.write(first if number % 2 else second, b"%03d\n" % number)
    finally:
        os.close(first)
        os.close(second)
    if path.read_bytes() == b"".join(b"%03d\n" % number for number in range(50)):
        return ok(name, "two writers appended 50 lines, all are there in their order")
    return fail(name, "of 50 lines of two writers some are lost or torn", _ANOTHER)


def _private(name: str, own: Path) -> Line:
    """Run directories are 0700, and pickles are trusted by their owner and mode."""
    path = own / "private"
    path.mkdir(mode=0o700)
    found = path.stat()
    if found.st_mode & 0o077 or found.st_uid != os.geteuid():
        told = f"a folder made with mode 0700 has {oct(found.st_mode & 0o777)}, uid {found.st_uid}"
        return fail(name, told, "modes and owners do not hold here; " + _ANOTHER)
    return ok(name, "modes and owners hold")


def _speed(name: str, own: Path, size_bytes: int) -> Line:
    if not size_bytes:
        return skipped(name, "not measured; --write-gb says how much to write")
    rate = write_rate(own, size_bytes)
    told = f"one writer, with fsync: {rate / 1e9:.2f} GB/s"
    if rate < 0.1e9:
        return warn(name, told, "a save of a large model will take its time; see `ftslurm plan`")
    return ok(name, told)


def write_rate(folder: Path, size_bytes: int) -> float:
    """Bytes a second, fsync included, of a new file in it; not zeros, which a disk may compress.
    As many as asked for, but a quarter of the room at most, and what takes some SPEED_S by the
    first block. The file has no name once it is there, so none is left of whoever is killed."""
    block = os.urandom(BLOCK_BYTES)
    disk = os.statvfs(folder)
    with tempfile.TemporaryFile(prefix=OWN, dir=folder, buffering=0) as stream:
        first = _rate(stream, block, 1)
        most_bytes = min(size_bytes, disk.f_bavail * disk.f_frsize // 4, first * SPEED_S)
        blocks = int(most_bytes // BLOCK_BYTES) - 1
        return _rate(stream, block, blocks) if blocks > 0 else first


def _rate(stream: IO[bytes], block: bytes, count: int) -> float:
    began = time.perf_counter()
    written = sum(stream.write(block) for _ in range(count))
    os.fsync(stream.fileno())
    return written / (time.perf_counter() - began)


_ROOM = "make room, or ask for quota"
_ANOTHER = "choose another file system for runs (--runs, runs_dir): commits are not safe here"

_TRIALS: dict[str, Callable[[str, Path], Line]] = {
    "folder.exclusive_create": _exclusive_create,
    "folder.rename": _rename,
    "folder.fsync": _fsync,
    "folder.append": _append,
    "folder.modes": _private,
}
