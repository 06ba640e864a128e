"""Running commands, and starting, recognising and ending processes of ours.

A process is ended only if it is the very one that was started: same pid, same start time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Callable, Optional

from errors import ClusterError
from record import ProcessRecord

COMMAND_TIMEOUT_S = 60
TAIL_LINES = 15

DAEMON_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def daemon_environment(slurm_conf: Path) -> dict[str, str]:
    """What daemons inherit, and through slurmd the prologs: nothing of the caller's shell."""
    return {"PATH": DAEMON_PATH, "LANG": "C.UTF-8", "SLURM_CONF": str(slurm_conf)}


def run(
    argv: Sequence[str],
    *,
    stdin: Optional[str] = None,
    env: Optional[Mapping[str, str]] = None,
    timeout_s: float = COMMAND_TIMEOUT_S,
) -> str:
    """Run a command to its end and return its output; a failure is an error in words."""
    result = attempt(argv, stdin=stdin, env=env, timeout_s=timeout_s)
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip() or "nothing on stderr"
        raise ClusterError(f"`{' '.join(argv)}` failed with code {result.returncode}: {said}")
    return result.stdout


def attempt(
    argv: Sequence[str],
    *,
    stdin: Optional[str] = None,
    env: Optional[Mapping[str, str]] = None,
    timeout_s: float = COMMAND_TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """Run a command whose failure the caller judges."""
    try:
        return subprocess.run(
            list(argv),
            input=stdin if stdin is not None else "",
            env=dict(env) if env is not None else None,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise ClusterError(f"`{argv[0]}` is not installed; run `setup-packages`") from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"`{' '.join(argv)}` gave no answer in {timeout_s:.0f} s") from error


def identify_process(pid: int) -> ProcessRecord:
    """The record of a process that is running now."""
    state, start_ticks, _ = _read_stat(pid)
    if state is None:
        raise ClusterError(f"process {pid} ended as soon as it was started")
    return ProcessRecord(pid, start_ticks)


def is_running(process: ProcessRecord) -> bool:
    """Whether that very process runs; one that waits to be reaped does not."""
    state, start_ticks, _ = _read_stat(process.pid)
    return state not in (None, "Z", "X") and start_ticks == process.start_ticks


def find_child(parent: int) -> Optional[int]:
    """The pid of a process's only child, if it has one yet."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _read_stat(int(entry.name))[2] == parent:
            return int(entry.name)
    return None


def _read_stat(pid: int) -> tuple[Optional[str], int, int]:
    """(state, start time in ticks, parent pid) of a process; state None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None, 0, 0
    # The name in parentheses may hold anything, so count from the last one.
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19]), int(fields[1])


def end_processes(processes: Sequence[ProcessRecord], *, timeout_s: float = 60) -> None:
    """Kill these very processes and wait until they are gone."""
    for process in processes:
        if is_running(process):
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # ended between the look and the kill
    left = [p.pid for p in processes]

    def gone() -> bool:
        left[:] = [p.pid for p in processes if is_running(p)]
        return not left

    if not poll(gone, timeout_s=timeout_s):
        raise ClusterError(f"processes {left} do not end; look at /proc/PID/stack of each")


def poll(
    condition: Callable[[], bool],
    *,
    timeout_s: float,
    interval_s: float = 0.05,
    now: Callable[[], float] = time.monotonic,
) -> bool:
    """Wait for a condition; False when it did not come true in time."""
    deadline = now() + timeout_s
    while not condition():
        if now() > deadline:
            return False
        time.sleep(interval_s)
    return True


def tail(path: Path, *, num_lines: int = TAIL_LINES) -> str:
    """The last lines of a log, for an error message."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return f"(no log at {path})"
    return "\n".join([f"last lines of {path}:", *lines[-num_lines:]])
