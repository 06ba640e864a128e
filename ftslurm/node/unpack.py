"""`python -m ftslurm.node.unpack ARCHIVE FOLDER [PYTHON]`: the ranks' environment on this node.

The batch script starts it on every node before the ranks of an attempt. FOLDER is unpacked beside
its place and renamed, by one process at a time, and never used when something of it has gone since,
or when somebody else could have made or changed it. Asked by USR1 or USR2 to leave, it leaves
between two files and says so for the ranks, which have not begun; a failure is left where a rank
would leave its own. PYTHON is the ranks' interpreter, to be checked where it can be run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import lzma
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Optional

from ftslurm.errors import RANK_DONE, RANK_FAILED, RANK_STOPPED, RunError
from ftslurm.node.environment import TAR, Environment, folder_name
from ftslurm.node.leave_word import leave_word
from ftslurm.run.rank import RankEnvironment, stop_flag, write_rank_error

_TICK_S = 0.1

_STAMP = ".ftslurm-unpacked.json"
"""In the folder: what was unpacked there, by name and size."""

Leave = Callable[[], bool]
"""True once this process has been asked to leave."""


class AskedToLeave(Exception):
    """Between two files, or while another process unpacks."""


def main(argv: list[str]) -> int:
    stop_flag.install()
    archive, folder, *further = argv
    python = further[0] if further else None
    # The local scheduler starts no job step for it.
    environ = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", **os.environ}
    env = RankEnvironment.read(environ)
    began = time.monotonic()
    try:
        wanted = Environment(Path(archive), Path(folder))
        unpacked = provide(wanted, python=python, leave=lambda: stop_flag.is_set)
    except AskedToLeave:
        _say(env, f"left while it unpacked `{archive}`, on {stop_flag.signal_name}")
        # srun --kill-on-bad-exit sends TERM to the others when one node has failed, and no word may
        # hide that.
        if stop_flag.signal_name != signal.SIGTERM.name:
            leave_word(env.layout, env.attempt, stop_flag.signal_name or "")
        return RANK_STOPPED
    except RunError as error:
        _say(env, str(error))
        first_rank = env.rank * env.local_world_size
        write_rank_error(dataclasses.replace(env, rank=first_rank), error, step=None)
        return RANK_FAILED
    if unpacked:
        _say(env, f"unpacked `{archive}` into `{folder}` in {time.monotonic() - began:.1f} s")
    return RANK_DONE


def provide(environment: Environment, *, python: Optional[str], leave: Leave) -> bool:
    """Make sure that the folder is there, whole and ours; True when this call has unpacked it.
    `python`: the ranks' interpreter, None where it can be run inside their container only."""
    folder = environment.folder
    try:
        _check_parent(folder.parent)
        unpacked = not _is_whole(folder) and _unpack_once(environment, leave)
    except (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError) as error:
        raise RunError(
            f"cluster.environment `{environment.archive}` cannot be unpacked into `{folder}` "
            f"({error}); look at the archive and at the space there, or name another "
            "cluster.environment_dir"
        ) from None
    inside = python is not None and Path(python).is_relative_to(folder)
    if python is not None and inside and not os.access(python, os.X_OK):
        raise RunError(
            f"`{python}` is not there or cannot be run: the archive needs bin/python at its top "
            "(`tar -C VENV -cf FILE .`), the interpreter it links to has to exist on the node, and "
            f"`{folder.parent}` must not be mounted noexec"
        )
    return unpacked


def _check_parent(parent: Path) -> None:
    """Nobody but us and root may be able to put another folder in our folder's place."""
    found = parent.stat()
    open_to_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if found.st_uid not in (0, os.getuid()) or (
        open_to_others and not found.st_mode & stat.S_ISVTX
    ):
        raise RunError(
            f"others could replace what is in `{parent}`; name a cluster.environment_dir that is "
            "yours or, as /tmp, sticky"
        )


