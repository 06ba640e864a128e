"""Hand a run over once more, as it was frozen: its own sbatch command, or its script on this
machine. Never looks whether a job of it is alive: that is the caller's to know."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ftslurm.run.layout import RunLayout
from ftslurm.scheduler.local import run_batch
from ftslurm.scheduler.sbatch import frozen_arguments, submit, with_excluded


def submit_again(layout: RunLayout, scheduler: str, *, exclude: Sequence[str] = ()) -> str:
    """The id of the run's new job, kept off the nodes `exclude`. RefusedError: there is certainly
    none; UnclearError: there may be one."""
    if scheduler == "local":
        return _start_here(layout)
    return submit(with_excluded(frozen_arguments(layout), exclude))


def _start_here(layout: RunLayout) -> str:
    """As a process that outlives the terminal and whoever starts it."""
    with (layout.submit / "controller.log").open("ab") as log:
        batch = subprocess.Popen(
            [sys.executable, "-m", "ftslurm.scheduler.again", str(layout.root)],
            env={**os.environ, "PYTHONPATH": str(layout.code)},
            cwd=layout.root,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return f"local-{batch.pid}"


if __name__ == "__main__":
    sys.exit(run_batch(Path(sys.argv[1])))
