"""The writing side of a rank's heartbeat (heartbeat.py): what the rank tells, in a few stores.

A beat makes no system call but for the clock of the thread, takes no lock that a reader could hold,
and never raises: a rank that can make no file trains without one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Optional, Protocol

from ftslurm.errors import warn
from ftslurm.run import heartbeat as form
from ftslurm.run.heartbeat import COMPILING, EVALUATING, PHASES, SAVING, STARTING, TRAINING
from ftslurm.run.rank import RankEnvironment

WINDOW_STEPS = 10
"""Steps of which a rank gives the median, so that a reader may look as seldom as it likes."""
USUAL_STEPS = 64
"""Steps of which the median is the usual one."""
LEAST_USUAL_STEPS = 3
"""How many it takes to tell what is usual."""
_ASIDE = (EVALUATING, SAVING)
"""Phases in the midst of training that are no part of a step; so is compiling after the first."""


class DeviceClock(Protocol):
    """What a device itself tells of its steps (train/device_clock.py)."""

    def begins(self) -> None: ...

    def computed(self) -> None: ...

    def own_s(self) -> Optional[float]: ...


class Pulse:
    """The writing side; one a process, opened once. Steps and phases are told by the thread that
    opened it, collectives by any."""

    def __init__(self, memory: mmap.mmap, *, path: Optional[Path] = None, rank: int = 0) -> None:
        self.rank = rank
        self.path = path
        """None: nobody will see the beats."""
        self.device_clock: Optional[DeviceClock] = None
        self.phase_name = STARTING
        self.step = 0
        self._memory = memory
        self._owner = threading.get_ident()
        self._beats = 0
        self._phase_at = self._step_at = time.monotonic()
        self._began_at = 0.0
        self._began_cpu_s = 0.0
        self._waited_s = 0.0
        """Since the step began."""
        self._aside_s = 0.0
        """Since the step began: in other phases."""
        self._aside_cpu_s = 0.0
        self._aside_cpu_at_s = 0.0
        self._has_stepped = False
        self._last = (0.0, 0.0, 0.0)
        """Wall, own and CPU seconds of the last step."""
        self._walls = _Median(WINDOW_STEPS)
        self._owns = _Median(WINDOW_STEPS)
        self._cpus = _Median(WINDOW_STEPS)
        self._usual = _Median(USUAL_STEPS)
        self._lock = threading.Lock()
        self._collectives = 0
        self._changes = 0
        self._waits_for = 0
        self._waits_since = 0.0
        self._inside: dict[int, tuple[float, bytes]] = {}
        self._names: dict[str, bytes] = {}
        self._latest = (0.0, b"")
        self._beat()
        self._tell(0.0)

    @classmethod
    def open(cls, env: RankEnvironment, environ: Mapping[str, str] = os.environ) -> Pulse:
        """This process's pulse; one that nobody sees where no file can be made."""
        folder = form.beats_folder(environ, env.attempt)
        if folder is None:
            return cls.unseen()
        path = form.beat_file(folder, env.rank)
        try:
            form.make_private(folder)
            memory = map_new(path)
            ticks, namespace = form.start_ticks(os.getpid()) or 0, form.pid_namespace()
        except Exception as error:  # noqa: BLE001 - without a heartbeat it trains all the same
            warn(f"rank {env.rank} has no heartbeat ({error}); nobody will see it hang")
            return cls.unseen()
        # First the beat, then the header by which a reader knows the file.
        pulse = cls(memory, path=path, rank=env.rank)
        node = env.node.encode()[:64]
        names = (env.rank, env.attempt, os.getpid(), 0, 0, ticks, namespace, node, 0)
        form.HEADER.pack_into(memory, 0, form.MAGIC, *names)
        return pulse

    @classmethod
    def unseen(cls) -> Pulse:
        return cls(mmap.mmap(-1, form.SIZE_BYTES))

    def measure_over(self, steps: int) -> None:
        """How many steps the window has (recovery.straggler_window_steps)."""
        self._walls, self._owns, self._cpus = _Median(steps), _Median(steps), _Median(steps)

    def dumps_on(self, signal_number: int) -> None:
        """Say that this signal makes the process write its stacks; before, it would end it."""
        form.WORD.pack_into(self._memory, form.DUMP_SIGNAL_AT, signal_number)

    def devices_wait(self, gpu: str) -> None:
        """Say that a wait for a collective returns to the host at once (CUDA): that the host is in
        none tells nothing. `gpu`: name of the rank's own."""
        name = gpu.encode()[: form.GPU_BYTES]
        self._memory[form.GPU_AT : form.GPU_AT + len(name)] = name
        form.WORD.pack_into(self._memory, form.DEVICES_WAIT_AT, 1)

    def phase(self, name: str) -> None:
        """Enter a phase of PHASES."""
        assert name in PHASES, name
        now = time.monotonic()
        self._note_aside(name, now)
        self.phase_name, self._phase_at = name, now
        self._beat()

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """A phase in the midst of another: its time counts as no step's."""
        before = self.phase_name
        self.phase(name)
        try:
            yield
        finally:
            self.phase(before)

    def restored(self, step: int) -> None:
        """The step that training goes on from."""
        self.step = step
        self._step_at = time.monotonic()
        self.phase(COMPILING)

    def step_begins(self) -> None:
        self._began_at = time.monotonic()
        self._began_cpu_s = time.thread_time()
        self._waited_s = self._aside_s = self._aside_cpu_s = 0.0
        if self.device_clock is not None:
            self.device_clock.begins()

    def step_ended(self, step: int, *, own_s: Optional[float] = None) -> None:
        """`own_s`: what the step took without waiting for others, where the caller knows better
        than the sum of what was said to `waited` and `collective`."""
        now = time.monotonic()
        wall_s = now - self._began_at - self._aside_s if self._began_at else 0.0
        if own_s is None and self.device_clock is not None:
            own_s = self.device_clock.own_s()  # of the step before, most often
        elif own_s is None:
            own_s = max(0.0, wall_s - self._waited_s)
        cpu_s = time.thread_time() - self._began_cpu_s - self._aside_cpu_s
        self._last = (wall_s, own_s or 0.0, cpu_s)
        self.step, self._step_at = step, now
        if self._has_stepped:
            # The first step compiles, allocates and connects: no measure of those after it.
            self._walls.add(wall_s)
            if own_s is None:
                self._owns.clear()
            else:
                self._owns.add(own_s)
            self._cpus.add(cpu_s)
            self._usual.add(wall_s)
        self._has_stepped = True
        if self.phase_name != TRAINING:
            self.phase_name, self._phase_at = TRAINING, now
        self._beat()

    def counted(self, step: int, each_s: Optional[float]) -> None:
        """Steps that another process has ended since, each in so long; of their parts nothing is
        known, so they are held against no other rank's."""
        form.WORD.pack_into(self._memory, form.COUNTED_AT, 1)
        self.step, self._step_at = step, time.monotonic()
        if each_s is not None:
            self._last = (each_s, 0.0, 0.0)
            self._usual.add(each_s)
        if self.phase_name != TRAINING:
            self.phase_name, self._phase_at = TRAINING, self._step_at
        self._beat()

    def waited(self, seconds: float) -> None:
        """So much of the step was spent waiting for others; said by any thread, counted only on
        the one that trains."""
        if threading.get_ident() == self._owner and not self._is_aside(self.phase_name):
            self._waited_s += seconds

    def enter(self, name: str) -> int:
        """A collective begins; its number. `name`: operation and shape."""
        now = time.monotonic()
        with self._lock:
            self._collectives = seq = self._collectives + 1
            encoded = self._names.get(name) or self._encode(name)
            self._latest = self._inside[seq] = (now, encoded)
            if len(self._inside) > 4 * form.RING:
                del self._inside[next(iter(self._inside))]  # nobody ever waited for it
            place = form.RING_AT + form.NOTE.size * (seq % form.RING)
            form.NOTE.pack_into(self._memory, place, seq, now, 0.0, encoded)
            self._tell(now)
        return seq

    def leave(self, seq: int) -> None:
        """Collective `seq` has come to its end."""
        now = time.monotonic()
        with self._lock:
            self._end(seq, now)
            self._tell(now)

    def wait_begins(self, seq: int) -> None:
        """The thread is about to wait for collective `seq`."""
        now = time.monotonic()
        with self._lock:
            self._waits_for, self._waits_since = seq, now
            self._tell(now)

    def wait_ended(self) -> None:
        """Collective `seq` of the newest wait has come to its end."""
        now = time.monotonic()
        with self._lock:
            seq, self._waits_for = self._waits_for, 0
            self._end(seq, now)
            self._tell(now)
        self.waited(now - self._waits_since)

    @contextlib.contextmanager
    def waiting(self, seq: int) -> Iterator[None]:
        """Around the wait for collective `seq`."""
        self.wait_begins(seq)
        try:
            yield
        finally:
            self.wait_ended()

    @contextlib.contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """A collective that its caller waits for."""
        with self.waiting(self.enter(name)):
            yield

    def remove(self) -> None:
        """The process ends as it should: nobody need look for it, and the memory is given back."""
        if self.path is None:
            return
        with contextlib.suppress(OSError):
            self.path.unlink()
            form.stacks_file(self.path.parent, self.rank).unlink(missing_ok=True)
            form.nccl_pipe(self.path.parent, self.rank).unlink(missing_ok=True)
            if not any(self.path.parent.glob("rank-*")):
                form.deadline_file(self.path.parent).unlink(missing_ok=True)
            # Whoever is last; a folder with anything in it stays.
            self.path.parent.rmdir()
            self.path.parent.parent.rmdir()

    def _note_aside(self, name: str, now: float) -> None:
        """What other phases take is taken off the step."""
        if self._is_aside(self.phase_name):
            self._aside_s += now - self._phase_at
            self._aside_cpu_s += time.thread_time() - self._aside_cpu_at_s
            if self.device_clock is not None:
                self.device_clock.begins()  # of a step, what comes before is not counted either
        if self._is_aside(name):
            self._aside_cpu_at_s = time.thread_time()

    def _is_aside(self, phase: str) -> bool:
        return phase in _ASIDE or (phase == COMPILING and self._has_stepped)

    def _encode(self, name: str) -> bytes:
        if len(self._names) > 1000:
            self._names.clear()  # shapes that never come back
        self._names[name] = encoded = name.encode()[: form.NAME_BYTES]
        return encoded

    def _beat(self) -> None:
        self._beats = beats = self._beats + 1
        wall_s, own_s, cpu_s = self._last
        form.PROGRESS.pack_into(
            self._memory,
            form.PROGRESS_AT + form.SLOT * (beats & 1),
            beats,
            PHASES.index(self.phase_name),
            self.step,
            time.monotonic(),
            self._phase_at,
            self._step_at,
            wall_s,
            own_s,
            cpu_s,
            self._walls.of_full(),
            self._owns.of_full(),
            self._cpus.of_full(),
            self._usual.value if self._usual.count >= LEAST_USUAL_STEPS else 0.0,
            beats,
        )

    def _end(self, seq: int, now: float) -> None:
        """The lock is held."""
        if self._inside.pop(seq, None) is not None and seq > self._collectives - form.RING:
            place = form.RING_AT + form.NOTE.size * (seq % form.RING) + form.LEFT_AT
            form.LEFT.pack_into(self._memory, place, now)

    def _tell(self, now: float) -> None:
        """The lock is held."""
        self._changes = changes = self._changes + 1
        entered_at, name = self._inside.get(self._waits_for, self._latest)
        form.COLLECTIVE.pack_into(
            self._memory,
            form.COLLECTIVE_AT + form.SLOT * (changes & 1),
            changes,
            self._collectives,
            self._waits_for,
            now,
            entered_at,
            name,
            changes,
        )


class _Median:
    """Of the last `size` values."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._in_order: list[float] = []
        self._by_age: deque[float] = deque()
        self.value = 0.0

    @property
    def count(self) -> int:
        return len(self._by_age)

    def of_full(self) -> float:
        """0 as long as there are fewer: one odd value among two is no median."""
        return self.value if self.count == self._size else 0.0

    def clear(self) -> None:
        self._in_order.clear()
        self._by_age.clear()

    def add(self, value: float) -> None:
        ordered = self._in_order
        if len(ordered) == self._size:
            del ordered[bisect_left(ordered, self._by_age.popleft())]
        insort(ordered, value)
        self._by_age.append(value)
        self.value = ordered[(len(ordered) - 1) // 2]


def map_new(path: Path) -> mmap.mmap:
    """SIZE_BYTES of zeros that other processes may map, too."""
    # A new file: a process of an older try that still has it mapped writes where nobody looks.
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        # Not ftruncate: a store into a page that a full tmpfs cannot give is a SIGBUS.
        os.posix_fallocate(fd, 0, form.SIZE_BYTES)
        return mmap.mmap(fd, form.SIZE_BYTES)
    finally:
        os.close(fd)
