"""What people have done to a run: RUN/control/acts.jsonl, a line each, added to and never changed.

For `ftslurm status` and for whoever asks later who stopped a run. Nothing is decided by it.
"""

from __future__ import annotations

import contextlib
import getpass
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

from ftslurm.files import append_record, read_records
from ftslurm.run.control import make_folder
from ftslurm.run.layout import RunLayout

STATE_AFTER = {
    "cancelled": "cancelled",
    "paused": "paused",
    "released": "waiting",
    "queued": "waiting",
}
"""Result of a verb -> what the run is until its next attempt begins."""


@dataclass(frozen=True)
class Act:
    """One verb, as it was answered."""

    verb: str
    result: str
    by: str
    at: float
    job_id: Optional[str] = None


def note_act(
    layout: RunLayout,
    verb: str,
    result: str,
    job_id: Optional[str],
    *,
    now: Callable[[], float] = time.time,
) -> None:
    """Best effort: a note that cannot be written keeps nobody from the verb."""
    act = Act(verb, result, _user(), now(), job_id)
    with contextlib.suppress(OSError):
        make_folder(layout)
        append_record(layout.acts, {"schema_version": 1, **vars(act)})


def newest_act(layout: RunLayout) -> Optional[Act]:
    """The newest of those that change what the run is."""
    acts = [
        Act(record["verb"], record["result"], record["by"], record["at"], record.get("job_id"))
        for record in read_records(layout.acts)
        if record["result"] in STATE_AFTER
    ]
    return acts[-1] if acts else None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return "unknown"
