"""The door: verb -> room. Imports the chosen module and no other.

Each verb is a `main(argv) -> exit code` in its own module, with its own argparse parser.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from importlib import import_module
from typing import Optional

from ftslurm.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TRY_AGAIN,
    EXIT_USAGE,
    FtslurmError,
)

# verb -> (module:function, one line of help). `data` alone leads into the training half; it is
# imported by name when asked for, so that every other verb stays free of numpy and h5py.
VERBS = {
    "submit": ("ftslurm.submit.command:main", "compose, freeze and submit a run"),
    "run": ("ftslurm.submit.program:main", "submit any program: ftslurm run -- python train.py"),
    "status": ("ftslurm.run.status:main", "where a run stands and what happened to it"),
    "logs": ("ftslurm.operate.logs:main", "the log of one rank, followed on request"),
    "save": ("ftslurm.operate.save:main", "have a running run save now and go on"),
    "stop": ("ftslurm.operate.stop:stop_main", "have a run save and leave"),
    "pause": ("ftslurm.operate.stop:pause_main", "have a run save and leave, its job held"),
    "resume": ("ftslurm.operate.resume:main", "let a stopped, paused or failed run go on"),
    "cancel": ("ftslurm.operate.cancel:main", "end a run's jobs now, without a save"),
    "verify": ("ftslurm.checkpoint.verify:main", "check every byte of a run's checkpoints"),
    "report": ("ftslurm.report.command:main", "what broke, whose fault, what it cost"),
    "metrics": ("ftslurm.metrics.command:main", "a run's figures as Prometheus text"),
    "doctor": ("ftslurm.doctor.command:main", "is this cluster set up so that runs survive?"),
    "plan": ("ftslurm.plan.command:main", "what failures will cost at a size, before a submit"),
    "health": ("ftslurm.health.command:main", "look at a node's GPUs and links, and act on it"),
    "data": ("ftslurm.train.build:main", "build or describe a token store"),
    "claim": ("ftslurm.recovery.claim:main", "(batch script) take the next attempt number"),
    "recover": ("ftslurm.recovery.recover:main", "(batch script) decide what follows an attempt"),
}

# Of what the system says, what does not pass by waiting. The rest may be a file server: a batch
# script tries code 75 again for minutes, and a wrong end would be final.
_ADVICE = {
    errno.ENAMETOOLONG: (EXIT_USAGE, "name a shorter path"),
    errno.ENOTDIR: (EXIT_USAGE, "a file stands where the path has a folder: name another path"),
    errno.EISDIR: (EXIT_USAGE, "name a file"),
    # As an automounter does that is not there, and a server whose exports or tickets are not yet.
    errno.ELOOP: (EXIT_TRY_AGAIN, "mend the link, or try again where it is an automounter's"),
    errno.EEXIST: (EXIT_TRY_AGAIN, "move away what stands there, then try again"),
    errno.EACCES: (EXIT_TRY_AGAIN, "see whether you may, then try again"),
    errno.EPERM: (EXIT_TRY_AGAIN, "see whether you may, then try again"),
}


def main(argv: Optional[list[str]] = None) -> int:
    """Run one verb; every FtslurmError, and a Ctrl-C that the verb itself says nothing of, becomes
    one line on stderr and its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Names of jobs and paths hold anything; a terminal of another alphabet shows a `?`. Where
        # Python itself lets odd bytes of a path through (LANG=C), a script gets them as they are.
        sys.stdout.reconfigure(errors="replace")
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())  # noqa: T201
        return EXIT_OK if arguments else EXIT_USAGE
    if arguments[0] in ("-V", "--version"):
        from ftslurm import __version__

        print(__version__)  # noqa: T201
        return EXIT_OK
    verb, *rest = arguments
    if verb not in VERBS:
        print(  # noqa: T201
            f"ftslurm: error: no verb `{verb}`; choose from {', '.join(VERBS)}", file=sys.stderr
        )
        return EXIT_USAGE
    module, _, function = VERBS[verb][0].partition(":")
    try:
        code = int(getattr(import_module(module), function)(rest))
    except FtslurmError as error:
        print(f"ftslurm: error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        print(f"ftslurm: {verb} was interrupted", file=sys.stderr)  # noqa: T201
        return EXIT_INTERRUPTED
    except FileNotFoundError as error:
        print(f"ftslurm: error: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_FAILED
    except BrokenPipeError:  # `ftslurm status RUN | head` has seen enough
        return _without_stdout(EXIT_OK)
    except OSError as error:
        code, advice = _ADVICE.get(error.errno or 0, (EXIT_TRY_AGAIN, "try again"))
        print(f"ftslurm: error: {error}; {advice}", file=sys.stderr)  # noqa: T201
        return code
    return _told(code)


def _told(code: int) -> int:
    """What was asked for is done: whatever becomes of the words, nobody is to do it again."""
    if sys.stdout is None:  # closed (`>&-`)
        return code
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return _without_stdout(EXIT_OK)
    except OSError as error:
        said = f"it is done, and what was to be said of it could not be written: {error}"
        print(f"ftslurm: error: {said}", file=sys.stderr)  # noqa: T201
        return _without_stdout(code or EXIT_FAILED)
    return code


def _without_stdout(code: int) -> int:
    """The interpreter flushes stdout once more as it ends, and would complain of the same again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _help() -> str:
    lines = [f"  {verb:8} {text}" for verb, (_, text) in VERBS.items()]
    return "\n".join(
        [
            "usage: ftslurm VERB [options]      (ftslurm VERB --help says more)",
            "",
            *lines,
            "",
            "example: ftslurm submit experiment=gpt_ddp cluster.nodes=2 --wait",
        ]
    )
