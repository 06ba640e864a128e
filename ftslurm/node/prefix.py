"""`python -m ftslurm.node.prefix COMMAND...`: a rank behind other words, within reach of signals.

A rank that a container starts is not the process that Slurm signals: bwrap, for one, dies of USR1
and passes nothing on, and under proctrack/cgroup only the first process of a task is signalled.
This is that process: it outlives USR1, USR2 and TERM, hands each to every process below it that
catches it, now or once it does, and leaves with the command's code. It does nothing else.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Callable, Optional

from ftslurm.errors import warn
from ftslurm.parent import die_with_parent
from ftslurm.run.process_stat import children_by_parent
from ftslurm.scheduler.process import ProcessName

FORWARDED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
_WAITED = {*FORWARDED, signal.SIGCHLD}

# Ended meanwhile, or another user's on a node that hides those (proc(5), hidepid).
_NOT_SEEN = (FileNotFoundError, ProcessLookupError, PermissionError)

_NOT_RUN = 127  # as a shell says it

_LOOK_AGAIN_S = 0.2
"""How often new catchers are looked for once a signal has come: a rank may be starting."""


def main(argv: list[str]) -> int:
    # Blocked, they are kept for sigtimedwait. Ignored, they are so in the command too until one of
    # its processes catches them: Slurm's proctrack/linuxproc signals every process of the step.
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    try:
        command = subprocess.Popen(argv, preexec_fn=_prepare())
    except OSError as error:
        said = f"ftslurm: error: `{argv[0]}` of cluster.container cannot be run: {error.strerror}"
        print(said, file=sys.stderr)  # noqa: T201
        return _NOT_RUN
    return _wait(command)


def _prepare() -> Callable[[], None]:
    """What the child does before it becomes the command."""
    die = die_with_parent()

    def prepare() -> None:
        die()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WAITED)

    return prepare


def _wait(command: subprocess.Popen[bytes]) -> int:
    came: list[int] = []
    reached: set[tuple[int, ProcessName]] = set()
    while command.poll() is None:
        found = _next_signal(_LOOK_AGAIN_S if came else None)
        if found in FORWARDED and found not in came:
            came.append(found)
        elif found in FORWARDED:
            # Asked again, all are told again.
            reached = {item for item in reached if item[0] != found}
        for number in came:
            reached |= {(number, name) for name in _tell(command.pid, number, reached)}
    code = command.returncode
    return 128 - code if code < 0 else code


def _next_signal(timeout_s: Optional[float]) -> Optional[int]:
    if timeout_s is None:
        return signal.sigwait(_WAITED)
    info = signal.sigtimedwait(_WAITED, timeout_s)
    return None if info is None else info.si_signo


def _tell(root: int, number: int, reached: set[tuple[int, ProcessName]]) -> Iterator[ProcessName]:
    for pid in _tree(root):
        name = ProcessName.of(pid) if catches(pid, number) else None
        if name is None or (number, name) in reached:
            continue
        try:
            name.send(number)
        except PermissionError:
            # A user of the container's own (/etc/subuid): not tried again.
            warn(f"process {pid} of the container may not be signalled")
        yield name


def _tree(root: int) -> list[int]:
    """`root` and all below it, as far as this user sees them; other PID namespaces included."""
    children = children_by_parent()
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler of its own for the signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except _NOT_SEEN:
        return False
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith(b"SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
