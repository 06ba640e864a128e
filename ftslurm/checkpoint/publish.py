"""From files in a temporary folder to a step that counts; a crash may come between any two steps.

Files fsynced -> indexes -> manifest -> loadability check -> COMMITTED -> fsync -> rename -> fsync
of the parent -> latest.json. A published step is never written again; nothing is ever replaced. An
attempt that has been superseded publishes nothing, as far as it can know (see `fence`).
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from pathlib import Path

from ftslurm import faults, files
from ftslurm.checkpoint.commit import (
    COMMITTED,
    MANIFEST_ALGORITHM,
    SCHEMA_VERSION,
    Commit,
    encode_commit,
)
from ftslurm.checkpoint.fence import read_fence, refuse_superseded, stray
from ftslurm.checkpoint.quarantine import quarantine
from ftslurm.checkpoint.record_json import encode_manifest, manifest_digest
from ftslurm.checkpoint.records import MANIFEST, Manifest
from ftslurm.checkpoint.removal import remove_folder
from ftslurm.checkpoint.rename import rename_new
from ftslurm.checkpoint.verification import Expectation, loadability_problems
from ftslurm.errors import CheckpointError
from ftslurm.files import best_effort, claim_folder, is_listed, write_atomic, write_json
from ftslurm.run.attempts import append_event
from ftslurm.run.layout import RunLayout, step_name, temporary_name


def create_temporary(layout: RunLayout, step: int, attempt: int) -> Path:
    """A fresh folder for `step`; a leftover of a failed save of the same name is removed."""
    path = layout.steps / temporary_name(step, attempt)
    with _as_checkpoint_error(f"cannot make `{path}`"):
        # Not the run folder itself: where it is missing, a file system is not mounted.
        claim_folder(layout.checkpoints)
        claim_folder(layout.steps)
        if not claim_folder(path):
            remove_folder(path)
            claim_folder(path)
    return path


def publish(layout: RunLayout, temporary: Path, manifest: Manifest) -> Path:
    """Commit what the ranks wrote; returns the step's folder. Durable and visible on return.

    On an error the step does not exist, and `temporary` does, but where the file system has failed
    to make the name durable and to take it back: the step stands then, and the next claim adopts
    it. Once it has its name, durably, it counts, whatever becomes of latest.json: failing to write
    that is logged, not raised.
    """
    target = layout.steps / step_name(manifest.step)
    expected = temporary_name(manifest.step, manifest.attempt)
    if temporary.name != expected or temporary.parent != layout.steps:
        raise CheckpointError(
            f"step {manifest.step} of attempt {manifest.attempt} cannot be published from "
            f"`{temporary}`, expected `{layout.steps / expected}`"
        )
    facts = {"rank": 0, "step": manifest.step, "attempt": manifest.attempt}
    data = encode_manifest(manifest)
    identity = manifest_digest(data)
    with _as_checkpoint_error(f"cannot publish step {manifest.step} in `{layout.steps}`"):
        write_atomic(temporary / MANIFEST, data)
        _refuse_unloadable(temporary, identity)
        faults.point("before_commit", **facts)
        refuse_superseded(layout, manifest.attempt)
        commit = Commit(manifest.step, manifest.run_id, MANIFEST_ALGORITHM, identity)
        # Syncs the folder as well, hence the names of all files that the ranks wrote into it.
        write_atomic(temporary / COMMITTED, encode_commit(commit))
        faults.point("before_rename", **facts)
        refuse_superseded(layout, manifest.attempt)
        _make_way(layout, target, manifest)
        rename_new(temporary, target)
    try:
        faults.point("after_rename", **facts)
        write_latest(layout, manifest, identity)
    except OSError as error:
        _warn_of_latest(layout, manifest, error)
    return target


def _make_way(layout: RunLayout, target: Path, manifest: Manifest) -> None:
    """Put aside what an attempt thought dead has published there since this one was claimed."""
    if is_listed(target):
        fence = read_fence(layout, manifest.attempt)
        late = stray(target, fence, expect=Expectation(run_id=manifest.run_id))
        if late is not None:
            quarantine(layout, late)
            with best_effort("not in the journal"):
                paths = layout.attempt(manifest.attempt)
                append_event(paths, "rejected", step=late.step, reason=late.reason)


def _warn_of_latest(layout: RunLayout, manifest: Manifest, error: OSError) -> None:
    import logging  # here, because cold verbs read this module and never write

    logging.getLogger(__name__).warning(
        "step %d is published, but the hint for people was not renewed: cannot write `%s`: %s",
        manifest.step,
        layout.latest_json,
        error.strerror,
    )


def write_latest(layout: RunLayout, manifest: Manifest, identity: str) -> None:
    """A hint for people and their scripts; a claim waits for what it names, and trusts it no more
    than that."""
    write_json(
        layout.latest_json,
        {
            "schema_version": SCHEMA_VERSION,
            "step": manifest.step,
            "path": f"steps/{step_name(manifest.step)}",
            "digest": identity,
        },
    )


def _refuse_unloadable(temporary: Path, identity: str) -> None:
    deadline, pause_s = time.monotonic() + files.VIEW_LAG_S, 0.05
    # The ranks have written all of it, and said so: what is missing or short is not in sight yet.
    while (problems := loadability_problems(temporary, identity)) and time.monotonic() < deadline:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 5.0)
    if problems:
        raise CheckpointError(
            f"`{temporary}` could not be loaded again and is not committed: "
            + "; ".join(problems[:3])
        )


@contextlib.contextmanager
def _as_checkpoint_error(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = ""
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            hint = "; a published step is never replaced: quarantine what is there first"
        raise CheckpointError(f"{what}: {error.strerror}{hint}") from error
