"""What one node of a trial does (across.py), as it is told, in the trial's own folder.

Ends when nobody speaks any more, or when its time is over; the first task then takes the folder
away and gives a job of the trial's own back, so that nothing is left when its caller was killed.
Writes nowhere but in that folder and, to measure, in a file without a name in /dev/shm and /tmp,
which goes with its process.
"""

from __future__ import annotations

import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from json import loads
from pathlib import Path
from typing import Any

from ftslurm.doctor.folder_checks import write_rate
from ftslurm.doctor.host_checks import check_host
from ftslurm.doctor.machine import machine
from ftslurm.doctor.rank_start import count_calls
from ftslurm.doctor.spoken import answer_lines
from ftslurm.doctor.watch import Watch
from ftslurm.run.mounts import mount_of
from ftslurm.scheduler.on_nodes import SILENT_S, end_own_job, task_number

BYE = "bye"
LIVES_S = 200
"""Below the job's limit, above what a trial takes."""

Order = Mapping[str, Any]
Facts = dict[str, Any]


class Trial:
    """`task`: ours of the job's tasks."""

    def __init__(self, folder: Path, task: int) -> None:
        self.folder = folder
        self.task = task
        self._watch = Watch(folder)
        self.orders: dict[str, Callable[[Order], Facts]] = {
            "hello": self._hello,
            "time": lambda _: {"at": time.time()},
            "miss": self._miss,
            "make": self._make,
            "watch": self._begin_to_watch,
            "seen": lambda _: self._watch.seen(),
            "claim": self._claim,
            "write": self._write,
            "rank_start": _rank_start,
        }

    def obey(self, order: Order) -> Facts:
        """A refusal is an answer as well."""
        try:
            return self.orders[order["do"]](order)
        except OSError as error:
            return {"error": error.strerror or str(error), "errno": error.errno}

    def _hello(self, order: Order) -> Facts:
        lines = check_host(
            os.environ, staged_bytes=order.get("staged_bytes"),
            stop_signal=str(order["signal"]), is_node=True,
        )  # fmt: skip
        mount = mount_of(self.folder)
        return {
            **machine(),
            "sees_folder": self.folder.is_dir(),
            "mount": None if mount is None else [mount.kind, mount.source],
            "lines": [asdict(line) for line in lines],
        }

    def _miss(self, order: Order) -> Facts:
        """Look in vain for what will be made, as a node that is early does; read what is there."""
        there = [name for name in order["names"] if os.path.lexists(self.folder / name)]
        texts = {name: (self.folder / name).read_text() for name in order["read"]}
        # Of files that nobody reads here: a read has the client ask for the size anew.
        sizes = {name: (self.folder / name).stat().st_size for name in order["stat"]}
        return {"there": there, "sizes": sizes, "texts": texts}

    def _make(self, order: Order) -> Facts:
        """`new`: {name: text}; `longer`: appended to; `replaced`: by a rename over it."""
        began = time.monotonic()
        for name, text in order.get("new", {}).items():
            _put(self.folder / name, text, os.O_CREAT | os.O_EXCL)
        for name, text in order.get("longer", {}).items():
            _put(self.folder / name, text, os.O_APPEND)
        for name, text in order.get("replaced", {}).items():
            beside = self.folder / f"{name}.new"
            _put(beside, text, os.O_CREAT | os.O_EXCL)
            beside.replace(self.folder / name)
        return {"took_s": time.monotonic() - began}

    def _begin_to_watch(self, order: Order) -> Facts:
        self._watch.begin(order)
        return {}

    def _claim(self, order: Order) -> Facts:
        """Which of these names we were the one to make: files, and folders as a claim does."""
        files, folders = [], []
        for number in range(order["count"]):
            if _wins(partial(_put, self.folder / f"claim-{number}", "x", os.O_CREAT | os.O_EXCL)):
                files.append(number)
            if _wins((self.folder / f"attempt-{number}").mkdir):
                folders.append(number)
        return {"files": files, "folders": folders}

    def _write(self, order: Order) -> Facts:
        place = self.folder if order["place"] == "runs" else Path(order["place"])
        return {"rate": write_rate(place, order["bytes"])}


def _rank_start(order: Order) -> Facts:
    found = count_calls(sys.executable, str(order["module"]))
    mount = mount_of(Path(found["file"])) if found.get("file") else None
    return {**found, "file_system": mount.kind if mount is not None else None}


def _put(path: Path, text: str, flags: int) -> None:
    fd = os.open(path, os.O_WRONLY | flags, 0o600)
    try:
        os.write(fd, text.encode())
        os.fsync(fd)
    finally:
        os.close(fd)


def _wins(make: Callable[[], object]) -> bool:
    try:
        make()
    except FileExistsError:
        return False
    return True


class Silence:
    """Leaves when nobody has spoken for SILENT_S, whatever hangs here meanwhile."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave
        self._began = self._heard = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def heard(self) -> None:
        self._heard = time.monotonic()

    def _watch(self) -> None:
        while True:
            time.sleep(1.0)
            now = time.monotonic()
            if now - self._heard > SILENT_S or now - self._began > LIVES_S:
                self._leave()
                os._exit(1)


def _read(lines: queue.Queue[str], silence: Silence) -> None:
    for line in sys.stdin:
        silence.heard()
        if line.strip():
            lines.put(line)
    lines.put("")


def main(argv: list[str]) -> int:
    """`argv`: the folder, and `own` where the job is the trial's."""
    folder, task = Path(argv[0]), task_number()

    def leave() -> None:
        if task == 0:
            shutil.rmtree(folder, ignore_errors=True)
            if argv[1:] == ["own"]:
                end_own_job()

    lines: queue.Queue[str] = queue.Queue()
    silence = Silence(leave)
    threading.Thread(target=_read, args=(lines, silence), daemon=True).start()
    trial = Trial(folder, task)
    try:
        while line := lines.get():
            order = loads(line)
            if order["do"] == BYE:
                break
            only = order.get("tasks")
            facts = trial.obey(order) if only is None or task in only else {"is_other": True}
            for piece in answer_lines(task, order["number"], facts):
                # In one write: tasks of one node may share a pipe.
                sys.stdout.write(piece + "\n")
                sys.stdout.flush()
    except BrokenPipeError:
        pass
    finally:
        if task == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