def _is_there(folder: Path) -> bool:
    """RunError for a thing in its place that was not made here."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    open_to_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or open_to_others:
        raise RunError(
            f"`{folder}` is no folder of yours alone (user {found.st_uid}, mode "
            f"{stat.filemode(found.st_mode)}) and is not used; have it removed, or name another "
            "cluster.environment_dir"
        )
    return True


def _is_whole(folder: Path) -> bool:
    """There, with all that was unpacked, at the size it had.

    Cleaners of /tmp (systemd-tmpfiles: what nobody has read or changed for ten days) take single
    files, a node that lost power may keep names without their bytes.
    """
    if not _is_there(folder):
        return False
    try:
        unpacked: dict[str, int] = json.loads((folder / _STAMP).read_text())
        return unpacked.items() <= dict(_entries(folder)).items()
    except (FileNotFoundError, ValueError):
        return False


def _entries(folder: Path, place: str = "") -> Iterator[tuple[str, int]]:
    """Names and sizes of all that an interpreter does not write itself."""
    with os.scandir(folder / place) as found:
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                if entry.name != "__pycache__":
                    yield from _entries(folder, f"{place}{entry.name}/")
            else:
                yield f"{place}{entry.name}", entry.stat(follow_symlinks=False).st_size


def _unpack_once(environment: Environment, leave: Leave) -> bool:
    folder = environment.folder
    with _locked(folder.with_name(f"{folder.name}.lock"), leave):
        if _is_whole(folder):  # unpacked by the one who had the lock before
            return False
        if folder_name(environment.archive) != folder.name:
            raise RunError(
                f"cluster.environment `{environment.archive}` has changed since the run was "
                "submitted; put the old file back, or submit a new run"
            )
        for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):
            shutil.rmtree(leftover)  # of one that was killed: we hold the lock
        building = _folder_beside(folder)
        try:
            _extract(environment.archive, building, leave)
            (building / _STAMP).write_text(json.dumps(dict(_entries(building))))
            building.chmod(0o700)
            _put_in_place(building, folder)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
    return True


def _folder_beside(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))


def _put_in_place(building: Path, folder: Path) -> None:
    """In place of one that is no longer whole, which ranks of another job may be running from."""
    if not _is_there(folder):
        building.rename(folder)
        return
    old = _folder_beside(folder)
    folder.rename(old)
    building.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, leave: Leave) -> Iterator[None]:
    """One process of the node at a time; a lock ends with the process that holds it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        if os.fstat(fd).st_uid != os.getuid():
            raise RunError(f"`{path}` belongs to somebody else; have it removed")
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                _pause(leave)
        yield
    finally:
        os.close(fd)


def _extract(archive: Path, folder: Path, leave: Leave) -> None:
    if archive.name.endswith(TAR):
        _extract_tar(archive, folder, leave)
    elif shutil.which("unsquashfs"):
        options = ["-no-progress", "-no-xattrs", "-force", "-dest", str(folder)]
        _run(["unsquashfs", *options, str(archive)], leave)
    elif shutil.which("squashfuse") and shutil.which("fusermount"):
        _copy_mounted(archive, folder, leave)
    else:
        raise RunError(
            f"`{archive}` needs unsquashfs, or squashfuse with fusermount, on this node and there "
            "is neither; install squashfs-tools, or give the environment as a .tar"
        )


def _extract_tar(archive: Path, folder: Path, leave: Leave) -> None:
    # Python 3.12, and the security releases of 3.9 to 3.11, have filters. `data` would refuse the
    # absolute link that a venv's bin/python is.
    options: dict[str, Any] = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
    with tarfile.open(archive) as tar:
        tar.extractall(folder, members=_members(tar, leave), **options)


def _members(tar: tarfile.TarFile, leave: Leave) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        if leave():
            raise AskedToLeave
        if member.name.startswith("/") or ".." in Path(member.name).parts:
            raise RunError(f"the environment's archive holds `{member.name}`, outside of its top")
        # root would give the files to whoever packed them.
        member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
        yield member


def _copy_mounted(archive: Path, folder: Path, leave: Leave) -> None:
    """Not used as a mount: that would end with the job step that made it."""

    def copy(source: str, target: str) -> None:
        if leave():
            raise AskedToLeave
        shutil.copy2(source, target)

    with tempfile.TemporaryDirectory(prefix="ftslurm-mount-") as mount:
        _run(["squashfuse", str(archive), mount], leave)
        try:
            shutil.copytree(mount, folder, symlinks=True, copy_function=copy, dirs_exist_ok=True)
        finally:
            _run(["fusermount", "-u", mount], lambda: False)


def _run(argv: list[str], leave: Leave) -> None:
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            while process.poll() is None:
                _pause(leave)
        except AskedToLeave:
            process.kill()
            process.wait()
            raise
        if process.returncode:
            said.seek(0)
            last = said.read().decode(errors="replace").strip().splitlines()[-1:]
            raise OSError(f"{argv[0]} left with {process.returncode}: {' '.join(last)}")


def _pause(leave: Leave) -> None:
    if leave():
        raise AskedToLeave
    time.sleep(_TICK_S)


def _say(env: RankEnvironment, text: str) -> None:
    print(f"ftslurm: node {env.node}: {text}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
