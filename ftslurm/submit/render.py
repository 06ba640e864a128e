"""A spec becomes the batch script's text and sbatch's arguments. Pure but for reading the template.

`#SBATCH` lines are not shell and bash is not sbatch, so every value is checked for its place
(cluster_values.py): lines take numbers and words of a fixed alphabet only, what may hold any
character becomes an argument of sbatch, and what reaches bash goes through shlex.quote.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Union

from ftslurm.errors import SpecError
from ftslurm.node.environment import PLACEHOLDER, Environment
from ftslurm.node.standby_command import check_standby, rank_modules, standby_modules
from ftslurm.run.spec import ClusterSpec, RunSpec
from ftslurm.scheduler.launch import COUNT, LOGS, NODES, RANKS
from ftslurm.submit.assets import batch_template
from ftslurm.submit.cluster_values import INTERFACE_VARIABLES, check_cluster, shown

if TYPE_CHECKING:
    from jinja2 import Template

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A run's name: it becomes part of a folder's name and of a comment in the script."""

_TRY, _TRIAL = '"$python" -m ftslurm.node.preflight', "ftslurm.train.preflight"
"""On the batch node, and in the place of each rank."""

_NO_SITE = " -S"
"""What decides, and what starts a program, needs the standard library alone, and half of a start of
Python is its site. Not for live code: ftslurm itself may be among the installed packages."""

RUN_DIR = "{run_dir}"
"""Stands in cluster.container for the run directory."""


def render_script(
    spec: RunSpec,
    *,
    run_id: str,
    run_dir: Path,
    python: str,
    python_path: Sequence[Path],
    launch: Sequence[str],
    requeue: str = "--requeue",
    on_nodes: Sequence[str] = (),
    agents: Sequence[str] = (),
    standbys: Sequence[str] = (),
    preflight: Sequence[str] = (),
    environment: Optional[Environment] = None,
    live_folder: Optional[Path] = None,
) -> str:
    """Text of RUN/submit/train.sbatch. `launch`: argv that starts all ranks, `on_nodes`: one that
    starts a process a node, `agents`, `standbys` and `preflight`: those that start these (all of
    scheduler/launch.py). `requeue`: sbatch's option that lets the job be queued again, or not.
    `live_folder`: where code=live runs."""
    check_values(spec, run_dir)
    cluster = spec.cluster
    no_site = "" if live_folder else _NO_SITE
    cold = f'"$python"{no_site}'
    replaced = _Replaced(run_dir, environment)
    own = replaced(rank_python(cluster, python, environment))
    interpreter = "python" if own == python else "rank_python"
    is_inside = bool(cluster.container or cluster.container_image)
    inside = _inside([replaced(word) for word in cluster.container])
    text: str = _template().render(
        **_job(cluster),
        # A job that has agents, who notice it, outlives the loss of a node.
        no_kill=bool(agents) and cluster.nodes + cluster.spares > 1,
        # Words that are read by their place: the last one needs those before it.
        wants_nodes=bool(preflight) or any(NODES in word for word in launch),
        wants_count=bool(preflight) or any(COUNT in word for word in launch),
        requeue=requeue,
        run_id=run_id,
        run_dir=shlex.quote(str(run_dir)),
        python_path=shlex.quote(":".join(map(str, python_path))),
        live_folder=None if live_folder is None else shlex.quote(str(live_folder)),
        python=shlex.quote(python),
        cold=cold,
        rank_python=shlex.quote(own) if own != python else None,
        setup=[shlex.quote(line) for line in cluster.setup],
        exports=[_assignment(name, replaced(v)) for name, v in _exports(cluster).items()],
        agents=agents and _lines(agents, f'{cold} -m ftslurm.agent "$FTSLURM_RUN_DIR"'),
        metrics_dir=spec.recovery.metrics_dir and shlex.quote(spec.recovery.metrics_dir),
        unpack=_unpack(on_nodes, environment, None if is_inside else own),
        standby=standbys and _lines(standbys, _module(interpreter, standby_modules(spec))),
        preflight=preflight and _lines(_TRY, preflight, *inside, _module(interpreter, [_TRIAL])),
        ranks=_lines(
            launch,
            *inside,
            f"{_module(interpreter, rank_modules(spec), no_site if spec.program else '')} "
            '"$FTSLURM_RUN_DIR/submit"',
            '2>&"$launcher"' if agents else "",
        ),
    )
    return text


def _job(cluster: ClusterSpec) -> dict[str, object]:
    """What the job is asked for by lines of the script."""
    return {
        "nodes": cluster.nodes + cluster.spares,
        "tasks_per_node": cluster.tasks_per_node,
        "cpus_per_task": cluster.cpus_per_task,
        # Asked for by node in any case: --gpus-per-task of a job needs a number of tasks, which
        # one with spares does not have.
        "gpus_per_node": cluster.gpus_per_node or cluster.gpus_per_task * cluster.tasks_per_node,
        "mem": cluster.mem,
        "time": cluster.time,
        "signal": cluster.signal,
        "signal_lead_s": cluster.signal_lead_s,
    }


