"""One thread that waits for sockets and timers, and takes back what other threads have done.

Whatever may block (files on shared storage, name servers, Slurm, the end of a process) runs in a
thread of its own, so that a file server that is away never looks like a dead node. Never raises for
what a peer does: its link is closed and its owner told why.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import heapq
import queue
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Optional, Protocol

from ftslurm.agent.wire import Channel, Message, WireError
from ftslurm.errors import warn

TRUST_WITHIN_S = 5.0
"""A connection that has said nothing true by then is closed."""
MAX_UNSENT_BYTES = 64 << 20
"""A peer that is further behind than this is given up."""
PAUSE_S = 1.0
"""No new connection is looked at for so long when there is no room for one."""
_READ_BYTES = 1 << 18
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Owner(Protocol):
    """Whose link it is."""

    def received(self, link: Link, message: Message) -> None: ...

    def closed(self, link: Link, why: str) -> None: ...


class Link:
    """One connection in the loop."""

    def __init__(self, loop: Loop, sock: socket.socket, owner: Owner, key: bytes, server: bool):
        self.owner = owner
        self.node: Optional[str] = None
        """Whose agent is at the other end, once it has said so."""
        self.is_closed = False
        self._loop, self._sock = loop, sock
        self._channel = Channel(key, is_server=server)
        self._unsent = bytearray(self._channel.greeting)
        self._unsealed: list[Message] = []
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.later(TRUST_WITHIN_S, self._distrust)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message) -> None:
        """Sooner or later, in order; lost when the link closes before."""
        if self.is_closed:
            return
        if not self._channel.is_open:
            self._unsealed.append(message)
            return
        frame = self._channel.seal(message)
        self._unsent += frame
        self._loop.bytes_out += len(frame)
        self.write()

    def write(self) -> None:
        if self.is_closed:
            return
        try:
            while self._unsent:
                sent = self._sock.send(memoryview(self._unsent)[:_READ_BYTES])
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(str(error))
            return
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self.close("it does not read what it is sent")
            return
        self._loop.wants_write(self, bool(self._unsent))

    def read(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(str(error))
            return
        if not data:
            self.close("it has closed the connection")
            return
        self._loop.bytes_in += len(data)
        was_open = self._channel.is_open
        try:
            messages = self._channel.feed(data)
        except WireError as error:
            self.close(str(error))
            return
        if self._channel.is_open and not was_open:
            waiting, self._unsealed = self._unsealed, []
            for message in waiting:
                self.send(message)
        for message in messages:
            if not self.is_closed:
                self.owner.received(self, message)

    def close(self, why: str) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.forget(self)
        self._sock.close()
        self.owner.closed(self, why)

    def _distrust(self) -> None:
        if not self._channel.is_trusted:
            self.close("it has not shown that it has the job's key")


class Loop:
    """The process's one loop."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.bytes_in = 0
        self.bytes_out = 0
        self._selector = selectors.DefaultSelector()
        self._writing: set[Link] = set()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)
        self._is_over = False
        self._told: set[str] = set()

    def listen(self, host: str, owner: Callable[[], Owner]) -> int:
        """Take connections on a free port; the port."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family)
        listener.bind((host, 0))
        listener.listen(4096)
        listener.setblocking(False)

        def accept() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError as error:
                    if error.errno in _NO_ROOM:
                        # What waits stays readable, and would be tried again at once, for ever.
                        self._selector.unregister(listener)
                        self.later(PAUSE_S, look)
                        self._tell_once(f"takes no connection for now: {error}")
                    return
                self._adopt(Link(self, sock, owner(), self.key, True))

        def look() -> None:
            self._selector.register(listener, selectors.EVENT_READ, accept)

        look()
        return int(listener.getsockname()[1])

    def connect(
        self, host: str, port: int, owner: Owner, then: Callable[[Optional[Link], str], None]
    ) -> None:
        """`then` is called with the link, which may have closed meanwhile, or with None and why
        there is none."""

        def work() -> Any:
            try:
                return socket.create_connection((host, port), timeout=3.0)
            except (OSError, ValueError) as error:  # ValueError: a name that is none
                return error

        def done(result: Any) -> None:
            if not isinstance(result, socket.socket):
                then(None, str(result))
                return
            link = Link(self, result, owner, self.key, False)
            self._adopt(link)
            then(link, "")

        self.in_thread(work, done)

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._timers, (time.monotonic() + delay_s, self._count, act))

    def every(self, interval_s: float, act: Callable[[], None]) -> None:
        """Not made up for when it comes late."""

        def again() -> None:
            self.later(interval_s, again)
            act()

        self.later(interval_s, again)

    def in_thread(
        self, work: Callable[[], Any], done: Callable[[Any], None], *, otherwise: Any = None
    ) -> None:
        """`work` in a thread of its own, `done` in this one, whatever happens: with what `work`
        returns, or with `otherwise` when it raises."""

        def run() -> None:
            result = otherwise
            try:
                result = work()
            except Exception:  # noqa: BLE001 - whoever waits for the answer would wait for ever
                where = traceback.format_exc()
                self.from_thread(lambda: self._tell_mistake(where))
            self.from_thread(lambda: done(result))

        try:
            threading.Thread(target=run, daemon=True).start()
        except RuntimeError as error:  # a full process table
            self._tell_once(str(error))
            self.from_thread(lambda: done(otherwise))

    def from_thread(self, act: Callable[[], None]) -> None:
        """Have this loop's thread call `act`."""
        self._done.put(act)
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def stop(self) -> None:
        self._is_over = True

    def run(self) -> None:
        while not self._is_over:
            wait_s = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            for chosen, mask in self._selector.select(wait_s):
                self._guarded(functools.partial(self._serve, chosen.data, mask))
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                self._guarded(heapq.heappop(self._timers)[2])

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:  # noqa: BLE001 - an agent that dies of its own mistake guards nobody
            self._tell_mistake(traceback.format_exc())

    def _tell_mistake(self, where: str) -> None:
        self._tell_once(f"goes on after a mistake of its own, please report it:\n{where}")

    def _tell_once(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            tell(what)

    def wants_write(self, link: Link, wanted: bool) -> None:
        if wanted == (link in self._writing) or link.is_closed:
            return
        (self._writing.add if wanted else self._writing.discard)(link)
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if wanted else 0)
        self._selector.modify(link, mask, link)

    def forget(self, link: Link) -> None:
        self._writing.discard(link)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link)

    def _adopt(self, link: Link) -> None:
        self._selector.register(link, selectors.EVENT_READ, link)
        link.write()

    def _serve(self, data: Any, mask: int) -> None:
        if not isinstance(data, Link):
            data()
            return
        if mask & selectors.EVENT_WRITE:
            data.write()
        if mask & selectors.EVENT_READ and not data.is_closed:
            data.read()

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        while True:
            try:
                act = self._done.get_nowait()
            except queue.Empty:
                return
            self._guarded(act)


def tell(what: str) -> None:
    """A line for the batch script's output."""
    warn(f"agent: {what}")
