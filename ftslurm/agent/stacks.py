"""What each rank of this node is doing right now, as text, taken before anything is ended.

Python stacks by the rank's own handler (run/stack_dump.py), its newest collectives, and what the
kernel says of it: a rank that is stopped or blocked in the kernel writes no stacks, and that is the
answer. Of a program's rank, all of that of the processes of its program. Only a process that is the
rank or of its program is signalled, and only one that handles the signal. Never waits longer than
its deadline, never raises for a rank that is gone.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ftslurm.run.heartbeat import (
    UNSEEN,
    RankView,
    dump_signal,
    is_private,
    nccl_pipe,
    process_state,
    program_stacks_file,
    read_notes,
    stacks_file,
)
from ftslurm.run.process_stat import children_by_parent, descendants, process_stat
from ftslurm.run.stack_dump import DUMP_SIGNAL

DEADLINE_S = 5.0
"""A handler that has not begun by then will not: the process is stopped or in the kernel."""
_LOOK_S = 0.02
_QUIET_LOOKS = 5
"""A file that has not grown for so many is taken to be complete. Not seconds: a node that stands
still between two looks stops the writer as well."""
_THREADS = 64
"""Threads of which the kernel's side is told."""
_PROCESSES = 16
"""Of one program, likewise."""
MOST_BYTES = 256 << 10
"""Of one rank's stacks; the evidence travels to the leader."""


def take_stacks(
    views: Sequence[RankView], folder: Path, *, deadline_s: float = DEADLINE_S
) -> dict[int, str]:
    """By rank: all there is to say of it. Takes as long as the slowest answer, at most
    `deadline_s`."""
    if not is_private(folder):
        return {}
    # Once: with many ranks and processes a look at all of /proc takes longer than the deadline.
    children = children_by_parent() if any(view.counted for view in views) else {}
    writers = {view.rank: _writers(view, folder, children) for view in views}
    files = [one.file for of_rank in writers.values() for one in of_rank]
    began_at = {file: _size(file) for file in files}
    refusals = {one.file: _ask(one) for of_rank in writers.values() for one in of_rank}
    for view in views:
        _ask_nccl(folder, view.rank)
    asked = [file for file in files if refusals[file] is None]
    _await(asked, began_at, time.monotonic() + deadline_s)
    texts = {}
    for view in views:
        parts = [_facts(view), _collectives(folder, view.rank)]
        for one in writers[view.rank]:
            stacks = _new_text(one.file, began_at[one.file])
            missing = refusals[one.file] or f"none within {deadline_s:.0f} s"
            parts += [one.heading, kernel_side(one.pid, one.start_ticks)]
            parts.append(f"Python stacks:\n{stacks}" if stacks else f"Python stacks: {missing}\n")
        texts[view.rank] = "\n".join(filter(None, parts))
    return texts


@dataclass(frozen=True)
class _Writer:
    """A process that may be asked for its stacks."""

    pid: int
    start_ticks: int
    """-1: it cannot be seen from here."""
    number: int
    """The signal that it expects; 0: none."""
    file: Path
    """Where it writes."""
    heading: str = ""


def _writers(view: RankView, folder: Path, children: Mapping[int, Sequence[int]]) -> list[_Writer]:
    """The rank; of a program's rank, which only waits, the processes of the program."""
    ticks = -1 if view.proc_state == UNSEEN else view.start_ticks
    rank = _Writer(view.pid, ticks, dump_signal(folder, view.rank), stacks_file(folder, view.rank))
    if not view.counted or ticks < 0:
        return [rank]
    found = []
    for pid in descendants(view.pid, children)[:_PROCESSES]:
        stat, file = process_stat(pid), program_stacks_file(folder, view.rank, pid)
        if stat is not None:
            words = _read(Path(f"/proc/{pid}/cmdline")).split("\0")
            heading = f"Process {pid}: {shlex.join(words)[:200]}\n"
            number = DUMP_SIGNAL if file.exists() else 0
            found.append(_Writer(pid, stat.started, number, file, heading))
    return found or [rank]


