"""`python -u -m ftslurm.node.standby MODULE...`: one process a node, out of which ranks are forked.

It imports the modules once, then forks a rank for each client of its user that is like it
(standby_rank.py), sends it the client's signals, and tells the client how it ended. A rank whose
client is gone is killed at once, with its process group; a rank dies with the standby. It leaves
when it is TERMed, with its last rank. It never runs an operation of torch, holds no GPU, starts no
thread, and serves nobody if the imports have done so. Standard library only but for the modules.

A rank takes the modules as they were imported: it is forked only from files that are still the
same, and is started anew otherwise. What OpenBLAS starts when numpy is imported is no thread at the
time of a fork: it ends its threads before one and starts them when they are next needed
(pthread_atfork in its memory.c), as a cold rank has them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Optional

from ftslurm.errors import EXIT_FAILED, EXIT_OK, RunError, UsageError, warn
from ftslurm.node.standby_link import (
    ANSWER_S,
    STANDARD_STREAMS,
    Lines,
    address,
    difference,
    is_own,
    likeness,
    send,
)
from ftslurm.parent import die_with_parent
from ftslurm.run.rank import STOP_SIGNALS, node_name, stop_flag

_BIND_PATIENCE_S = 10.0
"""A requeued job may meet the standby of its former start, which is about to end."""

_BACKLOG = 256
_IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)

_GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")

Stamp = tuple[int, int, int, int]


@dataclass
class Order:
    """A rank to be."""

    module: str
    arguments: list[str]
    environ: dict[str, str]
    cpus: list[int]
    streams: list[int]

    @property
    def argv(self) -> list[str]:
        return [sys.executable, "-u", "-m", self.module, *self.arguments]


@dataclass
class Client:
    """The other end of one rank."""

    connection: socket.socket
    lines: Lines
    order: Order
    pid: Optional[int] = None


@dataclass
class Standby:
    """Serves clients until it is told to leave and has no rank."""

    listener: socket.socket
    mine: Mapping[str, Any]
    cpus: set[int]
    clients: list[Client] = field(default_factory=list)
    is_leaving: bool = False

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._woken, self._wakes = os.pipe()
        for end in (self._woken, self._wakes):
            os.set_blocking(end, False)
        self._selector.register(self.listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        signal.set_wakeup_fd(self._wakes)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._leave)

    def serve(self) -> Optional[Order]:
        """Returns in each rank, with what it is to be; in the standby, None at its end."""
        while not (self.is_leaving and not self.clients):
            for key, _ in self._selector.select():
                if key.fileobj is self.listener:
                    self._accept()
                elif key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, 512)
                elif key.data in self.clients:
                    order = self._hear(key.data)
                    if order is not None:
                        return order
            self._reap()
        return None

    def _leave(self, number: int, frame: Optional[FrameType]) -> None:
        self.is_leaving = True

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        connection.settimeout(ANSWER_S)
        lines = Lines(connection)
        try:
            if not is_own(connection):
                raise EOFError
            asked = lines.first()
            words = {name: asked[name] for name in ("module", "arguments", "environ", "cpus")}
            refused = self._refusal(asked)
            send(connection, {"refused": refused} if refused else {"ready": True})
        except (OSError, EOFError, LookupError, ValueError):
            refused = "gone"
        if refused:
            connection.close()
            return
        client = Client(connection, lines, Order(**words, streams=lines.descriptors))
        self.clients.append(client)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _refusal(self, asked: Mapping[str, Any]) -> Optional[str]:
        if self.is_leaving:
            return "it is about to leave"
        if not set(asked["cpus"]) <= self.cpus:
            return "CPUs"
        return difference(self.mine, asked["likeness"])

    def _hear(self, client: Client) -> Optional[Order]:
        try:
            messages = client.lines.read()
        except (OSError, EOFError):
            self._drop(client)
            return None
        for message in messages:
            if "go" in message and len(client.order.streams) == len(STANDARD_STREAMS):
                if self._fork(client) == 0:
                    return client.order
            elif "signal" in message and client.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(client.pid, message["signal"])
        return None

    def _fork(self, client: Client) -> int:
        tie = die_with_parent()
        # Held back until the rank can take them; a rank is born with nothing pending.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        pid = os.fork()
        if pid == 0:
            tie()
            os.setpgid(0, 0)
            self._forget(client)
            return 0
        with contextlib.suppress(OSError):  # it may have done so, or have ended
            os.setpgid(pid, pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        client.pid = pid
        _close(client.order.streams)
        with contextlib.suppress(OSError):  # a client that is gone is found by its silence
            send(client.connection, {"pid": pid})
        return pid

    def _forget(self, own: Client) -> None:
        """In a rank: let go of all that is the standby's. A connection that stays open in a rank
        would hide from its client that the standby has ended; another rank's streams, received
        but not yet forked for, from whoever reads them that this other rank has."""
        signal.set_wakeup_fd(-1)
        for number in (*STOP_SIGNALS, *_IGNORED, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._selector.close()
        self.listener.close()
        _close([self._woken, self._wakes])
        for client in self.clients:
            client.connection.close()
            if client is not own:
                _close(client.order.streams)

    def _reap(self) -> None:
        while True:
            try:
                # Looked at before it is waited for: so long nobody else gets its number.
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            _kill_group(found.si_pid)
            _, status = os.waitpid(found.si_pid, 0)
            for client in [one for one in self.clients if one.pid == found.si_pid]:
                with contextlib.suppress(OSError):
                    send(client.connection, {"status": status})
                client.pid = None
                self._drop(client)

    def _drop(self, client: Client) -> None:
        if client.pid is not None:
            _kill_group(client.pid)
        else:
            _close(client.order.streams)
        self._selector.unregister(client.connection)
        client.connection.close()
        self.clients.remove(client)


def main(argv: list[str]) -> int:
    if not argv:
        raise UsageError("usage: python -u -m ftslurm.node.standby MODULE...")
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # Before the modules, which may change their own environment.
    mine = likeness(os.environ)
    began, clock = time.time_ns(), time.monotonic()
    for name in argv:
        importlib.import_module(name)
    imported = stamps(began)
    reason = unfit()
    if reason is not None:
        warn(f"no standby on {node_name()}: {reason}; its ranks start cold")
        return EXIT_FAILED
    # What lives now is never garbage; looked at by no rank's collector, its pages stay shared.
    gc.collect()
    gc.freeze()
    try:
        serving = Standby(_listen(), mine, os.sched_getaffinity(0))
    except RunError as error:
        warn(str(error))
        return EXIT_FAILED
    _say(f"standby on {node_name()} is ready after {time.monotonic() - clock:.1f} s: "
         f"{len(sys.modules)} modules, {pss_mib():.0f} MiB (PSS)")  # fmt: skip
    order = serving.serve()
    if order is not None:
        become(order, imported)
        return EXIT_OK
    # No need to take the modules apart, which takes torch a second.
    os._exit(EXIT_OK)


def become(order: Order, imported: Mapping[str, Optional[Stamp]]) -> None:
    """Be the rank, in the process that was forked for it."""
    for stream, descriptor in zip(order.streams, STANDARD_STREAMS):
        os.dup2(stream, descriptor)
    _close([stream for stream in order.streams if stream not in STANDARD_STREAMS])
    os.environ.clear()
    os.environ.update(order.environ)
    os.sched_setaffinity(0, order.cpus)
    changed = first_changed(imported)
    if changed is not None:
        _say(f"this rank starts cold: `{changed}` is not as the standby has imported it")
        os.execv(sys.executable, order.argv)
    stop_flag.install()
    _say(f"this rank is forked from standby {os.getppid()}")
    importlib.invalidate_caches()
    module = importlib.import_module(order.module)
    sys.argv = [str(module.__file__), *order.arguments]
    # What spawns processes (a loader's workers) starts them from the main module, whose other name
    # multiprocessing has given to the standby's; both are compared between attempts.
    sys.modules.update({"__main__": module, "__mp_main__": module})
    module.main(order.arguments)


COARSE_CLOCK_NS = 20_000_000
"""Files are stamped by a clock that is up to a tick behind (the kernel's current_time(): 10 ms)."""


def stamps(began_ns: int) -> dict[str, Optional[Stamp]]:
    """File of each imported module -> what it is told by; None: it was written meanwhile."""
    found: dict[str, Optional[Stamp]] = {}
    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)
        file = spec.origin if spec is not None and spec.has_location else None
        if file:
            stamp = _stamp(file)
            is_old = stamp is not None and stamp[0] < began_ns - COARSE_CLOCK_NS
            found[file] = stamp if is_old else None
    return found


