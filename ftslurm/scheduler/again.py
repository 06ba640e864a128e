"""Hand a run over once more, as it was frozen: its own sbatch command, or its script on this
machine. Never looks whether a job of it is alive: that is the caller's to know."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ftslurm.errors import RunError
from ftslurm.run.layout import RunLayout
from ftslurm.run.sweep_layout import find_sweep
from ftslurm.scheduler.local import run_batch
from ftslurm.scheduler.sbatch import frozen_arguments, submit, with_excluded

_NAMED = re.compile(r"^export FTSLURM_RUN_DIR=(.+)$", re.MULTILINE)


def named_by_script(layout: RunLayout) -> RunLayout:
    """The run by the path that its batch script names; as it is asked for, where none is named."""
    try:
        found = _NAMED.search(os.fsdecode(layout.script.read_bytes()))
    except FileNotFoundError:
        return layout  # for whoever runs it to miss
    return RunLayout(Path(shlex.split(found[1])[0])) if found else layout


def place_at_submit(layout: RunLayout) -> RunLayout:
    """As `named_by_script`, which may lead here over a link. RunError for a run that was moved, and
    for a copy: the script would go on in the other folder."""
    named = named_by_script(layout)
    if _is_one_run(layout, named):
        return named
    here, there = layout.root, named.root
    if here.name == there.name and find_sweep(str(here.parent)) is not None:
        here, there = here.parent, there.parent  # moved with its sweep
    if not there.exists():
        raise RunError(
            f"`{here}` was `{there}` when it was submitted, and its batch script names that "
            f"folder; move it back: `mv {shlex.join(map(str, (here, there)))}`"
        )
    raise RunError(
        f"`{here}` is a copy of `{there}`, and its batch script names that folder; resume "
        f"`{there}`, or submit anew"
    )


def _is_one_run(one: RunLayout, other: RunLayout) -> bool:
    if one == other:
        return True
    try:
        here, there = ((run.root.stat(), run.script.stat()) for run in (one, other))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return is_one_folder(here, there)


def is_one_folder(
    here: tuple[os.stat_result, os.stat_result], there: tuple[os.stat_result, os.stat_result]
) -> bool:
    """Of a folder and a file in it each. Not by the device: a file system that is mounted twice has
    two. On one of another inode numbers repeat, but a copy is given a change time of its own."""
    (folder, file), (other_folder, other_file) = here, there
    return folder.st_ino == other_folder.st_ino and file.st_ctime_ns == other_file.st_ctime_ns


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