def _ask(one: _Writer) -> Optional[str]:
    """Send the signal; why not, where that would be in vain or do harm."""
    if one.start_ticks < 0:
        return "the process has a container's number and cannot be signalled from here"
    state = process_state(one.pid, one.start_ticks)
    if not state:
        return "the process has ended"
    if state in ("T", "t"):
        return f"the process is stopped (state {state}), by SIGSTOP or a debugger"
    if not one.number or not _handles(one.pid, one.number):
        if one.heading:
            return "the process has not called ftslurm.should_stop(), or is no Python"
        return "the process had not come as far as to write any"
    try:
        os.kill(one.pid, one.number)
    except OSError as error:
        return f"the process cannot be signalled ({error})"
    return None


def _ask_nccl(folder: Path, rank: int) -> None:
    """Have the rank's NCCL write its record of collectives, where there is one (train/beats.py):
    its watchdog reads the pipe whatever the rank's Python does."""
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(nccl_pipe(folder, rank), flags)
        try:
            os.write(fd, b"1\n")
        finally:
            os.close(fd)


def _handles(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal, by its mask (proc(5), SigCgt): without one
    the signal would end it."""
    mask = _status(pid).get("SigCgt", "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def _await(files: Sequence[Path], began_at: Mapping[Path, int], deadline: float) -> None:
    sizes, quiet = dict(began_at), dict.fromkeys(files, 0)
    while time.monotonic() < deadline:
        for file in files:
            size = _size(file)
            quiet[file] = 0 if size != sizes[file] else quiet[file] + 1
            sizes[file] = size
        if all(sizes[file] != began_at[file] and quiet[file] >= _QUIET_LOOKS for file in files):
            return
        time.sleep(_LOOK_S)


def _facts(view: RankView) -> str:
    inside = "waits in" if view.in_collective else "last entered"
    return (
        f"rank {view.rank} on {view.node}, pid {view.pid}, attempt {view.attempt}\n"
        f"phase {view.phase} for {view.phase_age_s:.1f} s, step {view.step} ended "
        f"{view.step_age_s:.1f} s ago, usual step {view.usual_step_s:.3g} s, last sign "
        f"{view.age_s:.1f} s ago\n"
        f"{inside} collective {view.collective_seq} ({view.collective or 'none'}), "
        f"{view.collective_age_s:.1f} s ago\n"
    )


def _collectives(folder: Path, rank: int) -> str:
    lines = ["Newest collectives (number, name, entered, took):"]
    for note in read_notes(folder, rank):
        took = "still inside" if note.inside_s is None else f"{note.inside_s:.4f} s"
        lines.append(f"  {note.seq} {note.name}, {note.entered_age_s:.3f} s ago, {took}")
    return "\n".join(lines) + "\n"


def kernel_side(pid: int, start_ticks: int) -> str:
    """The threads' states, where they wait, and the stack in the kernel where it may be read."""
    if start_ticks < 0 or not process_state(pid, start_ticks):
        return "Kernel: the process has ended, or cannot be seen from here\n"
    status = _status(pid)
    wanted = ("Name", "State", "VmRSS", "Threads", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")
    lines = ["Kernel:", *(f"  {name}: {status[name]}" for name in wanted if name in status)]
    tasks = sorted(_listed(Path(f"/proc/{pid}/task")), key=int)
    for task in tasks[:_THREADS]:
        folder = Path(f"/proc/{pid}/task/{task}")
        state = _status_of(folder).get("State", "gone")
        call = _first_word(_read(folder / "syscall"))
        where = _read(folder / "wchan")
        lines.append(f"  thread {task}: {state}, system call {call or '?'}, in {where or '?'}")
        stack = _read(folder / "stack")  # root's only
        lines += [f"    {line}" for line in stack.splitlines()[:20]]
    if len(tasks) > _THREADS:
        lines.append(f"  and {len(tasks) - _THREADS} more threads")
    return "\n".join(lines) + "\n"


def _status(pid: int) -> dict[str, str]:
    return _status_of(Path(f"/proc/{pid}"))


def _status_of(folder: Path) -> dict[str, str]:
    pairs = (line.partition(":") for line in _read(folder / "status").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _first_word(text: str) -> str:
    return text.split()[0] if text.split() else ""


def _listed(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)  # noqa: PTH208
    return []


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _new_text(path: Path, start: int) -> str:
    with contextlib.suppress(OSError), path.open("rb") as stream:
        stream.seek(start)
        return stream.read(MOST_BYTES).decode(errors="replace")
    return ""
