"""`ftslurm doctor --checklist [RUN]`: reads what there is, has it judged, prints it.

Whatever the file system does, it ends: of what did not come in time it says that it was not read.
Exit 0: nothing known stands against production, whatever is not known; 1: something does.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Optional

from ftslurm.doctor.answer import Answer, Asked
from ftslurm.doctor.checklist import answers, counted
from ftslurm.doctor.folder_checks import nearest
from ftslurm.doctor.in_time import HANGS, SilentError, in_time
from ftslurm.doctor.line import FAIL, OK, SKIPPED, WARN, Line
from ftslurm.doctor.run_facts import Past, past_runs
from ftslurm.doctor.run_history import PastRun, read_past_run
from ftslurm.errors import EXIT_FAILED, EXIT_OK, RunError
from ftslurm.run.layout import RunLayout
from ftslurm.run.mounts import Mount, mount_of
from ftslurm.run.record import read_record
from ftslurm.run.sweep_layout import place_of_run
from ftslurm.run.wording import format_count

READ_S = 60.0
"""After so long no further run is looked at: what is asked for is mostly in the newest ones."""
_TOLD = 3

_MARKS = {OK: "yes ", WARN: "part", FAIL: "NO  ", SKIPPED: "?   "}


def show_checklist(
    run: str,
    runs: Path,
    slurm: Callable[[], Optional[Sequence[Line]]],
    store: Callable[[], Sequence[Line]],
    *,
    as_json: bool,
    say: Callable[[str], None],
) -> int:
    """`run`: a run directory; empty: the newest below `runs`."""
    found = read_asked(run, runs, slurm(), store(), say=say)
    told = answers(found)
    if as_json:
        print(json.dumps(to_json(told, found), indent=1))  # noqa: T201
    else:
        print("\n".join(render(told, found)))  # noqa: T201
    return EXIT_FAILED if any(one.state == FAIL for one in told) else EXIT_OK


@dataclass(frozen=True)
class _Folder:
    """What is known of the folder before any run in it was read."""

    mount: Optional[Mount]
    free_bytes: float
    runs: list[str]
    """Names of those that are about to be read, in this order."""


def read_asked(
    run: str,
    runs: Path,
    slurm: Optional[Sequence[Line]],
    store: Sequence[Line] = (),
    *,
    say: Callable[[str], None] = lambda text: None,
    now: Callable[[], float] = time.time,
    clock: Callable[[], float] = time.monotonic,
) -> Asked:
    """RunError where `run` is none, `runs` may not be looked into, or nothing answers."""
    values = in_time(partial(_from_disk, run, runs, now()), say=say)
    try:
        folder: _Folder = next(values)
    except SilentError as error:
        raise RunError(f"`{run or runs}`: {error}; {HANGS}") from None
    read: list[PastRun] = []
    not_read: dict[str, str] = {}
    left, why, deadline = list(folder.runs), "", clock() + READ_S
    try:
        while left and not why:
            found, name = next(values), left.pop(0)
            if found is None:
                not_read[name] = "its records cannot be read as a whole"
            else:
                read.append(found)
            if clock() > deadline:
                why = f"the others took {READ_S:.0f} s"
    except RunError as error:  # silent, or killed
        why = str(error)
    finally:
        values.close()
    return Asked(
        runs=read,
        not_read={**not_read, **dict.fromkeys(left, why)},
        mount=folder.mount,
        free_bytes=folder.free_bytes,
        slurm=None if slurm is None else {line.name: line for line in slurm},
        store=store,
        at=now(),
    )


def _from_disk(run: str, runs: Path, now: float) -> Iterator[Any]:
    """The folder, then each of its runs; None for one that cannot be read."""
    runs = nearest(runs)
    # By `/.` no file is taken for a folder.
    if not run and not os.access(f"{runs}/.", os.R_OK | os.X_OK):
        raise RunError(f"`{runs}` is no folder that you may look into; name another with --runs")
    if run:
        layout = RunLayout(place_of_run(run).absolute())
        past, runs = [Past(layout, read_record(layout))], layout.root
    else:
        past = list(past_runs(runs, with_tasks=True))
    disk = os.statvfs(runs)
    names = [str(one.layout.root) for one in past]
    yield _Folder(mount_of(runs), float(disk.f_bavail * disk.f_frsize), names)
    for one in past:
        yield read_past_run(one, now=now)


def to_json(told: Sequence[Answer], asked: Asked) -> dict[str, object]:
    return {
        "schema_version": 1,
        "runs": [run.name for run in asked.runs],
        "not_read": dict(asked.not_read),
        "answers": [
            {**asdict(one), "state": "unknown" if one.state == SKIPPED else one.state,
             "date": _date(one.at)}
            for one in told
        ],
    }  # fmt: skip


def render(told: Sequence[Answer], asked: Asked) -> list[str]:
    lines = []
    for one in told:
        lines.append(f"{_MARKS[one.state]} {one.number:2}  {one.question}")
        date = _date(one.at)
        lines.append(f"{'':9}{f'{date}  ' if date else ''}{one.seen}")
        if one.todo:
            lines.append(f"{'':9}-> {one.todo}")
    counts = counted(told)
    lines.append(
        f"{counts.get(OK, 0)} yes, {counts.get(WARN, 0)} in part, {counts.get(FAIL, 0)} no,"
        f" {counts.get(SKIPPED, 0)} not known, by {format_count(len(asked.runs), 'run')}, the"
        " newest; a date is that of the evidence"
    )
    whys = dict.fromkeys(asked.not_read.values())
    lines += [_not_read(why, [name for name in asked.not_read if asked.not_read[name] == why])
              for why in whys]  # fmt: skip
    return lines


def _not_read(why: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
    return f"not read: {', '.join(names[:_TOLD])}{more} ({why})"


def _date(at: Optional[float]) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) if at else ""
