"""The token store a run reads, named and described at submit.

Building and describing are done by `ftslurm data` in a process of its own, so that submitting needs
neither numpy nor h5py here.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import DataError
from ftslurm.run.spec import RunSpec

DEFAULT_NAME = "python-stdlib.h5"
REFERENCE_MODULE = "ftslurm.train.reference"
"""Its functions read the default data set when data.path names none."""


@dataclass(frozen=True)
class Dataset:
    """What is frozen of a token store."""

    path: Path
    snapshot: str
    tokenizer_digest: str


@dataclass(frozen=True)
class Wanted:
    """The store a spec asks for."""

    path: Path
    may_build: bool
    """It is the default one, and is made when it is not there."""


def wanted_dataset(spec: RunSpec, runs_dir: Path, folder: Path) -> Optional[Wanted]:
    """None for a loop of one's own that names no data.path: it reads what it likes."""
    if spec.data.path is not None:
        return Wanted(folder / Path(spec.data.path).expanduser(), may_build=False)
    if spec.entry.partition(":")[0] == REFERENCE_MODULE:
        return Wanted(runs_dir / "datasets" / DEFAULT_NAME, may_build=True)
    return None


def prepare_dataset(wanted: Wanted, *, python: str, import_from: Path) -> Dataset:
    """Build the default store when it is missing; describe the store."""
    if wanted.may_build and not wanted.path.exists():
        wanted.path.parent.mkdir(parents=True, exist_ok=True)
        _data(["build", "--python-stdlib", str(wanted.path)], python, import_from)
    elif not wanted.path.is_file():
        raise DataError(
            f"data.path `{wanted.path}` does not exist; make it with `ftslurm data build SOURCE... "
            f"{wanted.path.name}`"
        )
    report = _data(["describe", str(wanted.path)], python, import_from)
    return Dataset(wanted.path, str(report["snapshot"]), str(report["tokenizer_digest"]))


def _data(arguments: list[str], python: str, import_from: Path) -> dict[str, Any]:
    """Run `ftslurm data`; its talk goes on to our stderr, its JSON is the answer."""
    verb, *rest = arguments
    done = subprocess.run(
        [python, "-m", "ftslurm", "data", verb, "--json", *rest],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        cwd=import_from,
        env={**os.environ, "PYTHONPATH": str(import_from)},
        check=False,
    )
    if done.returncode:
        raise DataError(
            f"`ftslurm data {verb}` failed with code {done.returncode}, as it says above"
        )
    report: dict[str, Any] = json.loads(done.stdout)
    return report
