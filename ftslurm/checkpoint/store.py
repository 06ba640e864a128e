"""The checkpoints of one run in one object: the facade of this room. It decides nothing itself.

Only rank 0 of the newest attempt publishes, quarantines and removes; anyone may list and verify.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Optional

from ftslurm.checkpoint import publish, quarantine
from ftslurm.checkpoint.choose import Choice, Fence, Rejected, decide
from ftslurm.checkpoint.fence import stray
from ftslurm.checkpoint.published import PublishedStep, published_steps, step_folders
from ftslurm.checkpoint.records import Manifest
from ftslurm.checkpoint.removal import remove_folder
from ftslurm.checkpoint.retain import Retention
from ftslurm.checkpoint.verification import Expectation, Verification, verify_step
from ftslurm.files import Patience, read_json
from ftslurm.run.attempts import AdoptedStep
from ftslurm.run.layout import RunLayout, parse_step_name


class CheckpointStore:
    """See the functions behind each method for what they promise."""

    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout
        self._retention = Retention(layout)

    def create_temporary(self, step: int, attempt: int) -> Path:
        """Rank 0: the folder into which all ranks write `step`."""
        return publish.create_temporary(self.layout, step, attempt)

    def discard_temporary(self, path: Path) -> None:
        """Rank 0: give the space of a failed save back at once."""
        remove_folder(path)

    def publish(self, temporary: Path, manifest: Manifest) -> Path:
        """Rank 0: commit what the ranks wrote; durable and visible on return."""
        return publish.publish(self.layout, temporary, manifest)

    def published(self) -> list[PublishedStep]:
        """Newest first; COMMITTED is there and readable, nothing else has been looked at."""
        return published_steps(self.layout)

    def verify(
        self,
        path: Path,
        *,
        full: bool,
        files: Optional[Container[str]] = None,
        expect_step: Optional[int] = None,
        on_bytes: Callable[[int], None] = lambda count: None,
        patience: Optional[Patience] = None,
    ) -> Verification:
        """Check one step folder; `full` reads every byte, or every one of `files`."""
        expect = Expectation(step=expect_step, run_id=self._run_id())
        return verify_step(
            path, full=full, files=files, expect=expect, on_bytes=on_bytes, patience=patience
        )

    def choose(
        self,
        *,
        full: bool,
        attempt: int = 0,
        adopted: Optional[list[AdoptedStep]] = None,
        failed: Optional[Mapping[int, str]] = None,
        patience: Optional[Patience] = None,
    ) -> Choice:
        """The step to restore; `attempt` is the one that asks, `adopted` what it adopted.

        `failed`: steps that a rank could not read, with the reason; they count as bad. `patience`:
        what `fence`, or a choice before, has left.
        """
        candidates = (
            (step, path, _failed(found, failed[step]) if failed and step in failed else found)
            for step, path, found in self._verified(full, patience or Patience())
        )
        return decide(candidates, Fence(attempt, adopted))

    def quarantine(self, rejected: Rejected) -> Path:
        """Rank 0: move a rejected step out of the way, with the reason."""
        return quarantine.quarantine(self.layout, rejected)

    def fence(
        self,
        attempt: int,
        adopted: Optional[list[AdoptedStep]],
        *,
        patience: Optional[Patience] = None,
    ) -> list[Rejected]:
        """Steps that an older attempt published after `attempt` was claimed.

        What cannot be read is none for now, so all steps together are waited for as one would be.
        """
        fence = Fence(attempt, adopted)
        expect = Expectation(run_id=self._run_id())
        patience = patience or Patience()
        found = [
            stray(path, fence, expect=expect, patience=patience)
            for path in step_folders(self.layout)
        ]
        return [rejected for rejected in found if rejected is not None]

    def retain(
        self,
        keep_last: int,
        keep_every_steps: int,
        protect: set[int],
        *,
        attempt: int = 0,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> list[int]:
        """Rank 0, after a publish: remove old steps and leftovers; returns the removed steps.

        Only steps inside the fence of `attempt` (0: none) count or go. Once an attempt this reads
        a whole step back before it removes steps of older attempts. `should_stop` is asked
        meanwhile and before each removal and, when true, the rest stays for now.
        """
        return self._retention.apply(
            keep_last, keep_every_steps, protect, attempt=attempt, should_stop=should_stop
        )

    def _verified(self, full: bool, patience: Patience) -> Iterator[tuple[int, Path, Verification]]:
        for path in step_folders(self.layout):
            step = parse_step_name(path.name)
            assert step is not None, path
            patience.renew()
            yield step, path, self.verify(path, full=full, patience=patience)

    def _run_id(self) -> Optional[str]:
        """None in a folder without run.json, e.g. steps copied elsewhere."""
        try:
            run_id = read_json(self.layout.run_json).get("run_id")
        except FileNotFoundError:
            return None
        return run_id if isinstance(run_id, str) else None


def _failed(found: Verification, reason: str) -> Verification:
    return replace(found, ok=False, problems=[reason], unreadable=None)
