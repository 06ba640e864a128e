"""What the ranks' interpreter has installed, asked of it at submit, and whether it will do at all.

Asks by running it here. One that is in a container or in an archive, or found by the batch script
only, is not asked: there is nothing of it here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

from ftslurm.errors import SpecError
from ftslurm.run.spec import LIVE, RunSpec
from ftslurm.submit.rank import OWN_RANK
from ftslurm.submit.snapshot import is_installed

_LIST_PACKAGES = (
    "import importlib.metadata as m, json\n"
    "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
)
_NEW_ENOUGH = "import sys; sys.exit(sys.version_info < (3, 10))"


@dataclass(frozen=True)
class Interpreters:
    """All of a spec that decides which interpreter is asked, and for what: specs that are equal in
    this have equal packages."""

    batch: str
    rank: Optional[str]
    """Of the ranks, where it is another."""
    is_inside: bool
    """The ranks' is in a container or an archive."""
    changes_path: bool
    trains: bool
    """The training half is loaded."""
    needed: str
    """What it must have installed to start a rank; empty: nothing."""

    @classmethod
    def of(cls, spec: RunSpec, batch: str) -> Interpreters:
        cluster = spec.cluster
        return cls(
            batch=batch,
            rank=cluster.rank_python,
            is_inside=cluster.ranks_are_inside,
            changes_path=cluster.changes_path,
            trains=not spec.program and not spec.entry.startswith(OWN_RANK),
            needed=", ".join(_needed(spec)),
        )

    def packages(self) -> dict[str, str]:
        """Names and versions; SpecError for an interpreter that cannot start a rank."""
        if self.is_inside or self._is_found_later(self.rank or self.batch):
            if not self._is_found_later(self.batch):
                _ask("python", self.batch, _LIST_PACKAGES)
            return {}
        key = "python" if self.rank is None else "rank_python"
        python = self.rank or self.batch
        packages: dict[str, str] = json.loads(_ask(key, python, _LIST_PACKAGES))
        if self.trains:
            _ask(key, python, _NEW_ENOUGH, "is older than Python 3.10, which training needs")
        if self.needed and python != sys.executable:
            wrong = f"cannot import {self.needed}, which starts the ranks"
            _ask(key, python, f"import {self.needed}", wrong)
        return packages

    def _is_found_later(self, python: str) -> bool:
        """On a PATH that set-up lines or cluster.env may make another than this one."""
        return "/" not in python and self.changes_path


def _needed(spec: RunSpec) -> Iterator[str]:
    if not spec.program:
        yield "submitit"
    # Frozen code holds ftslurm itself; live code may rely on the one that is installed.
    if spec.code == LIVE and is_installed():
        yield "ftslurm"


def _ask(key: str, python: str, program: str, wrong: str = "is no Python of 3.9 or later") -> bytes:
    """What a program prints; SpecError, with what is `wrong`, when it fails."""
    # The submitter's PYTHONPATH is not the ranks'.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [python, "-c", program],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except OSError as error:
        raise SpecError(f"cluster.{key} `{python}` cannot be run: {error.strerror}") from None
    if done.returncode:
        raise SpecError(
            f"cluster.{key} `{python}` {wrong} ({_last_line(done)}); install ftslurm with that "
            "interpreter's pip, or name another"
        )
    return done.stdout


def _last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    said = os.fsdecode(done.stderr).strip().splitlines()
    return said[-1] if said else "it said nothing"
