"""How many tasks of an array Slurm runs at once, changed while the array is there.

Slurm is asked, and nothing is written down. The whole array is named: a task of it that is named
alone would leave the others as they are.
"""

from __future__ import annotations

import re

from ftslurm.errors import SchedulerError
from ftslurm.scheduler.slurm import TIMEOUT_S, Runner, run_command

# Of an array of which some tasks are over, scontrol fails for these, has changed the others all the
# same, and on 22.05 names them, too: `1_0-1: Job has already finished`, `1_2-7: No error`. 24.11
# and 26.05 write `1_[0-1]` (all seen).
_TAKEN = re.compile(r"\S+: (Job has already finished|No error)")


def run_at_once(array_id: str, at_once: int, *, run: Runner = run_command) -> None:
    """From now on Slurm runs so many tasks of this array at once. SchedulerError: it may not be so;
    to ask again does no harm."""
    argv = ["scontrol", "update", f"jobid={array_id}", f"ArrayTaskThrottle={at_once}"]
    done = run(argv, TIMEOUT_S)
    told = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    refused = [line for line in told if not _TAKEN.fullmatch(line)]
    if done.rc != 0 and (refused or not told):
        why = refused[-1] if refused else "it printed nothing"
        raise SchedulerError(f"`{' '.join(argv)}` failed with code {done.rc}: {why}")
