"""A command line as a run's program: put into the spec, looked for, and what of it is left behind.

The words are kept as they are, as a list: no shell reads them, here or on a node. Reads only.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Optional

from ftslurm.errors import SpecError
from ftslurm.run.secret import held_secret
from ftslurm.run.spec import PROGRAM_ENTRY, RunSpec
from ftslurm.run.spec_check import check
from ftslurm.submit.snapshot import Snapshot

_INTERPRETER = re.compile(r"python[\d.]*|bash|sh")
_WITH_VALUE = ("-X", "-W")
_NO_SCRIPT = ("-m", "-c")
TASK_MODULE = "ftslurm.hydra_app.task"
"""`-m` of this takes a script of the user's: the program of a sweep's task."""


def with_program(spec: RunSpec, text: str, program: Sequence[str]) -> tuple[RunSpec, str]:
    """(the spec that runs `program`, the text of config.yaml that says so). Not by an override: in
    Hydra's grammar not every word can be written."""
    check_words(program, "the program")
    changed = replace(spec, entry=PROGRAM_ENTRY, program=list(program))
    check(changed)
    for key, value in (("entry", PROGRAM_ENTRY), ("program", list(program))):
        text = _with_line(text, key, value)
    return changed, text


def _with_line(text: str, key: str, value: object) -> str:
    import yaml  # type: ignore[import-untyped]

    line = yaml.safe_dump({key: value}, default_flow_style=False, width=float("inf")).rstrip()
    changed, count = re.subn(rf"^{key}:.*$", lambda match: line, text, flags=re.MULTILINE)
    assert count == 1, f"config.yaml has {count} lines of `{key}`"
    return changed


def check_program(snapshot: Snapshot, spec: RunSpec) -> None:
    """SpecError for a command that the ranks would not find."""
    command = spec.program[0]
    names = {source.name for source in snapshot.sources}
    if PurePosixPath(command).is_absolute():
        if not spec.cluster.ranks_are_inside and not os.access(command, os.X_OK):
            raise SpecError(f"program `{command}` is no file here that can be executed")
    elif "/" in command:
        _check_own_file(snapshot, command, names)
    elif not _is_path_changed(spec) and shutil.which(command) is None:
        beside = _name(snapshot, command) in names
        hint = f"write ./{command}" if beside else "name a command, or a file of this folder's code"
        raise SpecError(f"program `{command}` is not on PATH; {hint}")
    script = _script(spec.program)
    if script is not None and _name(snapshot, script) not in names:
        raise SpecError(
            f"`{script}` is not in the code that the run takes along from `{snapshot.root}`; "
            "submit from the folder that holds it, and let git know it where there is one"
        )


def left_behind(snapshot: Snapshot, program: Sequence[str]) -> Iterator[str]:
    """Words that name something here which the run's copy of the code, where the program runs,
    will not have: data that git ignores, most of the time."""
    names = {source.name for source in snapshot.sources}
    here = snapshot.root / snapshot.place
    for path in dict.fromkeys(path for word in program[1:] for path in _paths(word)):
        name = _name(snapshot, path)
        is_taken = name in names or any(known.startswith(f"{name}/") for known in names)
        if name not in (".", snapshot.place) and not is_taken and (here / path).exists():
            yield path


def check_words(words: Sequence[str], what: str) -> None:
    """SpecError for words that cannot be arguments, or that hold what may not be written down."""
    environ = dict(os.environ)
    for place, word in enumerate(words):
        if "\0" in word:
            raise SpecError(f"word {place} of {what} holds a NUL, which no argument can")
        name = held_secret(word, environ)
        if name is not None:
            raise SpecError(
                f"word {place} of {what} holds the value of {name}, which may be a secret "
                "and would be written down; let the program read it from its environment, "
                f"which the job inherits from the shell that submits (if it is none: env -u {name} "
                "ftslurm ...)"
            )


def _check_own_file(snapshot: Snapshot, command: str, names: set[str]) -> None:
    name = _name(snapshot, command)
    if name not in names:
        raise SpecError(
            f"program `{command}` is not in the code that the run takes along from "
            f"`{snapshot.root}`; submit from the folder that holds it, or give its absolute path"
        )
    if not os.access(snapshot.root / name, os.X_OK):
        raise SpecError(
            f"program `{command}` may not be executed; chmod +x it, or name what runs it"
        )


def _is_path_changed(spec: RunSpec) -> bool:
    """What is on PATH where the ranks run cannot be told from here."""
    return spec.cluster.ranks_are_inside or spec.cluster.changes_path


def _script(program: Sequence[str]) -> Optional[str]:
    """The relative script that an interpreter is given, None when it is given none."""
    if not _INTERPRETER.fullmatch(PurePosixPath(program[0]).name):
        return None
    words = iter(program[1:])
    for word in words:
        if not word.startswith("-"):
            is_own = word.endswith((".py", ".sh")) and not PurePosixPath(word).is_absolute()
            return word if is_own else None
        if word in _NO_SCRIPT:
            if (word, next(words, None)) == ("-m", TASK_MODULE):
                continue
            return None
        if word in _WITH_VALUE:
            next(words, None)
    return None


def _paths(word: str) -> Iterator[str]:
    """What of a word may be a relative path: itself, or the value in `--data=x`."""
    for value in (word, word.partition("=")[2] if word.startswith("-") else ""):
        if (
            value
            and not value.startswith(("-", "/"))
            and len(value) < os.pathconf("/", "PC_PATH_MAX")
        ):
            yield value


def _name(snapshot: Snapshot, path: str) -> str:
    """Name inside the snapshot of a path relative to where the run is submitted from."""
    return os.path.normpath(Path(snapshot.place) / path)
