"""A command or a function, run in a child of its own process group, with a deadline.

On return the child is gone, or it is abandoned and `Ended` says so: a process that waits in the
kernel for a dead driver (state D) takes no signal, and whoever waits for it waits for ever. So it
gets TERM, a short wait, one KILL, a short wait, and no more: killing a stuck monitor again and
again has frozen GPUs (NVIDIA/dcgm-exporter#84). Nothing here raises because of what a child does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

OUTPUT_LIMIT_BYTES = 4 << 20
TERM_WAIT_S = 0.5
KILL_WAIT_S = 0.5
NOT_RUN = 127
"""Exit status of a command that could not be started; its stderr says why."""

_TICK_S = 0.02
_ORPHAN_S = 5.0


@dataclass(frozen=True)
class Ended:
    """How a child ended. `code`: its exit status, -N for signal N, None for one abandoned."""

    code: Optional[int]
    stdout: bytes
    stderr: bytes
    is_late: bool
    """It was still running at its deadline."""
    is_cut: bool
    """It wrote more than the limit; the rest was read and thrown away."""
    pid: int
    start_ticks: str
    """With `pid` the name of this process for ever; see `is_running`."""
    wall_s: float

    @property
    def is_abandoned(self) -> bool:
        return self.code is None


def run_command(
    argv: Sequence[str],
    *,
    deadline_s: float,
    env: Optional[Mapping[str, str]] = None,
    limit_bytes: int = OUTPUT_LIMIT_BYTES,
) -> Ended:
    """Run `argv` (looked up in PATH). Not by subprocess: its Popen waits for the exec, and an exec
    from a dead file server does not come back."""
    environment = dict(os.environ if env is None else env)

    def execute() -> None:
        os.execvpe(argv[0], list(argv), environment)

    return _run(execute, deadline_s=deadline_s, limit_bytes=limit_bytes)


def run_function(
    function: Callable[[Callable[[bytes], None]], None],
    *,
    deadline_s: float,
    limit_bytes: int = OUTPUT_LIMIT_BYTES,
) -> Ended:
    """Run `function(write)` in a fork. `stdout` has what it wrote, also where it was cut off."""

    def call() -> None:
        function(_write)

    return _run(call, deadline_s=deadline_s, limit_bytes=limit_bytes)


def is_running(pid: int, start_ticks: str, *, proc: Path = Path("/proc")) -> bool:
    """Whether an abandoned child is still there: do not start another one beside it."""
    return bool(start_ticks) and ticks_of(pid, proc) == start_ticks


def _run(body: Callable[[], None], *, deadline_s: float, limit_bytes: int) -> Ended:
    began = time.monotonic()
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_the_child(body, out_write, err_write, deadline_s)
    os.close(out_write)
    os.close(err_write)
    with contextlib.suppress(OSError):  # the child has done it, or is past its exec (EACCES)
        os.setpgid(pid, pid)
    start_ticks = ticks_of(pid, Path("/proc"))
    streams = {out_read: bytearray(), err_read: bytearray()}
    attending = _Attending(pid, streams, limit_bytes)
    try:
        is_late = not attending.wait(began + deadline_s)
        if is_late:
            for number, wait_s in ((signal.SIGTERM, TERM_WAIT_S), (signal.SIGKILL, KILL_WAIT_S)):
                _signal_group(pid, number)
                if attending.wait(time.monotonic() + wait_s):
                    break
    finally:
        os.close(out_read)
        os.close(err_read)
    return Ended(
        code=attending.reap(),
        stdout=bytes(streams[out_read]),
        stderr=bytes(streams[err_read]),
        is_late=is_late,
        is_cut=attending.is_cut,
        pid=pid,
        start_ticks=start_ticks,
        wall_s=time.monotonic() - began,
    )


def _be_the_child(body: Callable[[], None], out: int, err: int, deadline_s: float) -> None:
    """Never returns: what the parent would do on its way out (finally, atexit) is not ours."""
    code = 1
    try:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        # A lock of the parent must not be held on by a child that cannot be killed.
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            if int(name) > 2:
                with contextlib.suppress(OSError):  # the listing's own
                    os.close(int(name))
        # Python runs its handlers between two bytecodes, so never inside a call that hangs.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        # Should the parent be killed, nobody watches the deadline any more; the timer outlives
        # an exec (execve(2)).
        signal.setitimer(signal.ITIMER_REAL, max(deadline_s, 0.0) + _ORPHAN_S)
        body()
        code = 0
    except OSError as error:
        code = NOT_RUN
        os.write(2, f"{error}\n".encode(errors="replace"))
    except BaseException as error:  # noqa: BLE001
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace")[:4096])
    finally:
        os._exit(code)


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


class _Attending:
    """Reads what the child writes until it has ended."""

    def __init__(self, pid: int, streams: dict[int, bytearray], limit_bytes: int) -> None:
        self.pid = pid
        self.streams = streams
        self.open = set(streams)
        self.limit_bytes = limit_bytes
        self.is_cut = False
        self.has_ended = False

    def wait(self, until: float) -> bool:
        """Whether the child ended before `until`. Others that hold its pipe are not waited for."""
        while not self.has_ended:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            self._read(min(left_s, _TICK_S))
            # WNOWAIT leaves a zombie, so that its number stays that of its group.
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            self.has_ended = os.waitid(os.P_PID, self.pid, flags) is not None
        while self._read(0.0):
            pass
        return True

    def reap(self) -> Optional[int]:
        if not self.has_ended:
            return None
        _signal_group(self.pid, signal.SIGKILL)  # what it has left behind in its group
        _, status = os.waitpid(self.pid, 0)
        return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def _read(self, wait_s: float) -> bool:
        """Read once what is there; False when there was nothing."""
        if not self.open:
            time.sleep(min(wait_s, _TICK_S / 4))
            return False
        ready, _, _ = select.select(list(self.open), [], [], wait_s)
        for fd in ready:
            data = os.read(fd, 65536)
            if not data:
                self.open.discard(fd)
            kept = self.streams[fd]
            room = self.limit_bytes - len(kept)
            self.is_cut = self.is_cut or len(data) > room
            kept += data[: max(room, 0)]
        return bool(ready) and not (self.has_ended and self.is_cut)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def ticks_of(pid: int, proc: Path) -> str:
    """Field 22 of /proc/PID/stat (proc(5)); the name in field 2 may hold blanks and brackets."""
    try:
        text = (proc / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in "ZX":
        return ""
    return fields[19]
