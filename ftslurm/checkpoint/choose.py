"""Which step to restore: the newest that verifies, lies on the lineage and is inside the fence.

Deciding only; who asks decides what becomes of the rejected steps (they are quarantined, never
deleted).

Lineage: each manifest names the step its trajectory continued from. When the newest step is bad,
an older one is taken only if it does not contradict that: a step between the two, or one of the
same number with another digest, comes from a trajectory that was given up.

Fence: POSIX has no compare-and-swap, so a writer of an attempt that was thought dead may still
publish. Claiming attempt N records the steps it adopts; a step of an older attempt outside that
set came later and is rejected, whatever its digests.
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
        if manifest.attempt == self.attempt or manifest.attempt == 0:
            return None
        if any((a.step, a.digest) == (manifest.step, committed_digest) for a in self.adopted):
            return None
        return (
            f"published by attempt {manifest.attempt} after attempt {self.attempt} was claimed, "
            "which did not adopt it"
        )


def decide(candidates: Iterable[tuple[int, Path, Verification]], fence: Fence) -> Choice:
    """Go through (step, folder, verification), newest first, up to the first that may be restored.

    `candidates` may be lazy: nothing behind the chosen step is looked at.
    """
    head: Optional[Manifest] = None
    rejected: list[Rejected] = []
    for step, path, verification in candidates:
        manifest, identity = verification.manifest, verification.committed_digest
        reason = "; ".join(verification.problems)
        if manifest is not None and not verification.misplaced:
            stray = fence.problem(manifest, identity) or _off_lineage(manifest, identity, head)
            if stray is None and verification.ok:
                return Choice(path, manifest, rejected, identity)
            if stray is None:
                head = manifest  # bad, but its word on where it came from is good
            else:
                reason = stray
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
