"""A spec becomes the batch script's text and sbatch's arguments. Pure but for reading the template.

`#SBATCH` lines are not shell and bash is not sbatch, so every value is checked for its place: lines
take numbers and words of a fixed alphabet only, what may hold any character becomes an argument of
sbatch, and what reaches bash goes through shlex.quote.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from ftslurm.errors import SpecError, UsageError
from ftslurm.run.spec import ClusterSpec, RunSpec
from ftslurm.scheduler.hostlist import expand
from ftslurm.scheduler.protocol import LOGS

TEMPLATE = Path(__file__).resolve().parents[2] / "slurm" / "train.sbatch.j2"

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A run's name: it becomes part of a folder's name and of a comment in the script."""

_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:+@=/-]{0,199}")
_MEM = re.compile(r"\d{1,12}[KMGT]?")
_MAX_LENGTH = {"job_name": 200, "constraint": 1000, "comment": 1000}


def render_script(
    spec: RunSpec,
    *,
    run_id: str,
    run_dir: Path,
    python: str,
    python_path: Sequence[Path],
    launch: Sequence[str],
) -> str:
    """Text of RUN/submit/train.sbatch. `launch`: the scheduler's argv that starts all ranks."""
    check_values(spec, run_dir)
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # bash, not HTML: quoted below
    )
    cluster = spec.cluster
    text: str = environment.from_string(TEMPLATE.read_text()).render(
        nodes=cluster.nodes,
        tasks_per_node=cluster.tasks_per_node,
        cpus_per_task=cluster.cpus_per_task,
        gpus_per_node=cluster.gpus_per_node,
        mem=cluster.mem,
        time=cluster.time,
        signal=cluster.signal,
        signal_lead_s=cluster.signal_lead_s,
        run_id=run_id,
        run_dir=shlex.quote(str(run_dir)),
        python_path=shlex.quote(":".join(map(str, python_path))),
        python=shlex.quote(python),
        launch=_bash_command(launch),
    )
    return text


def sbatch_options(cluster: ClusterSpec, *, log: str) -> list[str]:
    """Arguments of sbatch beside the script's lines. `log`: the batch shell's, with patterns."""
    values = {
        "job-name": cluster.job_name,
        "account": cluster.account,
        "partition": cluster.partition,
        "qos": cluster.qos,
        "reservation": cluster.reservation,
        "constraint": cluster.constraint,
        "exclude": cluster.exclude,
        "comment": cluster.comment,
        "output": log,
    }
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def check_values(spec: RunSpec, run_dir: Path) -> None:
    """SpecError for a value that its place in script or command cannot hold."""
    cluster = spec.cluster
    if not NAME.fullmatch(spec.name):
        raise SpecError(
            f"name is `{_shown(spec.name)}`; use letters, digits, `.`, `_` and `-`, at most 64, "
            "beginning with a letter or digit"
        )
    for key in ("account", "partition", "qos", "reservation"):
        value = getattr(cluster, key)
        if value is not None and not _WORD.fullmatch(value):
            raise SpecError(f"cluster.{key} is `{_shown(value)}`; no such name exists in Slurm")
    for key, most in _MAX_LENGTH.items():
        _check_text(f"cluster.{key}", getattr(cluster, key), most)
    if cluster.mem is not None and not _MEM.fullmatch(cluster.mem):
        raise SpecError(f"cluster.mem is `{_shown(cluster.mem)}`; write a number and K, M, G or T")
    if cluster.exclude is not None:
        try:
            expand(cluster.exclude)
        except UsageError as error:
            raise SpecError(f"cluster.exclude: {error}") from None
    for key, path in (("runs_dir", str(run_dir)), ("cluster.python", cluster.python or "/")):
        # sbatch and srun expand `%` in the names of logs, and read `\` as its escape.
        if not path.isprintable() or re.search(r"[%\\:]", path):
            raise SpecError(
                f"{key} leads to `{_shown(path)}`; a path without `%`, `\\`, `:` is needed"
            )


def _check_text(key: str, value: Optional[str], most: int) -> None:
    if value is None:
        return
    if not value or len(value) > most:
        raise SpecError(f"{key} has {len(value)} characters; give 1 to {most}")
    if not value.isprintable():
        raise SpecError(
            f"{key} is `{_shown(value)}`; line breaks and control characters are refused"
        )


def _bash_command(argv: Sequence[str]) -> str:
    """One option a line."""
    text = ""
    for argument in argv:
        is_option = argument.startswith("--") and argument != "--"
        text += (" \\\n    " if is_option else " ") + _bash_word(argument)
    return text.strip()


def _bash_word(argument: str) -> str:
    """Quoted for bash; the place of the attempt's logs is a variable of the script."""
    return '"$logs"'.join(shlex.quote(part) if part else "" for part in argument.split(LOGS))


def _shown(value: Any) -> str:
    text = ascii(value)[1:-1]
    return text if len(text) <= 60 else text[:60] + "..."
