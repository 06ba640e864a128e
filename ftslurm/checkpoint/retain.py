"""Which steps stay. Counts committed steps that still check out, never names alone.

Never removed, nor counted: what is outside the attempt's fence, and steps that do not check out
(they are evidence, and `choose` deals with them). Never removed: the newest step, protected steps,
and steps from before the last restart until a step of this attempt has been read back whole. An
attempt that has been superseded removes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional

from ftslurm.checkpoint.choose import Fence
from ftslurm.checkpoint.fence import read_fence, refuse_superseded
from ftslurm.checkpoint.published import PublishedStep, published_steps
from ftslurm.checkpoint.removal import is_trash, remove_folder, remove_trash
from ftslurm.checkpoint.verification import VerificationStopped, verify_step
from ftslurm.errors import CheckpointError
from ftslurm.files import list_folder
from ftslurm.run.layout import RunLayout, parse_temporary_name


def removable(
    good: Sequence[int], *, keep_last: int, keep_every_steps: int, protect: set[int]
) -> list[int]:
    """Steps of `good` (newest first) that the rule does not keep. The newest always stays."""
    return [
        step
        for step in good[max(keep_last, 1) :]
        if step not in protect and not (keep_every_steps and step % keep_every_steps == 0)
    ]


class Retention:
    """Keep-last-K and every-M for one attempt; remembers what it has read back."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._attempts: dict[str, int] = {}
        """Attempt by identity of the steps that checked out."""
        self._read_back_attempt = 0
        """Newest attempt of which a step was read back whole."""

    def apply(
        self,
        keep_last: int,
        keep_every_steps: int,
        protect: set[int],
        *,
        attempt: int,
        should_stop: Callable[[], bool],
    ) -> list[int]:
        """Remove what the rule lets go; returns the removed steps, newest first.

        Also clears leftovers of failed saves: temporaries of older attempts (0: none), old trash.
        Removing a step can take long, so `should_stop` is asked before each.
        """
        try:
            return self._apply(keep_last, keep_every_steps, protect, attempt, should_stop)
        except OSError as error:
            raise CheckpointError(
                f"cannot remove old steps in `{self._layout.steps}`: {error.strerror}"
            ) from error

    def _apply(
        self,
        keep_last: int,
        keep_every_steps: int,
        protect: set[int],
        attempt: int,
        should_stop: Callable[[], bool],
    ) -> list[int]:
        refuse_superseded(self._layout, attempt)
        self._clear_leftovers(attempt, should_stop)
        attempts, paths = self._checked(read_fence(self._layout, attempt))
        steps = removable(
            list(attempts), keep_last=keep_last, keep_every_steps=keep_every_steps, protect=protect
        )
        if not steps:
            return []
        newest = next(iter(attempts))
        if any(attempts[step] < attempts[newest] for step in steps) and not self._read_back(
            paths[newest], attempts[newest], should_stop
        ):
            steps = [step for step in steps if attempts[step] == attempts[newest]]
        removed = []
        for step in steps:
            if should_stop():
                break
            # Again: reading back and each removal may take minutes.
            refuse_superseded(self._layout, attempt)
            remove_folder(paths[step])
            removed.append(step)
        return removed

    def _clear_leftovers(self, attempt: int, should_stop: Callable[[], bool]) -> None:
        try:
            names = list_folder(self._layout.steps)
        except FileNotFoundError:
            return
        for path in (self._layout.steps / name for name in names):
            temporary = parse_temporary_name(path.name)
            is_leftover = temporary is not None and temporary[1] < attempt
            if not is_leftover and not is_trash(path):
                continue
            if should_stop():
                return
            if is_leftover:
                remove_folder(path)
            else:
                remove_trash(path)

    def _checked(self, fence: Fence) -> tuple[dict[int, int], dict[int, Path]]:
        """Attempt and folder by step, newest first: inside `fence`, checking out (not in full)."""
        attempts, paths = {}, {}
        for published in published_steps(self._layout):
            attempt = self._attempt_of(published)
            if attempt is not None and fence.is_inside(
                attempt, published.step, published.committed_digest
            ):
                attempts[published.step] = attempt
                paths[published.step] = published.path
        return attempts, paths

    def _attempt_of(self, published: PublishedStep) -> Optional[int]:
        """None for a step that does not check out. Looks once: a published step never changes."""
        if published.committed_digest not in self._attempts:
            found = verify_step(published.path, full=False)
            if not found.ok or found.manifest is None:
                return None
            self._attempts[published.committed_digest] = found.manifest.attempt
        return self._attempts[published.committed_digest]

    def _read_back(self, path: Path, attempt: int, should_stop: Callable[[], bool]) -> bool:
        if self._read_back_attempt < attempt:
            try:
                if not verify_step(path, full=True, should_stop=should_stop).ok:
                    return False
            except VerificationStopped:
                return False
            self._read_back_attempt = attempt
        return True
