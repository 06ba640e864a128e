"""What a node keeps before anything is reset: `collect(folder, node)` writes nodes/NODE.json.

GPU state, kernel log, RDMA counters, storage and memory, as they are now. Each probe is a process
group of its own with a deadline: TERM, one KILL, then it is left behind and said to be. A tool that
is missing, or may not be used, is noted and nothing fails. Nothing is reset and nothing is changed;
no file of a shared file system is opened here, its `df` may hang without holding us up.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Optional

from ftslurm.agent.kernel_log import KERNEL_BYTES, boot_time, read_kmsg
from ftslurm.files import write_json
from ftslurm.run.mounts import TABLE, mount_above

SCHEMA_VERSION = 1

TERM_S = 1.0
"""From TERM to KILL, and from KILL until a process counts as one that does not die (D state)."""

_LEFT_OUT = "\n[... left out ...]\n"

# Of /sys/class/infiniband/DEVICE/ports/N/; a healthy port counts some errors too.
_PORT_FILES = ("state", "phys_state", "rate", "link_layer", "counters/*", "hw_counters/*")


@dataclass(frozen=True)
class Probe:
    """A question to the node, as a command."""

    name: str
    argv: Sequence[str]
    deadline_s: float
    most_bytes: int


def probes(run_dir: Optional[str], *, sysfs: Path = Path("/sys")) -> list[Probe]:
    ports = [
        str(path)
        for pattern in _PORT_FILES
        for path in sorted(sysfs.glob(f"class/infiniband/*/ports/*/{pattern}"))
    ]
    asked = [
        # An RPC that times out in the driver takes 45 s each (Xid 119): one call, not many.
        Probe("nvidia-smi", ["nvidia-smi", "-q"], 10.0, 96 << 10),
        Probe("dmesg", ["dmesg"], 5.0, KERNEL_BYTES),
        Probe("memory", ["cat", "/proc/meminfo", "/proc/pressure/memory"], 3.0, 8 << 10),
    ]
    if ports:
        # `name:value` a line. A counter is read from the firmware, which may not answer.
        asked.append(Probe("infiniband", ["grep", "-sH", ".", *ports], 5.0, 32 << 10))
    if run_dir:
        asked.append(Probe("df", ["df", "-P", "-k", run_dir], 5.0, 4 << 10))
        asked.append(Probe("inodes", ["df", "-P", "-i", run_dir], 5.0, 4 << 10))
    asked.append(Probe("shm", ["df", "-P", "-k", "/dev/shm"], 5.0, 4 << 10))
    return asked


def collect(
    folder: Path,
    node: str,
    *,
    run_dir: Optional[str] = None,
    within_s: Optional[float] = None,
    kernel_after: Optional[int] = None,
    asked: Optional[Sequence[Probe]] = None,
    kmsg: Path = Path("/dev/kmsg"),
    mounts: Path = TABLE,
    environ: Mapping[str, str] = os.environ,
) -> Path:
    """The file it has written, below `folder` (the attempt's evidence). Takes no longer than the
    longest deadline, `within_s` at most, and 2 x TERM_S. `run_dir`: default FTSLURM_RUN_DIR.
    `kernel_after`: number of the kernel's newest line before the attempt."""
    run_dir = run_dir or environ.get("FTSLURM_RUN_DIR")
    began_at = time.time()
    kernel, why_not = read_kmsg(kmsg)
    if asked is None:
        asked = probes(run_dir)
    if within_s is not None:
        asked = [replace(one, deadline_s=min(one.deadline_s, within_s)) for one in asked]
    if kernel:  # dmesg would print the same, without the time of day
        asked = [probe for probe in asked if probe.name != "dmesg"]
    answers = run_all(asked)
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "node": node,
        "at": began_at,
        "took_s": round(time.time() - began_at, 3),
        "boot_at": boot_time(),
        "run_dir": run_dir,
        "mount": mount_of(run_dir, mounts) if run_dir else None,
        "kernel_after": kernel_after,
        "kernel": kernel,
        "probes": {answer.probe.name: answer.to_record() for answer in answers},
    }
    if why_not:
        record["kernel_unread"] = why_not
    path = folder / "nodes" / f"{node}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
    return path


