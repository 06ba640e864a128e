"""How often a program has called should_stop(), in memory that it shares with its rank.

The program stores, the rank reads; neither waits for the other. All processes of a rank's program
count into the same place, whose only use is whether it changes and how often. Never raises: a
program without a counter runs as well.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

from ftslurm.errors import warn
from ftslurm.program.environment import CALLS_FILE
from ftslurm.run.heartbeat import beats_folder, make_private
from ftslurm.run.pulse import map_new
from ftslurm.run.rank import RankEnvironment

_FORM = struct.Struct("=Qd")
"""Calls, and CLOCK_MONOTONIC at the newest."""
_TRIES = 3


class Counter:
    """The program's side."""

    def __init__(self) -> None:
        self._memory: Optional[mmap.mmap] = None
        self._was_tried = False

    def add(self) -> None:
        memory = self._memory
        if memory is None:
            if self._was_tried:
                return
            memory = self._opened()
            if memory is None:
                return
        _FORM.pack_into(memory, 0, _FORM.unpack_from(memory)[0] + 1, time.monotonic())

    def _opened(self) -> Optional[mmap.mmap]:
        """Once: the rank has made the file before its program began, or never does."""
        self._was_tried = True
        with contextlib.suppress(KeyError, OSError, ValueError):
            fd = os.open(os.environ[CALLS_FILE], os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                self._memory = mmap.mmap(fd, _FORM.size)
            finally:
                os.close(fd)
        return self._memory


class Calls:
    """The rank's side."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path = path
        self._memory = memory

    @classmethod
    def made(cls, env: RankEnvironment, environ: Mapping[str, str] = os.environ) -> Optional[Calls]:
        """None: outside of a Slurm job, where nobody looks, or where no file can be made. Only
        where the beats are, in memory: a store into a file on a disk that fails is a SIGBUS."""
        folder = beats_folder(environ, env.attempt)
        if folder is None:
            return None
        path = folder / f"calls-{env.rank:05d}"
        try:
            make_private(folder)
            return cls(path, map_new(path))
        except OSError as error:
            warn(f"rank {env.rank} has no heartbeat ({error}); nobody will see its program hang")
            return None

    def read(self) -> tuple[int, float]:
        """Calls, and when the newest was (time.monotonic())."""
        found = _FORM.unpack_from(self._memory)
        for _ in range(_TRIES):
            again = _FORM.unpack_from(self._memory)
            if again == found:
                break
            found = again  # read in the midst of a store, or the program is at it all the time
        return int(found[0]), float(found[1])

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()
            # Of its processes; ranks have five digits each.
            for stacks in self.path.parent.glob(f"stacks-{self.path.name[-5:]}-*"):
                stacks.unlink(missing_ok=True)
            # Whoever is last; a folder with anything in it stays.
            self.path.parent.rmdir()
            self.path.parent.parent.rmdir()
