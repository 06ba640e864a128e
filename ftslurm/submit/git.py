"""What git knows about the code of a run: its files, its commit, what has changed. Reads only.

Git's answers do not depend on a user's settings: no colour, no foreign diff or textconv program.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Optional

from ftslurm.errors import RunError

_TIMEOUT_S = 120.0
# `submodule=short`: with diff.submodule=diff, git shows files inside that no pathspec keeps out.
_DIFF = ("diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv", "--submodule=short")


def find_repository(folder: Path) -> Optional[Path]:
    """Root of the repository that `folder` lies in."""
    if not any((place / ".git").exists() for place in (folder, *folder.parents)):
        return None
    return Path(os.fsdecode(_git(folder, "rev-parse", "--show-toplevel")).rstrip("\n")).resolve()


def listed(root: Path, prefix: str = "") -> Iterator[str]:
    """Names of files that git knows or would take, in submodules too."""
    for name in _names(_git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")):
        name = name.rstrip("/")
        path = root / name
        if path.is_dir() and not path.is_symlink():
            if (path / ".git").exists():
                yield from listed(path, f"{prefix}{name}/")
        else:
            yield prefix + name


def head(root: Path) -> Optional[str]:
    """The commit that is checked out; None before the first."""
    commit = _git(root, "rev-parse", "--verify", "--quiet", "HEAD", fail=False)
    return os.fsdecode(commit).strip() or None


def is_dirty(root: Path) -> bool:
    """Whether the working tree differs from the commit, untracked files included."""
    return bool(_git(root, "status", "--porcelain", "--untracked-files=normal"))


def changed(root: Path) -> dict[str, str]:
    """Tracked files that differ from the commit: name now -> name in the commit, which is another
    one for a file that was renamed."""
    words = iter(_names(_git(root, *_DIFF, "--name-status", "--find-renames", "-z")))
    names: dict[str, str] = {}
    for status in words:
        old = next(words)
        names[next(words) if status[0] in "RC" else old] = old
    return names


def committed(root: Path, name: str) -> bytes:
    """A file as the commit has it; empty for one that is not in it."""
    return _git(root, "cat-file", "blob", f"HEAD:{name}", fail=False)


def difference(root: Path, *, without: Iterable[str]) -> bytes:
    """Of the tracked files from the commit, as a patch."""
    outside = [f":(exclude,literal){name}" for name in without]
    return _git(root, *_DIFF, "--binary", "--", ".", *outside)


def _names(listing: bytes) -> list[str]:
    return [os.fsdecode(raw) for raw in listing.split(b"\0") if raw]


def _git(folder: Path, *arguments: str, fail: bool = True) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise RunError(
            f"`{folder}` lies in a git repository but there is no git on PATH; ftslurm asks it "
            "which files are source"
        ) from None
    if done.returncode and fail:
        said = os.fsdecode(done.stderr).strip().splitlines()
        raise RunError(
            f"git {arguments[0]} failed in `{folder}`: {said[-1] if said else 'silently'}"
        )
    return done.stdout
