"""`ftslurm logs RUN`: the end of a rank's log, and on request what follows, attempt after attempt.

Reads the run directory only.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Optional

from ftslurm.errors import EXIT_OK, RunError, UsageError
from ftslurm.files import is_listed
from ftslurm.operate.answer import parser, tell
from ftslurm.operate.standing import OpenRun, open_run
from ftslurm.run.attempts import numbers

LINES = 40
POLL_S = 1.0
_BLOCK_BYTES = 65_536

_EPILOG = """examples:
  ftslurm logs runs/gpt-20260301-120000-3f9a                     rank 0, newest attempt, last lines
  ftslurm logs runs/gpt-20260301-120000-3f9a --rank 3 --attempt 2 --lines 0
  ftslurm logs runs/gpt-20260301-120000-3f9a --follow            on into the next attempts

What the batch loop said is in RUN/submit/JOB_ID.out, what it decided in `ftslurm status`."""


def main(argv: Optional[list[str]] = None) -> int:
    made = parser("logs", "The log of one rank.", _EPILOG)
    made.add_argument("--rank", type=int, default=0, metavar="N", help="default: 0")
    made.add_argument("--attempt", type=int, metavar="N", help="default: the newest")
    made.add_argument("--follow", action="store_true", help="go on as the log grows")
    made.add_argument(
        "--lines", type=int, default=LINES, metavar="N", help=f"0: all; default: {LINES}"
    )
    options = made.parse_args(argv)
    run = open_run(options.run)
    world_size = run.record.spec.world_size
    if not 0 <= options.rank < world_size:
        raise UsageError(f"--rank {options.rank}: the run has ranks 0 to {world_size - 1}")
    if options.lines < 0:
        raise UsageError(f"--lines {options.lines}: give 0 for all, or how many")
    attempt = _choose(run, options.attempt)
    path = _log(run, attempt, options.rank)
    if options.follow:
        follow(run, options.rank, attempt, options.lines, only=options.attempt is not None)
    elif not path.exists():
        raise RunError(f"`{path}` is not there; attempt {attempt} has not started that rank")
    else:
        with path.open("rb") as stream:
            _skip_to_last(stream, options.lines)
            _copy(stream)
    return EXIT_OK


def follow(
    run: OpenRun,
    rank: int,
    attempt: int,
    lines: int,
    *,
    only: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Copy until the run has ended; with `only`, until this attempt has."""
    stream: Optional[BinaryIO] = None
    while True:
        # Both are asked before the last lines are read, which were written before.
        is_over = _is_over(run, attempt, only=only)
        newest = numbers(run.layout)[-1]
        path = _log(run, attempt, rank)
        if stream is None and path.exists():
            stream = path.open("rb")
            _skip_to_last(stream, lines)
        if stream is not None:
            _copy(stream)
        if newest > attempt and not only:
            attempt, lines = attempt + 1, 0
            tell(f"attempt {attempt}")
            if stream is not None:
                stream.close()
            stream = None
        elif is_over:
            return
        else:
            sleep(POLL_S)


def _is_over(run: OpenRun, attempt: int, *, only: bool) -> bool:
    """Nothing more comes. A run that merely waits for its next start is not over."""
    if is_listed(run.layout.done) or (only and numbers(run.layout)[-1] > attempt):
        return True
    if not run.layout.attempt(attempt).decision_json.exists():
        return False
    return only or run.look().is_over


def _choose(run: OpenRun, wanted: Optional[int]) -> int:
    claimed = numbers(run.layout)
    if not claimed:
        raise RunError("the run has not begun, there is no attempt yet")
    if wanted is None:
        return claimed[-1]
    if wanted not in claimed:
        raise UsageError(f"--attempt {wanted}: the run has attempts {claimed[0]} to {claimed[-1]}")
    return wanted


def _log(run: OpenRun, attempt: int, rank: int) -> Path:
    return run.layout.attempt(attempt).logs / f"rank-{rank}.log"


def _skip_to_last(stream: BinaryIO, lines: int) -> None:
    """Put `stream` before its last `lines` lines; 0: before the first."""
    end = position = stream.seek(0, os.SEEK_END)
    tail = b""
    while lines and position and tail.count(b"\n") <= lines:
        size = min(_BLOCK_BYTES, position)
        position -= size
        stream.seek(position)
        tail = stream.read(size) + tail
    parts = tail.split(b"\n")
    kept = parts[-(lines + (parts[-1] == b"")) :] if lines else []
    stream.seek(end - len(b"\n".join(kept)) if lines else 0)


def _copy(stream: BinaryIO) -> None:
    while True:
        block = stream.read(_BLOCK_BYTES)
        if not block:
            break
        sys.stdout.buffer.write(block)
    sys.stdout.flush()
