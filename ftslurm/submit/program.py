"""`ftslurm run [OVERRIDES] [options] -- COMMAND [ARGS]`: any program, submitted as a run.

Everything after `--` is the program, word by word. All else is as with `ftslurm submit`; keys that
mean nothing to a program are refused.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Optional

from ftslurm.errors import UsageError
from ftslurm.submit.command import add_options, submit_new
from ftslurm.submit.program_keys import LOOP_ONLY, OF_CHECKPOINT
from ftslurm.submit.say import speaker

_EPILOG = """examples:
  ftslurm run -- python train.py --epochs 10
  ftslurm run cluster=slurm cluster.nodes=4 cluster.tasks_per_node=8 --wait -- python train.py
  ftslurm run --dry-run -- bash -c 'exec ./prog --out "$FTSLURM_RESUME_DIR"'

Each rank starts the command once, in RUN/code, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
the like for torch's env://. It goes on from what it has saved in FTSLURM_RESUME_DIR, which all
attempts of the run share; `import ftslurm` offers resume_dir() and should_stop()."""


def main(argv: Sequence[str]) -> int:
    own, program = _split(argv)
    parser = argparse.ArgumentParser(
        prog="ftslurm run",
        usage="ftslurm run [OVERRIDE ...] [options] -- COMMAND [ARG ...]",
        description="Submit any program as a run: it is requeued, restarted and resumed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.set_defaults(drill=False)
    options = parser.parse_intermixed_args(own)
    if not program or not program[0]:
        raise UsageError(
            "there is no program; write it after `--`, e.g. `ftslurm run cluster.nodes=2 -- python "
            "train.py`"
        )
    for word in options.overrides:
        _check_override(word)
    return submit_new(options, speaker(as_json=options.json), program=program)


def _split(argv: Sequence[str]) -> tuple[list[str], Optional[list[str]]]:
    """(our own words, the program's); the first `--` parts them."""
    words = list(argv)
    if "--" not in words:
        return words, None
    place = words.index("--")
    return words[:place], words[place + 1 :]


def _check_override(word: str) -> None:
    key = word.lstrip("+~").partition("=")[0]
    group = re.split(r"[./@]", key)[0]
    if group in LOOP_ONLY or (group == "checkpoint" and key != OF_CHECKPOINT):
        raise UsageError(
            f"`{word}` would have no effect on a program of your own; give it to the program, "
            "after `--`"
        )