def first_changed(imported: Mapping[str, Optional[Stamp]]) -> Optional[str]:
    """A file that is not what it was when it was imported."""
    for file, stamp in imported.items():
        if stamp is None or _stamp(file) != stamp:
            return file
    return None


def _stamp(file: str) -> Optional[Stamp]:
    try:
        found = os.stat(file)  # noqa: PTH116 - a str, thousands of times
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev


def unfit() -> Optional[str]:
    """Why this process must not be forked; None when it may."""
    device = open_device(Path("/proc/self/fd"))
    if device is not None:
        return f"the imports have opened `{device}`, which a forked process cannot use"
    # A first fork: what ends its threads for one (OpenBLAS) has done so.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    threads = len(list(Path("/proc/self/task").iterdir()))
    return None if threads == 1 else f"the imports have started {threads - 1} threads"


def open_device(descriptors: Path) -> Optional[str]:
    """A GPU's device file among links to open files."""
    for link in descriptors.iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists this folder
            target = str(link.readlink())
            if target.startswith(_GPU_FILES):
                return target
    return None


def pss_mib(pid: str = "self") -> float:
    """Memory of a process in MiB, each shared page counted in parts (proc(5), smaps_rollup)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _listen() -> socket.socket:
    deadline = time.monotonic() + _BIND_PATIENCE_S
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    while True:
        try:
            listener.bind(address(os.environ))
            listener.listen(_BACKLOG)
            return listener
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RunError(
                    f"no standby on {node_name()}: its address is taken ({error.strerror}), one "
                    "process a node is expected; the ranks start cold or from the other"
                ) from None
            time.sleep(0.2)


def _kill_group(pid: int) -> None:
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    descriptors.clear()


def _say(text: str) -> None:
    print(f"ftslurm: {text}", file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
