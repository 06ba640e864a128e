"""What a report is asked for: the words of a person turned into runs and jobs.

Looks, and reads nothing. A run is found by its directory, a sweep by its folder, and both by their
ids below the folders given (`runs/` by default); a job by its number; a log by the number in its
name, or by the run it lies in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ftslurm.errors import UsageError
from ftslurm.run.sweep_layout import parse_task_id

_JOB = re.compile(r"\d{1,10}(?:_\d{1,9}|\+\d{1,4})?\Z")
_LOG_NUMBER = re.compile(r"(\d{1,10}(?:_\d{1,9})?)(?=\D*\.(?:out|err|log)\Z|\D*\Z)")


@dataclass
class Wanted:
    """`jobs` and `runs` that were named; without any of them, all."""

    jobs: list[str] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)
    near: list[Path] = field(default_factory=list)
    """Of which `jobs` may be."""
    is_named: bool = False
    notes: list[str] = field(default_factory=list)
    """What could not be looked into."""


def wanted_of(words: Sequence[str], roots: Sequence[Path]) -> Wanted:
    """UsageError for a word that is neither run, sweep, job, log nor a folder of runs."""
    wanted = Wanted(is_named=bool(words))
    for word in words:
        _take(wanted, word, roots)
    once: dict[Path, Path] = {}  # a sweep and a task of it, say, or two spellings of one run
    for run in wanted.runs:
        once.setdefault(run.resolve(), run)
    wanted.runs = list(once.values())
    for root in roots:
        if not words:
            wanted.runs += runs_below(root, wanted.notes)
        elif wanted.jobs:
            below = runs_below(root, [])
            wanted.near += [run for run in below if not once or run.resolve() not in once]
    return wanted


def _take(wanted: Wanted, word: str, roots: Sequence[Path]) -> None:
    path = Path(word)
    if _take_folder(wanted, path):
        return
    if _JOB.match(word):
        wanted.jobs.append(word)
    elif path.is_file():
        _take_log(wanted, path)
    elif not any(_take_folder(wanted, place) for place in _places(word, roots)):
        below = " or ".join(f"`{root}`" for root in roots)
        raise UsageError(
            f"`{word}` is no run and no sweep (a folder, or its id below {below}), no job id (like"
            " 4711 or 4711_3) and no log file"
        )


def _places(word: str, roots: Sequence[Path]) -> Iterator[Path]:
    """Where what has this id may be."""
    if "/" in word:
        return
    task = parse_task_id(word)
    for root in roots:
        yield root / word
        if task is not None:
            yield root / task[0] / word


def _take_folder(wanted: Wanted, path: Path) -> bool:
    """False: there is no such folder."""
    if _has(path, "run.json"):
        wanted.runs.append(path)
        return True
    if not path.is_dir():
        return False
    below = runs_below(path, wanted.notes)
    if not below:
        if not _has(path, "sweep.json"):
            raise UsageError(
                f"`{path}` is neither a run directory nor a folder of runs: there is no run.json"
                " in it or right below it; name what `ftslurm submit` printed"
            )
        wanted.notes.append(f"of sweep `{path}` no task has been written yet")
    wanted.runs += below
    return True


def _has(folder: Path, name: str) -> bool:
    try:
        return (folder / name).is_file()
    except OSError as error:
        raise UsageError(
            f"`{folder}` may not be read ({error.strerror}); a run is its owner's alone: ask for"
            " `ftslurm report` there, or name its job"
        ) from None


def _take_log(wanted: Wanted, path: Path) -> None:
    """A log of a run belongs to the run; any other is named after its job."""
    for folder in path.resolve().parents:
        if (folder / "run.json").is_file():
            wanted.runs.append(folder)
            return
    found = _LOG_NUMBER.search(path.name)
    if found is None:
        raise UsageError(
            f"`{path}` has no job id in its name (slurm-4711.out, 4711_3.log) and lies in no run"
        )
    wanted.jobs.append(found[1])


def runs_below(root: Path, notes: list[str]) -> list[Path]:
    """Run directories right below it, and those of sweeps there. One that may not be looked into is
    noted: they are their owners' alone, and others lie beside them."""
    found: list[Path] = []
    closed = 0
    try:
        # `.ID.tmp` is one that submit builds, or was killed at.
        folders = sorted(one for one in root.iterdir() if not one.name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        notes.append(f"the runs below `{root}` are left out: {error.strerror}")
        return []
    for folder in folders:
        try:
            if (folder / "run.json").is_file():
                found.append(folder)
            elif (folder / "sweep.json").is_file():
                found += runs_below(folder, notes)
        except OSError:
            closed += 1
    if closed:
        notes.append(f"{closed} folders below `{root}` may not be read and are left out")
    return found
