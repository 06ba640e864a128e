"""Which step to restore: the newest that verifies, lies on the lineage and is inside the fence.

Deciding only; who asks decides what becomes of the rejected steps (they are quarantined, never
deleted).

Lineage: each manifest names the step its trajectory continued from. When the newest step is bad,
an older one is taken only if it does not contradict that: a step between the two, or one of the
same number with another digest, comes from a trajectory that was given up.

Fence: POSIX has no compare-and-swap, so a writer of an attempt that was thought dead may still
publish. Claiming attempt N records the steps it adopts; a step of an older attempt outside that
set came later and is rejected, whatever its digests. A step whose COMMITTED the claim could not
read is adopted by its name, as one of the attempt before: the claim's node may be what is sick.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ftslurm.checkpoint.records import Manifest
from ftslurm.checkpoint.verification import Verification
from ftslurm.errors import CheckpointError
from ftslurm.run.attempts import AdoptedStep


@dataclass(frozen=True)
class Rejected:
    """A folder with the name of a step from which nothing may be restored."""

    step: int
    path: Path
    reason: str
    is_damage: bool = True
    """False: whole, and of a history that is not the run's."""


@dataclass(frozen=True)
class Choice:
    """`path` None and nothing rejected: nothing was ever saved. `path` None and something rejected:
    refuse; a run that has saved never starts again from step 0 by itself."""

    path: Optional[Path]
    manifest: Optional[Manifest]
    rejected: list[Rejected]
    committed_digest: Optional[str] = None
    """Of the chosen step."""


@dataclass(frozen=True)
class Fence:
    """What attempt `attempt` may build on; `adopted` None: no fence (a reader outside the run)."""

    attempt: int = 0
    adopted: Optional[list[AdoptedStep]] = None

    def is_inside(self, attempt: int, step: int, committed_digest: Optional[str]) -> bool:
        """Whether a step that `attempt` published is of the history this attempt builds on."""
        if self.adopted is None or attempt in (0, self.attempt):
            return True
        return any(
            a.step == step and (a.digest == committed_digest if a.digest else a.by == attempt)
            for a in self.adopted
        )

    def problem(self, manifest: Manifest, committed_digest: Optional[str]) -> Optional[str]:
        """Why a verified step must not be restored; None when it may.

        CheckpointError when it is of a newer attempt: then the asker is the one thought dead.
        """
        if self.adopted is None:
            return None
        if manifest.attempt > self.attempt:
            raise CheckpointError(
                f"step {manifest.step} was published by attempt {manifest.attempt}, so attempt "
                f"{self.attempt} has been superseded; leave the run to the newer one"
            )
        if self.is_inside(manifest.attempt, manifest.step, committed_digest):
            return None
        return (
            f"published by attempt {manifest.attempt} after attempt {self.attempt} was claimed, "
            "which did not adopt it"
        )


def decide(candidates: Iterable[tuple[int, Path, Verification]], fence: Fence) -> Choice:
    """Go through (step, folder, verification), newest first, up to the first that may be restored.

    `candidates` may be lazy: nothing behind the chosen step is looked at. CheckpointError when a
    step is of a newer ftslurm or, with an OSError as its cause, cannot be read just now: going on
    would lose its work.
    """
    head: Optional[Manifest] = None
    rejected: list[Rejected] = []
    for step, path, verification in candidates:
        manifest, identity = verification.manifest, verification.committed_digest
        reason = "; ".join(verification.problems)
        if manifest is not None and not verification.misplaced:
            stray = fence.problem(manifest, identity) or _off_lineage(manifest, identity, head)
            if stray is not None:
                rejected.append(Rejected(step, path, stray, is_damage=False))
                continue
            if verification.ok:
                return Choice(path, manifest, rejected, identity)
            head = manifest  # bad, but its word on where it came from is good
        if verification.unreadable is not None:
            raise CheckpointError(
                f"step {step} cannot be read just now and may well be whole, so no older one is "
                f"taken in its place; try again ({reason})"
            ) from verification.unreadable
        if verification.is_newer:
            raise CheckpointError(
                f"step {step} was written by a newer ftslurm and may well be whole, so no older "
                f"one is taken in its place ({reason})"
            )
        rejected.append(Rejected(step, path, reason))
    return Choice(None, None, rejected)


def _off_lineage(
    manifest: Manifest, identity: Optional[str], head: Optional[Manifest]
) -> Optional[str]:
    if head is None:
        return None
    parent = head.parent
    if parent is None:
        return f"not on the lineage: step {head.step} was trained from step 0"
    if manifest.step > parent.step:
        return (
            f"not on the lineage: step {head.step} continues from step {parent.step}, before this"
        )
    if manifest.step == parent.step and identity != parent.digest:
        return f"not the step {parent.step} from which step {head.step} continues"
    return None