@dataclass
class Answer:
    """What a probe has said so far."""

    probe: Probe
    process: Optional[subprocess.Popen[bytes]] = None
    began: float = 0.0
    took_s: float = 0.0
    note: str = ""
    """Why the answer is not whole; empty: it is."""
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False

    def to_record(self) -> dict[str, Any]:
        text = bytes(self.data).decode(errors="replace")
        most = self.probe.most_bytes
        if len(text) > most:
            text = text[: most // 4] + _LEFT_OUT + text[len(text) - most * 3 // 4 :]
        rc = self.process.returncode if self.process else None
        record = {"argv": list(self.probe.argv)[:4], "rc": rc, "text": text}
        return {**record, "took_s": round(self.took_s, 3), **({"note": self.note} if self.note
                                                              else {})}  # fmt: skip


def run_all(asked: Sequence[Probe]) -> list[Answer]:
    """All at once: they take as long as the slowest of them."""
    answers = [_start(probe) for probe in asked]
    with selectors.DefaultSelector() as selector:
        for answer in answers:
            if answer.process is not None and answer.process.stdout is not None:
                os.set_blocking(answer.process.stdout.fileno(), False)
                selector.register(answer.process.stdout, selectors.EVENT_READ, answer)
        while selector.get_map():
            for key, _ in selector.select(_patience_s(answers)):
                if _read(key.data):
                    selector.unregister(key.fileobj)
            for key in list(selector.get_map().values()):
                if _is_overdue(key.data):
                    selector.unregister(key.fileobj)
                    key.data.ended = True
    for answer in answers:
        _finish(answer)
    return answers


def _start(probe: Probe) -> Answer:
    answer = Answer(probe, began=time.monotonic())
    try:
        answer.process = subprocess.Popen(
            probe.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError as error:
        answer.ended = True
        answer.note = (
            f"`{probe.argv[0]}` is not on this node"
            if error.errno == errno.ENOENT
            else f"`{probe.argv[0]}` cannot be run: {os.strerror(error.errno or 0)}"
        )
    return answer


def _patience_s(answers: Sequence[Answer]) -> float:
    now = time.monotonic()
    due = [item.began + item.probe.deadline_s - now for item in answers if not item.ended]
    return max(0.0, min(due, default=0.0))


def _is_overdue(answer: Answer) -> bool:
    if time.monotonic() < answer.began + answer.probe.deadline_s:
        return False
    answer.note = f"no end within {answer.probe.deadline_s:g} s"
    return True


def _read(answer: Answer) -> bool:
    """True when there is no more to come. What exceeds the bound is read and dropped, so that its
    writer can end; the end of a text is kept rather than its middle."""
    assert answer.process is not None and answer.process.stdout is not None
    try:
        data = os.read(answer.process.stdout.fileno(), 1 << 16)
    except BlockingIOError:
        return False
    except OSError as error:
        answer.note = f"cannot be read: {error}"
        data = b""
    answer.data += data
    keep = 2 * answer.probe.most_bytes
    if len(answer.data) > 2 * keep:
        del answer.data[answer.probe.most_bytes : len(answer.data) - answer.probe.most_bytes]
    answer.ended = not data
    return not data


def _finish(answer: Answer) -> None:
    """End what is still there: one KILL helps a process or none does (a D state outlives it)."""
    process = answer.process
    if process is None:
        return
    patience_s = 0.2 if not answer.note else 0.0
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        if number:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            patience_s = TERM_S
        try:
            process.wait(patience_s)
            break
        except subprocess.TimeoutExpired:
            continue
    else:
        answer.note += f"; process {process.pid} does not die and is left behind"
    if process.stdout is not None:
        process.stdout.close()
    answer.took_s = time.monotonic() - answer.began


def mount_of(path: str, mounts: Path) -> Optional[dict[str, str]]:
    """The mount that `path` lies on, as evidence: nothing of it is touched, it may hang."""
    found = mount_above(path, mounts)
    if found is None:
        return None
    return {
        "point": found.point,
        "type": found.kind,
        "source": found.source,
        "options": found.told_options,
    }
