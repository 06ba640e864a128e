"""Which values of cluster.* fit their place in script, argument or environment. Pure.

`#SBATCH` lines are not shell and bash is not sbatch. Quoting is the renderer's; refused here is
what no quoting can carry: line breaks, control characters, endless texts, names that mean
something to Slurm, and secrets, since script and run.json are kept.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from typing import Any, Optional

from ftslurm.errors import SpecError, UsageError
from ftslurm.node.environment import PLACEHOLDER
from ftslurm.node.interface import NAME as INTERFACE
from ftslurm.run.rank import STOP_SIGNALS
from ftslurm.run.spec import ClusterSpec
from ftslurm.scheduler.hostlist import expand
from ftslurm.submit.further_options import check_sbatch, check_srun

_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:+@=/-]{0,199}")
_BINDING = re.compile(r"[A-Za-z][A-Za-z0-9_.,:+*=-]{0,999}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")

# key -> (what it has to be, in words)
_SHAPES = {
    "account": (_WORD, "no such name exists in Slurm"),
    "partition": (_WORD, "no such name exists in Slurm"),
    "qos": (_WORD, "no such name exists in Slurm"),
    "reservation": (_WORD, "no such name exists in Slurm"),
    "licenses": (_WORD, "write NAME:COUNT, several with commas"),
    "switches": (re.compile(r"\d{1,9}(@[0-9:-]{1,20})?"), "write COUNT or COUNT@TIME"),
    "mail_type": (re.compile(r"[A-Z][A-Z0-9_,]{0,199}"), "write e.g. FAIL,END"),
    "mail_user": (re.compile(r"[A-Za-z0-9][A-Za-z0-9._%+@,-]{0,199}"), "write an address"),
    "mem": (re.compile(r"\d{1,12}[KMGT]?"), "write a number and K, M, G or T"),
    "gpu_bind": (_BINDING, "write it as srun --gpu-bind takes it, e.g. closest"),
    "cpu_bind": (_BINDING, "write it as srun --cpu-bind takes it, e.g. cores"),
    "mpi": (re.compile(r"[A-Za-z0-9_]{1,40}"), "write the name of a plugin, e.g. pmix"),
    "interface": (INTERFACE, "write the name of one interface, e.g. ib0"),
}

# Free texts, with the most characters of each.
_TEXTS = {
    "job_name": 200, "constraint": 1000, "comment": 1000, "export": 4000, "container_image": 1000,
    "python": 1000, "rank_python": 1000, "environment": 1000, "environment_dir": 1000,
    "sbatch": 1000, "srun": 1000, "setup": 4000, "container": 4000, "mounts": 1000, "env": 4000,
}  # fmt: skip
_MOST_ENTRIES = 200

# Their own use of these would be lost, or take the run's away.
_OURS = re.compile(r"(FTSLURM|SLURM|SLURMD|SUBMITIT|SBATCH|SRUN)_.*|MASTER_(ADDR|PORT)|PYTHONPATH")

# A word that ends a name or a part of it: API_KEY, APIKEY and SSH_KEY_FILE, but neither
# TOKENIZERS_PARALLELISM nor NCCL_IB_PKEY, a number of InfiniBand.
_SECRET = re.compile(
    r"((?<!_P)KEY|TOKEN|SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIAL|(?<![A-Z])(PASS|JWT|AUTH))S?"
    r"(?![A-Za-z])",
    re.IGNORECASE,
)
NCCL_SIGNAL = "NCCL_PROXY_DUMP_SIGNAL"
"""NCCL installs a handler of its own for the signal that it names."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

# What is taken from the environment or from a command is no secret of the text's.
_ASSIGNMENT = re.compile(r"""([A-Za-z_][A-Za-z0-9_]*)=(?=["']?[^\s"'$`;&|)])""")


def check_cluster(cluster: ClusterSpec) -> None:
    """SpecError for the first value that its place cannot hold, by key."""
    for key, (shape, wanted) in _SHAPES.items():
        value = getattr(cluster, key)
        if value is not None and not shape.fullmatch(value):
            raise SpecError(f"cluster.{key} is `{shown(value)}`; {wanted}")
    for key, most in _TEXTS.items():
        for name, text in _texts(cluster, key):
            check_text(name, text, most)
            _check_no_secret(name, text)
    if cluster.exclude is not None:
        try:
            expand(cluster.exclude)
        except UsageError as error:
            raise SpecError(f"cluster.exclude: {error}") from None
    check_sbatch(cluster.sbatch)
    check_srun(cluster.srun)
    _check_paths(cluster)
    _check_gpus(cluster)
    _check_export(cluster)
    _check_environment_variables(cluster)
    _check_container(cluster)


def _texts(cluster: ClusterSpec, key: str) -> Iterator[tuple[str, Any]]:
    value = getattr(cluster, key)
    if value is None:
        return
    entries = value.values() if isinstance(value, dict) else value
    if isinstance(value, str):
        yield f"cluster.{key}", value
        return
    if len(value) > _MOST_ENTRIES:
        raise SpecError(f"cluster.{key} has {len(value)} entries; give at most {_MOST_ENTRIES}")
    names = value if isinstance(value, dict) else range(1, len(value) + 1)
    for name, text in zip(names, entries):
        # An empty variable is one.
        if text != "" or key != "env":
            yield f"cluster.{key}.{shown(name)}" if key == "env" else f"cluster.{key} {name}", text


