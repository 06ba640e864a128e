"""A rank's heartbeat: what it is doing, in a small file in memory that its node's agent reads.

One file of fixed size a rank and attempt, written by that rank alone through a mapping (pulse.py).
Here are its form and its reader, who never sees half a beat and never holds up a rank. What a rank
waits for counts apart from what it does itself. A rank without a file is unknown, never hung.

Times are CLOCK_MONOTONIC, one clock for all processes of a node (clock_gettime(2)), and leave this
module only as ages.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ftslurm.run.process_stat import process_stat

PHASES = (
    "starting",
    "restoring",
    "compiling",
    "training",
    "evaluating",
    "saving",
    "leaving",
)
"""compiling: from the restored state to the end of the attempt's first step."""
STARTING, RESTORING, COMPILING, TRAINING, EVALUATING, SAVING, LEAVING = PHASES

RING = 32
"""Newest collectives of which a rank keeps a note."""
SIZE_BYTES = 4096

MAGIC = b"FTSBEAT1"
# Magic, rank, attempt, pid, dump signal, whether devices wait, start ticks, namespace of the pid,
# node, whether it is counted. Three of them are told later, each by itself: packing clears what it
# is about to write.
HEADER = struct.Struct("=8sIIIIIQQ64sI")
WORD = struct.Struct("=I")
DUMP_SIGNAL_AT, DEVICES_WAIT_AT, COUNTED_AT = 20, 24, 108
# Two sections, each written to its two places in turn; see _section.
PROGRESS = struct.Struct("=QQqddddddddddQ")
COLLECTIVE = struct.Struct("=QQQdd40sQ")
NOTE = struct.Struct("=Qdd40s")  # sequence, entered, left or 0, name
LEFT = struct.Struct("=d")
LEFT_AT = 16  # in a note
SLOT = 128
PROGRESS_AT, COLLECTIVE_AT, RING_AT = 128, 384, 640
NAME_BYTES = 40
GPU_AT, GPU_BYTES = RING_AT + RING * NOTE.size, 48
_TRIES = 50

UNSEEN = "?"
"""State of a process whose numbers are those of a container: not to be looked up here."""


@dataclass(frozen=True)
class RankView:
    """One rank as its node's reader sees it. Ages are those of the moment of reading."""

    rank: int
    node: str
    pid: int
    start_ticks: int
    """Start of the process since boot, by /proc/PID/stat: pid and this name one process."""
    attempt: int
    phase: str
    step: int
    """Newest step this attempt has ended, or the one it was restored at."""
    age_s: float
    """Since the last beat of any kind."""
    phase_age_s: float
    step_age_s: float
    """Since the end of `step`, or since the first one began."""
    step_wall_s: float
    """Of the last step, evaluation left out; 0: none has ended."""
    step_own_s: float
    """Of that: not spent waiting for other ranks; 0: its device has not told."""
    step_cpu_s: float
    """Of that: on a processor, by the clock of the thread that trains."""
    window_wall_s: float
    """Median of the last WINDOW_STEPS (pulse.py) steps; 0: there are not so many yet."""
    window_own_s: float
    window_cpu_s: float
    usual_step_s: float
    """Median of the last USUAL_STEPS steps but the first; 0: there are not three yet."""
    collective_seq: int
    """How many collectives this attempt has entered, the checkpointer's left out."""
    collective: str
    """Name of the one it waits in, else of the last one it entered."""
    in_collective: bool
    """Whether it waits in `collective`; on CUDA the host does not, the device does."""
    collective_age_s: float
    """Since it entered `collective`."""
    devices_wait: bool
    """The host never waits in a collective, its device does (CUDA)."""
    alive: bool
    proc_state: str
    """Letter of /proc/PID/stat (T: stopped, D: in the kernel), empty when the process is gone, `?`
    when it cannot be seen from here; then `alive` is taken for granted."""
    gpu: str = ""
    """On which it computes, as nvidia-smi names it; empty: on none, or not known."""
    counted: bool = False
    """A program's rank: a step is a call of should_stop(), of phases and waits nothing is known."""


@dataclass(frozen=True)
class Note:
    """One collective of a rank's ring."""

    seq: int
    name: str
    entered_age_s: float
    inside_s: Optional[float]
    """None: still inside."""


def beats_folder(environ: Mapping[str, str], attempt: int) -> Optional[Path]:
    """Where the ranks of `attempt` on this node beat: in a folder of the job's, in /dev/shm or in
    what FTSLURM_BEATS names; None: outside of a Slurm job without FTSLURM_BEATS."""
    named = environ.get("FTSLURM_BEATS")
    job = environ.get("SLURM_JOB_ID", "")
    if job.isdigit():
        base = Path(named or "/dev/shm", f"ftslurm-{os.getuid()}-{job}")
    elif named:
        base = Path(named)
    else:
        return None
    return base / f"attempt-{attempt:04d}"


def beat_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}"


def stacks_file(folder: Path, rank: int) -> Path:
    """Where the rank writes its stacks (stack_dump.py)."""
    return folder / f"stacks-{rank:05d}"


def program_stacks_file(folder: Path, rank: int, pid: int) -> Path:
    """Likewise, a process of the rank's program (program/stacks.py)."""
    return folder / f"stacks-{rank:05d}-{pid}"


def deadline_file(folder: Path) -> Path:
    """Until when the ranks of this node may save (deadline.py)."""
    return folder / "deadline"


def nccl_pipe_stem(folder: Path) -> str:
    """To which torch adds the rank and `.pipe`: a line in there has NCCL's record written."""
    return str(folder / "nccl-")


def nccl_pipe(folder: Path, rank: int) -> Path:
    return Path(f"{nccl_pipe_stem(folder)}{rank}.pipe")


