"""What a person should know of a run's storage: saves that fail, a disk that takes nothing more.

A run that cannot save trains on (train/setbacks.py), and while its disk is full it cannot even say
so: whoever asks looks at the file system too.
"""

from __future__ import annotations

import os
from typing import Any, Callable, Optional

from ftslurm.run.attempts import read_events
from ftslurm.run.layout import RunLayout

FULL_BYTES = 1 << 20
"""Less free space is as good as none: what a failed save gives back is free for a moment."""


def storage_trouble(
    layout: RunLayout,
    attempt: int,
    *,
    look: Callable[[str], os.statvfs_result] = os.statvfs,
) -> Optional[str]:
    """One sentence; None when nothing is known to be wrong."""
    found = [_of_disk(look(str(layout.root))), _of_saves(layout, attempt)]
    return "; ".join(filter(None, found)) or None


def _of_disk(disk: os.statvfs_result) -> Optional[str]:
    if disk.f_flag & os.ST_RDONLY:
        what = "read-only"
    elif disk.f_bavail * disk.f_frsize < FULL_BYTES:
        what = "full"
    else:
        return None
    return f"the run's file system is {what}, so what happens now may not be on record"


def _of_saves(layout: RunLayout, attempt: int) -> Optional[str]:
    failed: list[dict[str, Any]] = []
    for event in read_events(layout.attempt(attempt)):
        if event["kind"] == "committed":
            failed = []
        elif event["kind"] == "save_failed":
            failed.append(event)
    if not failed:
        return None
    times = "the last save has failed" if len(failed) == 1 else f"{len(failed)} saves have failed"
    return f"{times} since the newest committed step: {failed[-1].get('reason')}"
