"""How the program at hand was started, so that a node can start it in the same way. Reads only."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ftslurm.errors import UsageError
from ftslurm.hydra_app.task import Call
from ftslurm.run.spec import ClusterSpec
from ftslurm.submit import git
from ftslurm.submit.program_files import TASK_MODULE


def how_started(folder: Path) -> Call:
    """UsageError for a start that cannot be repeated: a notebook, `python -c`."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    words = _command_line()
    if spec is not None and spec.name != "__main__":
        name = spec.name[: -len(".__main__")] if spec.name.endswith(".__main__") else spec.name
        return Call(None, name, tuple(_after_module(words, name)), str(folder))
    script = getattr(main, "__file__", None)
    if script is None or not Path(script).is_file():
        raise UsageError(
            "hydra/launcher=ftslurm starts the program's script on the nodes, and this program has "
            "none; start it as `python script.py` or `python -m module`"
        )
    return Call(_name(Path(script), folder), None, tuple(_after(words, Path(script))), str(folder))


def program_of(call: Call, cluster: ClusterSpec) -> list[str]:
    """What each rank runs."""
    python = cluster.rank_python or cluster.python or sys.executable
    if cluster.environment is not None:
        python = "python"  # of what is unpacked on the node
    what = ["-m", call.module] if call.module is not None else [str(call.script)]
    return [python, "-u", "-m", TASK_MODULE, *what]


def _name(script: Path, folder: Path) -> str:
    """Relative where it is code that a run takes along; commands of an environment are not."""
    path = script.resolve()
    root = git.find_repository(folder.resolve()) or folder.resolve()
    is_taken = path.suffix == ".py" and path.is_relative_to(root)
    if not is_taken or path.is_relative_to(Path(sys.prefix).resolve()):
        return str(script.absolute())
    return os.path.relpath(path, folder.resolve())


def _command_line() -> list[str]:
    """As typed: a program may have taken its own options off sys.argv since."""
    words = getattr(sys, "orig_argv", None)  # from Python 3.10
    if words is None:
        words = os.fsdecode(Path("/proc/self/cmdline").read_bytes()).split("\0")[:-1]
    return list(words)


def _after(words: Sequence[str], script: Path) -> list[str]:
    for place, word in enumerate(words[1:], start=1):
        if Path(word).is_file() and Path(word).samefile(script):
            return list(words[place + 1 :])
    return sys.argv[1:]


def _after_module(words: Sequence[str], module: str) -> list[str]:
    for place, pair in enumerate(zip(words, words[1:])):
        if pair == ("-m", module):
            return list(words[place + 2 :])
    return sys.argv[1:]
