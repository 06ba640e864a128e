"""The process of one rank: `python -u -m ftslurm.submit.rank FOLDER`, started by the batch script.

The stop flag is installed before anything heavy is imported, then submitit runs the pickled call;
that of a program is made at once.
What the rank does is in run.json's `spec.entry`; the pickle carries no state that could go stale.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, Optional

from ftslurm.errors import (
    RANK_FAILED,
    RANK_NEVER_RETRY,
    CodeError,
    FtslurmError,
    RunError,
    SpecError,
    UsageError,
)
from ftslurm.run.attempts import FAILED, Outcome, write_outcome
from ftslurm.run.layout import RunLayout
from ftslurm.run.rank import RankEnvironment, stop_flag, write_rank_error
from ftslurm.run.record import read_record
from ftslurm.run.same_code import check_alone
from ftslurm.run.secret import without_secrets
from ftslurm.run.trust import require_own

OWN_RANK = "rank:"
"""`entry: rank:module:function` calls the function as the whole rank, without the training half:
a rank of your own, without torch. It speaks the protocol of ftslurm/run/rank.py, reads its spec by
`open_record` of ftslurm/run/secret.py and returns one of the RANK_* codes of ftslurm/errors.py."""

TRAINING_HALF = "ftslurm.train.entry:main"


class TrainCall:
    """The callable that submitit pickles, by reference: no arguments, no state.

    To a FtslurmExecutor it may be submitted with the run directory as its argument.
    """

    def __call__(self, run_dir: Optional[str] = None) -> None:
        """Be the rank; always leaves by SystemExit or with the rank's error on record."""
        env = RankEnvironment.read()
        try:
            code = load(env)()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is on record
            write_rank_error(env, error, step=None)
            print(without_secrets(traceback.format_exc()), file=sys.stderr)  # noqa: T201
            # submitit would pickle the traceback, secrets and all, into RUN/submit.
            raise SystemExit(RANK_FAILED) from None
        raise SystemExit(code)


def load(env: RankEnvironment) -> Callable[[], Any]:
    """What the rank runs. Leaves by SystemExit when the same start would fail the same way."""
    record = read_record(env.layout)
    entry = record.spec.entry
    if not entry.startswith(OWN_RANK):
        return find(TRAINING_HALF)
    try:
        function = find(entry[len(OWN_RANK) :])
        check_alone(env, record)
    except (CodeError, SpecError) as error:
        _give_up(env, error)
    return function


def find(path: str) -> Callable[[], Any]:
    """The function at `module:name`."""
    module, _, name = path.partition(":")
    found: Optional[Callable[[], Any]] = getattr(import_module(module), name, None)
    if found is None:
        raise SpecError(f"module `{module}` has no `{name}`; entry is `module:function`")
    return found


def _needs_submitit(folder: Path) -> bool:
    """Not for a program: its rank only starts another process, which has its own imports to do, and
    loading submitit takes longer than all else that such a rank does."""
    layout = RunLayout(folder.parent)
    require_own(layout)
    try:
        return not read_record(layout).spec.program
    except (OSError, FtslurmError):
        # What is wrong with it the call finds too, and puts on record. A program's interpreter has
        # no submitit (`python -S`).
        return False


def _give_up(env: RankEnvironment, error: FtslurmError) -> NoReturn:
    print(f"ftslurm: error: {error}", file=sys.stderr)  # noqa: T201
    write_rank_error(env, error, step=None)
    outcome = Outcome(FAILED, 0, None, reason=str(error), retry=False, written_at=time.time())
    if not env.attempt_layout.outcome_json.exists():
        write_outcome(env.attempt_layout, outcome)
    raise SystemExit(RANK_NEVER_RETRY)


def main(argv: list[str]) -> None:
    if len(argv) != 1:
        raise UsageError("usage: python -m ftslurm.submit.rank FOLDER")
    folder = Path(argv[0])
    # A job may have been submitted from inside another job of submitit's.
    os.environ["SUBMITIT_EXECUTOR"] = "ftslurm"
    try:
        if _needs_submitit(folder):
            from ftslurm.submit.executor import run_pickled

            run_pickled(folder)
        else:
            TrainCall()()
    except RunError as error:  # the run directory is not ours alone: nothing of it has run
        print(f"ftslurm: error: {error}", file=sys.stderr)  # noqa: T201
        raise SystemExit(RANK_NEVER_RETRY) from None


if __name__ == "__main__":
    stop_flag.install()
    main(sys.argv[1:])
