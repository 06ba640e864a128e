"""The shared folder that root leaves a node's verdicts in, and in which runs read them.

FOLDER/NODE/latest.json is the newest look, FOLDER/NODE/JOB.json the one at the end of a job; a
reader opens them by name and lists nothing. Only root writes, and a reader believes nothing that
anyone else could have written; what cannot be believed or read is a note, never an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ftslurm.errors import FormatError, FtslurmError
from ftslurm.health.child import run_function
from ftslurm.health.report import Report, parse_report, report_record
from ftslurm.health.root_only import ROOT, others_may_write
from ftslurm.health.state_dir import StateDir

LATEST = "latest.json"
JOBS_KEPT = 32
WRITE_S = 3.0
"""A shared file system that does not answer must not hold up an epilog."""
_MOST_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


def write_verdicts(folder: Path, report: Report, *, deadline_s: float = WRITE_S) -> str:
    """Leave the report there; a sentence says why it could not be. Done in a child: it may hang."""

    def body(write: Callable[[bytes], None]) -> None:
        try:
            _write(folder, report)
        except (FtslurmError, OSError) as error:
            write(str(error).encode(errors="replace"))

    ended = run_function(body, deadline_s=deadline_s)
    if ended.is_late:
        return f"verdicts are not in `{folder}`: it did not answer within {deadline_s:g} s"
    said = ended.stdout or ended.stderr
    if said or ended.code != 0:
        text = said.decode(errors="replace").strip()[:500]
        return f"verdicts are not in `{folder}`: {text or f'the writer ended with {ended.code}'}"
    return ""


def _write(folder: Path, report: Report) -> None:
    if not _NAME.fullmatch(report.node):
        raise FormatError(f"`{report.node}` is no name of a node")
    record = report_record(report)
    with StateDir(folder, mode=0o755):
        pass  # made where it is missing, and root's alone
    with StateDir(folder / report.node, mode=0o755) as place:
        place.write_json(LATEST, record)
        if report.context != "epilog" or not _NAME.fullmatch(report.job):
            return
        place.write_json(f"{report.job}.json", record)
        jobs = [name for name in place.names() if name.endswith(".json") and name != LATEST]
        for name in jobs[JOBS_KEPT:]:
            place.remove(name)


def read_verdicts(
    folder: Path, nodes: Sequence[str], *, job: str = ""
) -> tuple[list[Report], list[str]]:
    """(reports, notes): of each node its report on `job` and its latest. A node without one is no
    note: it may have none to give."""
    reports, notes = [], []
    for node in nodes:
        for name in (f"{job}.json", LATEST) if job else (LATEST,):
            try:
                report = _read(folder, node, name)
            except FileNotFoundError:
                continue
            except OSError as error:
                notes.append(f"`{folder / node / name}` cannot be read ({error.strerror})")
                continue
            except FormatError as error:
                notes.append(str(error))
                continue
            if report not in reports:
                reports.append(report)
    return reports, notes


def _read(folder: Path, node: str, name: str) -> Report:
    if not (_NAME.fullmatch(node) and _NAME.fullmatch(name)):
        raise FormatError(f"`{node}` is no name of a node, or `{name}` none of a job")
    where = str(folder / node / name)
    with contextlib.ExitStack() as stack:
        top = stack.enter_context(_opened(folder, os.O_DIRECTORY))
        place = stack.enter_context(
            _opened(folder / node, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
        )
        # Without O_NONBLOCK, a FIFO would have the reader wait for a writer (fifo(7)).
        flags = os.O_NOFOLLOW | os.O_NONBLOCK
        fd = stack.enter_context(_opened(folder / node / name, flags, dir_fd=place))
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FormatError(f"`{where}` is no regular file, so it is not believed")
        data = os.read(fd, _MOST_BYTES)
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        raise FormatError(f"`{where}` is not JSON; it is torn or not ours") from None
    report = parse_report(record, where=where)
    if report.node != node:
        raise FormatError(f"`{where}` speaks of node `{report.node}`, so it is not believed")
    return report


@contextlib.contextmanager
def _opened(path: Path, flags: int, *, dir_fd: int = -1) -> Iterator[int]:
    """Opened by its last name below `dir_fd`, and nobody's but root's."""
    name, at = (path.name, dir_fd) if dir_fd >= 0 else (str(path), None)
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=at)
    try:
        found = os.fstat(fd)
        if found.st_uid != ROOT or others_may_write(found.st_mode):
            raise FormatError(
                f"`{path}` is user {found.st_uid}'s with mode {stat.S_IMODE(found.st_mode):04o}; "
                "only what nobody but root can write is believed"
            )
        yield fd
    finally:
        os.close(fd)
