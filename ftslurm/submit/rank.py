"""The process of one rank: `python -u -m ftslurm.submit.rank FOLDER`, started by the batch script.

The stop flag is installed before anything heavy is imported, then submitit runs the pickled call.
What the rank does is in run.json's `spec.entry`; the pickle carries no state that could go stale.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import SpecError, UsageError
from ftslurm.files import read_json
from ftslurm.run.layout import RunLayout
from ftslurm.run.rank import RankEnvironment, stop_flag, write_rank_error

OWN_RANK = "rank:"
"""`entry: rank:module:function` calls the function as the whole rank, without the training half:
a rank of your own, without torch. It speaks the protocol of ftslurm/run/rank.py and returns one of
the RANK_* codes of ftslurm/errors.py."""

TRAINING_HALF = "ftslurm.train.entry:main"


class TrainCall:
    """The callable that submitit pickles, by reference: no arguments, no state.

    To a FtslurmExecutor it may be submitted with the run directory as its argument.
    """

    def __call__(self, run_dir: Optional[str] = None) -> None:
        """Be the rank; always leaves by SystemExit or with the rank's error on record."""
        env = RankEnvironment.read()
        entry = str(read_json(RunLayout(env.run_dir).run_json)["spec"]["entry"])
        try:
            own = entry.startswith(OWN_RANK)
            code = find(entry[len(OWN_RANK) :] if own else TRAINING_HALF)()
        except Exception as error:
            write_rank_error(env, error, step=None)
            raise
        raise SystemExit(code)


def find(path: str) -> Any:
    """The object at `module:name`."""
    module, _, name = path.partition(":")
    found = getattr(import_module(module), name, None)
    if found is None:
        raise SpecError(f"module `{module}` has no `{name}`; entry is `module:function`")
    return found


def main(argv: list[str]) -> None:
    if len(argv) != 1:
        raise UsageError("usage: python -m ftslurm.submit.rank FOLDER")
    from ftslurm.submit.executor import run_pickled

    # A job may have been submitted from inside another job of submitit's.
    os.environ["SUBMITIT_EXECUTOR"] = "ftslurm"
    run_pickled(Path(argv[0]))


if __name__ == "__main__":
    stop_flag.install()
    main(sys.argv[1:])
