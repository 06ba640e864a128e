"""Is the newest step in sight? What is said to exist is waited for before an older one is taken.

A node that has just become the batch node may list the steps as they were some time ago, and a step
that its claim does not adopt is put aside later as a stray. No promise: only what somebody names
(latest.json, or the claim) can be missed, and the wait ends after files.VIEW_LAG_S.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Optional

from ftslurm import files
from ftslurm.checkpoint.published import step_folders
from ftslurm.errors import FormatError
from ftslurm.files import is_listed, list_folder, read_json
from ftslurm.run.layout import RunLayout, parse_step_name, step_name


def await_newest(layout: RunLayout) -> Optional[int]:
    """Wait for the step that latest.json names; that step when it did not come into sight."""
    try:
        step = read_json(layout.latest_json).get("step")
    except (FileNotFoundError, FormatError):
        return None
    newest = max((parse_step_name(path.name) or 0 for path in step_folders(layout)), default=-1)
    if not isinstance(step, int) or newest >= step or await_step(layout, step):
        return None
    return step


def await_step(
    layout: RunLayout,
    step: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Whether `step` is there, published or put aside, or comes into sight in time."""
    deadline, pause_s = clock() + files.VIEW_LAG_S, 0.05
    while not is_listed(layout.steps / step_name(step)) and not _is_put_aside(layout, step):
        if clock() + pause_s > deadline:
            return False
        sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)
    return True


def _is_put_aside(layout: RunLayout, step: int) -> bool:
    try:
        names = list_folder(layout.quarantine)
    except FileNotFoundError:
        return False
    return any(name.startswith(f"{step_name(step)}-") for name in names)
