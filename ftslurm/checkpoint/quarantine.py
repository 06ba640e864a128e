"""Out of the way, never deleted: where rejected steps go.

quarantine/step-000000000030-001/reason.json
                                 step-000000000030/     as it was; `mv` it back to undo
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ftslurm.checkpoint.choose import Rejected
from ftslurm.checkpoint.commit import SCHEMA_VERSION
from ftslurm.checkpoint.rename import rename_new
from ftslurm.errors import CheckpointError
from ftslurm.files import claim_folder, write_json
from ftslurm.run.layout import RunLayout, step_name


def quarantine(
    layout: RunLayout, rejected: Rejected, *, now: Callable[[], float] = time.time
) -> Path:
    """Move a rejected step; returns the folder with reason.json and the step in it.

    The reason is durable before the step moves. The same step may come here many times.
    """
    try:
        claim_folder(layout.quarantine)
        home = _claim_home(layout, rejected.step)
        write_json(
            home / "reason.json",
            {
                "schema_version": SCHEMA_VERSION,
                "step": rejected.step,
                "reason": rejected.reason,
                "from": str(rejected.path.relative_to(layout.root)),
                "quarantined_at": now(),
            },
        )
        rename_new(rejected.path, home / rejected.path.name)
    except OSError as error:
        raise CheckpointError(
            f"cannot move `{rejected.path}` to `{layout.quarantine}`: {error.strerror}"
        ) from error
    return home


def _claim_home(layout: RunLayout, step: int) -> Path:
    number = 1
    while True:
        home = layout.quarantine / f"{step_name(step)}-{number:03d}"
        if claim_folder(home):
            return home
        number += 1