def is_private(folder: Path) -> bool:
    """Whether `folder` and its parent are this user's: whoever else has laid them could have put
    anything there, which is neither believed nor signalled."""
    return _is_own_folder(folder.parent) and _is_own_folder(folder)


def read_views(folder: Path, node: str) -> list[RankView]:
    """The ranks of `node` that beat in `folder`, by rank."""
    views: list[RankView] = []
    if not is_private(folder):
        return views
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("rank-*")):
            with contextlib.suppress(OSError):
                view = _read(path, node)
                if view is not None:
                    views.append(view)
    return views


def read_notes(folder: Path, rank: int) -> list[Note]:
    """The rank's newest collectives, oldest first; those being written are left out."""
    try:
        with _opened(beat_file(folder, rank)) as fd:
            data, again = (os.pread(fd, SIZE_BYTES, 0) for _ in range(2))
    except OSError:
        return []
    now = time.monotonic()
    notes = []
    for place in range(RING_AT, RING_AT + RING * NOTE.size, NOTE.size):
        seq, entered_at, left_at, name = NOTE.unpack_from(data, place)
        if seq and data[place : place + NOTE.size] == again[place : place + NOTE.size]:
            inside_s = left_at - entered_at if left_at else None
            notes.append(Note(seq, _text(name), now - entered_at, inside_s))
    return sorted(notes, key=lambda note: note.seq)


def dump_signal(folder: Path, rank: int) -> int:
    """The signal on which the rank writes its stacks; 0: it does not (yet)."""
    try:
        with _opened(beat_file(folder, rank)) as fd:
            return int(WORD.unpack(os.pread(fd, WORD.size, DUMP_SIGNAL_AT))[0])
    except OSError:
        return 0


def process_state(pid: int, ticks: int) -> str:
    """Letter of the state of the process that began at `ticks`; empty: it is gone."""
    found = process_stat(pid)
    return found.state if found is not None and found.started == ticks else ""


def start_ticks(pid: int) -> Optional[int]:
    """When `pid` began, in clock ticks since boot; None: there is no such process."""
    found = process_stat(pid)
    return None if found is None else found.started


def pid_namespace() -> int:
    """Names the numbering of processes that this one sees (pid_namespaces(7)); 0: unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116
    except OSError:
        return 0


def make_private(folder: Path) -> None:
    """`folder` and its parent, ours alone. /dev/shm is everybody's: what another user has put in
    the way is an OSError, and never written into."""
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own_folder(path):
            raise PermissionError(f"`{path}` is not a folder of this user's")


def _is_own_folder(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A beat's file of this user, to be read; anything else is a PermissionError."""
    # Without O_NONBLOCK a pipe in its place would be waited for.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
        if not is_own or found.st_size < SIZE_BYTES or os.pread(fd, len(MAGIC), 0) != MAGIC:
            raise PermissionError(f"`{path}` is no heartbeat of this user's")
        yield fd
    finally:
        os.close(fd)


def _read(path: Path, node: str) -> Optional[RankView]:
    """None: of another node, or not to be understood."""
    with _opened(path) as fd:
        header = os.pread(fd, HEADER.size, 0)
        progress = _section(fd, PROGRESS_AT, PROGRESS)
        collective = _section(fd, COLLECTIVE_AT, COLLECTIVE)
        gpu = os.pread(fd, GPU_BYTES, GPU_AT)
    fields = HEADER.unpack(header)
    _, rank, attempt, pid, _, devices_wait, ticks, namespace, own_node, counted = fields
    is_known = progress[0] < len(PHASES) and path == beat_file(path.parent, rank)
    if not is_known or _text(own_node) != node:
        return None
    now = time.monotonic()
    phase, step, beat_at, phase_at, step_at, wall_s, own_s, cpu_s, *medians = progress
    seq, waits_for, told_at, entered_at, name = collective
    state = process_state(pid, ticks) if namespace == pid_namespace() else UNSEEN
    return RankView(
        rank=rank,
        node=node,
        pid=pid,
        start_ticks=ticks,
        attempt=attempt,
        phase=PHASES[phase],
        step=step,
        age_s=now - max(beat_at, told_at),
        phase_age_s=now - phase_at,
        step_age_s=now - step_at,
        step_wall_s=wall_s,
        step_own_s=own_s,
        step_cpu_s=cpu_s,
        window_wall_s=medians[0],
        window_own_s=medians[1],
        window_cpu_s=medians[2],
        usual_step_s=medians[3],
        collective_seq=seq,
        collective=_text(name),
        in_collective=waits_for != 0,
        collective_age_s=now - entered_at if seq else 0.0,
        devices_wait=devices_wait != 0,
        # A zombie trains no more.
        alive=state not in ("", "Z", "X"),
        proc_state=state,
        gpu=_text(gpu),
        counted=counted != 0,
    )


def _section(fd: int, offset: int, form: struct.Struct) -> tuple[Any, ...]:
    """The newest whole beat of a section.

    The writer takes its two places in turn, so that one of them is whole even if it is stopped in
    the midst of a beat. Whole: the number at the beginning is that at the end, and a second read
    finds the same, since a copy may overtake, or be overtaken by, what is written meanwhile.
    """
    newest: tuple[Any, ...] = (0,)
    before = b""
    for _ in range(_TRIES):
        data = os.pread(fd, 2 * SLOT, offset)
        for place in (0, SLOT):
            values = form.unpack_from(data, place)
            is_steady = data[place : place + form.size] == before[place : place + form.size]
            if is_steady and values[0] == values[-1] and values[0] > newest[0]:
                newest = values
        if len(newest) > 1:
            return newest[1:-1]
        before = data
    raise OSError(f"no whole beat in {_TRIES} reads")


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")
