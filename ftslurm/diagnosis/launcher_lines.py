"""The lines that the ranks' launcher has written of one attempt. Reads only the end of one file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Optional

from ftslurm.diagnosis.tails import read_tail
from ftslurm.run.attempts import Attempt
from ftslurm.run.layout import RunLayout

LAUNCHER_BYTES = 2 << 20

_DECIDED = re.compile(r"ftslurm: attempt (\d+): ")

Line = tuple[int, str, float]
"""Number, text, and when its file was last written."""


def launcher_lines(
    layout: RunLayout, number: int, attempt: Optional[Attempt]
) -> tuple[Path, list[Line]]:
    """(file, its lines): without agents they are among the batch script's own words, between those
    on the attempt before and on this one."""
    path = layout.attempt(number).root / "launcher.log"
    tail = read_tail(path, LAUNCHER_BYTES)
    if tail is None and attempt is not None:
        job_id = attempt.job_id
        path = layout.submit / f"{job_id}.out"
        if job_id.startswith("local-"):  # submitit's name for it
            path = layout.submit / f"{job_id[len('local-') :]}_0_log.out"
        tail = read_tail(path, LAUNCHER_BYTES)
    if tail is None:
        return path, []
    first = tail.first or 1  # else only the order of the numbers means something
    lines = [(first + index, text, tail.written_at) for index, text in enumerate(tail.lines)]
    return path, lines if path.name == "launcher.log" else _of_attempt(lines, number)


def _of_attempt(lines: list[Line], number: int) -> list[Line]:
    own: list[Line] = []
    for line in lines:
        decided = _DECIDED.match(line[1])
        if decided is None:
            own.append(line)
        elif int(decided[1]) == number:
            break
        else:
            own = []
    return own
