"""Every error a person can be shown, and every exit code a process of ours may end with.

An error says what is wrong, where, what was expected and what to do, in one sentence. Tracebacks
are for our own bugs only.

    FtslurmError
    +-- UsageError          bad argument or option                         exit 2
    +-- SpecError           a configuration value that cannot be right     exit 2
    +-- FormatError         a file of ours that is not what it should be   exit 1
    +-- CheckpointError     no checkpoint can be restored, or a save failed for good
    +-- DataError           a token store that is missing, torn or foreign
    +-- SchedulerError      a Slurm command failed, or Slurm cannot be reached
    +-- RunError            the run directory forbids what was asked
    +-- CodeError           a rank would run other code than the run began with
    +-- NumericError        a loss that is NaN or Inf, or a spike
"""

from __future__ import annotations

import sys

# Exit codes of the command line (design: 0 ok, 1 finding or failure, 2 usage).
EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TRY_AGAIN = 75
"""The file system or network failed (an OSError): the same command may work in a moment."""
EXIT_INTERRUPTED = 130
"""By Ctrl-C: as a shell tells of a command that died of it."""

# Exit codes of a rank. Hints only: srun reports the highest of all ranks, and --kill-on-bad-exit
# turns the others into 143; outcome.json is the truth. All below 128, where shells put signals.
RANK_DONE = 0
RANK_FAILED = 1
RANK_STOPPED = 75
"""Left on request at an agreed step, everything committed; run me again."""
RANK_NEVER_RETRY = 78
"""The same start would fail the same way: bad configuration, no restorable checkpoint."""
PREFLIGHT_NAMED = 79
"""Of no rank, as none was started: the preflight has named a node that is not to have any."""


def warn(text: str) -> None:
    """Something is not as it should be, and the work goes on."""
    print(f"ftslurm: warning: {text}", file=sys.stderr, flush=True)  # noqa: T201


class FtslurmError(Exception):
    """Root of all errors shown to a person as one sentence."""

    exit_code = EXIT_FAILED


class UsageError(FtslurmError):
    exit_code = EXIT_USAGE


class SpecError(FtslurmError):
    exit_code = EXIT_USAGE


class FormatError(FtslurmError):
    pass


class CheckpointError(FtslurmError):
    pass


class DataError(FtslurmError):
    pass


class SchedulerError(FtslurmError):
    pass


class RunError(FtslurmError):
    pass


class CodeError(FtslurmError):
    pass


class NumericError(FtslurmError):
    """The same on every rank, at the same step; `step` counts the one that showed it."""

    def __init__(self, message: str, *, step: int, value: float) -> None:
        super().__init__(message)
        self.step = step
        self.value = value