def check_text(name: str, value: str, most: int) -> None:
    if not value or len(value) > most:
        raise SpecError(f"{name} has {len(value)} characters; give 1 to {most}")
    if not value.isprintable():
        raise SpecError(
            f"{name} is `{shown(value)}`; line breaks and control characters are refused"
        )


def _check_no_secret(name: str, text: str) -> None:
    for match in _ASSIGNMENT.finditer(text):
        if _SECRET.search(match[1]):
            raise _kept(name, match[1])


def _kept(name: str, variable: str) -> SpecError:
    return SpecError(
        f"{name} sets `{variable}`, which looks like a secret, and would be kept in run.json and "
        "script; export it in the shell that submits: sbatch passes your own environment on"
    )


def _check_paths(cluster: ClusterSpec) -> None:
    for key in ("python", "rank_python", "environment_dir", "environment"):
        value = getattr(cluster, key)
        if value is not None and value.startswith("-"):
            raise SpecError(f"cluster.{key} is `{shown(value)}`; a path or command is needed")
    # srun expands `%` and reads `\` as its escape; the other two part a PYTHONPATH and mounts.
    if cluster.python is not None and re.search(r"[%\\:]", cluster.python):
        raise SpecError(
            f"cluster.python leads to `{shown(cluster.python)}`; a path without `%`, `\\`, `:` "
            "is needed"
        )
    if not cluster.environment_dir.startswith("/"):
        raise SpecError(
            f"cluster.environment_dir is `{shown(cluster.environment_dir)}`; a folder of every "
            "node, beginning with `/`, is needed"
        )
    named = [cluster.rank_python or "", *cluster.container, *cluster.env.values()]
    if cluster.environment is None and any(PLACEHOLDER in text for text in named):
        raise SpecError(
            f"`{PLACEHOLDER}` stands for the folder of cluster.environment, which is not set"
        )


def _check_gpus(cluster: ClusterSpec) -> None:
    if cluster.gpus_per_node and cluster.gpus_per_task:
        raise SpecError(
            f"cluster.gpus_per_node is {cluster.gpus_per_node} and cluster.gpus_per_task "
            f"{cluster.gpus_per_task}; give one: GPUs that all ranks of a node see, or GPUs bound "
            "to each rank"
        )


def _check_export(cluster: ClusterSpec) -> None:
    if cluster.export.partition(",")[0] != "ALL":
        raise SpecError(
            f"cluster.export is `{shown(cluster.export)}`; ranks need what the batch script "
            "exports: give ALL, or ALL,NAME=VALUE"
        )


def _check_environment_variables(cluster: ClusterSpec) -> None:
    for name, value in cluster.env.items():
        if not _VARIABLE.fullmatch(name):
            raise SpecError(f"cluster.env has `{shown(name)}`, which is no name of a variable")
        if _SECRET.search(name):
            raise _kept("cluster.env", name)
        if _OURS.fullmatch(name):
            raise SpecError(
                f"cluster.env has `{name}`, which Slurm or the batch script sets; leave it out"
                + (" (a line of cluster.setup may export it)" if name == "PYTHONPATH" else "")
            )
        if cluster.interface is not None and name in INTERFACE_VARIABLES:
            raise SpecError(f"cluster.env has `{name}`, which cluster.interface sets; give one")
        if "${oc." in value:
            raise SpecError(
                f"cluster.env.{name} names a secret of the environment; leave it out: sbatch "
                "passes your own environment on"
            )
        taken = stop_signal_of(value) if name == NCCL_SIGNAL else None
        if taken is not None:
            raise SpecError(
                f"cluster.env.{name} is {value} ({taken.name}), which asks ranks to stop; NCCL "
                "would take it from them: choose another signal"
            )


def _check_container(cluster: ClusterSpec) -> None:
    if cluster.container and cluster.container_image is not None:
        raise SpecError(
            "cluster.container and cluster.container_image are two ways into a container; give one"
        )
    if cluster.mounts and cluster.container_image is None:
        raise SpecError(
            "cluster.mounts is for pyxis and needs cluster.container_image; with cluster.container "
            "the mounts are among its words"
        )
    if cluster.container_image is not None and cluster.rank_python is None:
        raise SpecError(
            "cluster.container_image needs cluster.rank_python, the interpreter inside the image, "
            "e.g. python3"
        )
    if any("," in mount for mount in cluster.mounts):
        raise SpecError("cluster.mounts has an entry with a comma; give each mount as its own")


def stop_signal_of(number: str) -> Optional[signal.Signals]:
    """The signal of this number if it is one that asks ranks to stop."""
    return next((one for one in STOP_SIGNALS if number == str(int(one))), None)


def shown(value: Any) -> str:
    """A hostile value on one short line."""
    text = ascii(value)[1:-1] if isinstance(value, str) else ascii(value)
    return text if len(text) <= 60 else text[:60] + "..."
