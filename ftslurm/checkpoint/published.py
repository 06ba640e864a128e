"""Which steps of a run count: names and COMMITTED files, nothing else is looked at.

Reads only, and imports no more than that takes: `ftslurm status` and `recover` begin with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from ftslurm.checkpoint.commit import COMMITTED, Commit, decode_commit
from ftslurm.checkpoint.reading import read_small
from ftslurm.errors import CheckpointError, FormatError
from ftslurm.files import Patience, list_folder
from ftslurm.run.layout import RunLayout, parse_step_name


@dataclass(frozen=True)
class PublishedStep:
    """A step folder with a readable COMMITTED; what else is in it has not been looked at."""

    step: int
    path: Path
    committed_digest: str


def published_steps(layout: RunLayout) -> list[PublishedStep]:
    """Newest first. Cheap: names and COMMITTED; folders with a bad COMMITTED are left out.

    OSError when the newest cannot be read just now: an older one must not be taken for it.
    """
    steps: list[PublishedStep] = []
    patience = Patience()
    for path in step_folders(layout):
        patience.renew()
        try:
            commit = read_commit(path, patience=patience)
        except (CheckpointError, FormatError) as error:
            if isinstance(error.__cause__, OSError) and not steps:
                raise error.__cause__ from None
            continue  # not committed, hence no step; `choose` and `verify` report it
        steps.append(PublishedStep(_named_step(path), path, commit.digest))
    return steps


def step_folders(layout: RunLayout) -> list[Path]:
    """All that bears the name of a published step, newest first, whatever is in it."""
    try:
        # Not is_dir(): from Python 3.14 on that is False also where the file system is away.
        names = list_folder(layout.steps)
    except FileNotFoundError:
        return []
    named = [layout.steps / name for name in names if parse_step_name(name) is not None]
    return sorted(named, key=_named_step, reverse=True)


def read_commit(path: Path, *, patience: Optional[Patience] = None) -> Commit:
    """COMMITTED of a step folder; CheckpointError or FormatError without a good one."""
    data = read_small(path / COMMITTED, patience=patience)
    return decode_commit(data, where=f"`{path / COMMITTED}`")


def _named_step(path: Path) -> int:
    step = parse_step_name(path.name)
    assert step is not None, path
    return step