@cache
def _template() -> Template:
    from jinja2 import Environment as Templates
    from jinja2 import StrictUndefined

    templates = Templates(
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # bash, not HTML: quoted below
    )
    return templates.from_string(batch_template().read_text())


def rank_python(cluster: ClusterSpec, python: str, environment: Optional[Environment]) -> str:
    """The interpreter of the ranks, as cluster.rank_python or as what follows without it."""
    if cluster.rank_python is not None:
        return cluster.rank_python
    return python if environment is None else environment.python


def sbatch_options(cluster: ClusterSpec, *, log: Optional[str]) -> list[str]:
    """Arguments of sbatch beside the script's lines. `log`: the batch shell's, with patterns; None
    where another says it."""
    values = {
        "job-name": cluster.job_name,
        "account": cluster.account,
        "partition": cluster.partition,
        "qos": cluster.qos,
        "reservation": cluster.reservation,
        "constraint": cluster.constraint,
        "exclude": cluster.exclude,
        "comment": cluster.comment,
        "licenses": cluster.licenses,
        "switches": cluster.switches,
        "mail-user": cluster.mail_user,
        "mail-type": cluster.mail_type,
        "output": log,
    }
    given = [f"--{name}={value}" for name, value in values.items() if value is not None]
    return [*given, *cluster.sbatch]


def check_values(spec: RunSpec, run_dir: Path) -> None:
    """SpecError for a value that its place in script or command cannot hold."""
    for key, name in (("name", spec.name), ("run_id", spec.run_id)):
        if name is not None and not NAME.fullmatch(name):
            raise SpecError(
                f"{key} is `{shown(name)}`; use letters, digits, `.`, `_` and `-`, at most 64, "
                "beginning with a letter or digit"
            )
    check_cluster(spec.cluster)
    check_standby(spec)
    path = str(run_dir)
    # sbatch and srun expand `%` in the names of logs, and read `\` as its escape.
    if not path.isprintable() or re.search(r"[%\\:]", path):
        raise SpecError(
            f"runs_dir leads to `{shown(path)}`; a path without `%`, `\\`, `:` is needed"
        )
    if spec.cluster.container_image is not None and "," in path:
        raise SpecError(f"runs_dir leads to `{shown(path)}`; pyxis parts its mounts at the comma")


class _Replaced:
    """Puts the real folders in the place of what stands for them."""

    def __init__(self, run_dir: Path, environment: Optional[Environment]) -> None:
        self._values = {RUN_DIR: str(run_dir)}
        if environment is not None:
            self._values[PLACEHOLDER] = str(environment.folder)

    def __call__(self, text: str) -> str:
        for name, value in self._values.items():
            text = text.replace(name, value)
        return text


def _exports(cluster: ClusterSpec) -> dict[str, str]:
    if cluster.interface is None:
        return cluster.env
    gloo, nccl = INTERFACE_VARIABLES
    # NCCL takes a bare name for the beginning of one: `ib1` would be ib10 too.
    return {gloo: cluster.interface, nccl: f"={cluster.interface}", **cluster.env}


def _assignment(name: str, value: str) -> str:
    word = shlex.quote(value)
    # `A==b` assigns `=b`, but whoever reads it takes it for a slip of the pen.
    return f"{name}='{word}'" if word.startswith("=") else f"{name}={word}"


def _unpack(
    on_nodes: Sequence[str], environment: Optional[Environment], rank_python: Optional[str]
) -> str:
    """Empty: there is nothing to unpack. `rank_python`: None where it may link to what only the
    container has."""
    if environment is None:
        return ""
    words = [str(environment.archive), str(environment.folder)]
    if rank_python is not None:
        words.append(rank_python)
    return _lines(on_nodes, f'"$python" -m ftslurm.node.unpack {shlex.join(words)}')


def _module(interpreter: str, words: Sequence[str], option: str = "") -> str:
    return f'"${interpreter}"{option} -u -m {shlex.join(words)}'


def _inside(container: Sequence[str]) -> list[Union[str, Sequence[str]]]:
    """What stands before a rank's command, for it to be within reach of signals in there."""
    return ['"$python" -m ftslurm.node.prefix', container] if container else []


def _lines(*parts: Union[str, Sequence[str]]) -> str:
    """One command of bash: texts as they are, argv quoted."""
    texts = [part if isinstance(part, str) else _bash_command(part) for part in parts]
    return " \\\n    ".join(text for text in texts if text)


def _bash_command(argv: Sequence[str]) -> str:
    """One option a line."""
    text = ""
    for argument in argv:
        is_option = argument.startswith("--") and argument != "--"
        text += (" \\\n    " if is_option else " ") + _bash_word(argument)
    return text.strip()


_VARIABLES = {
    LOGS: '"$logs"',
    NODES: '"$rank_nodes"',
    COUNT: '"$rank_count"',
    RANKS: '"$((rank_count * FTSLURM_TASKS_PER_NODE))"',
}


def _bash_word(argument: str) -> str:
    """Quoted for bash; what is known only when the script runs is a variable of it."""
    parts = re.split(f"({'|'.join(_VARIABLES)})", argument)
    words = [_VARIABLES.get(part) or shlex.quote(part) for part in parts if part]
    return "".join(words) or "''"
