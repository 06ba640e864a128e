"""What was asked for: the schema of conf/, of `ftslurm submit` options and of run.json's `spec`.

One set of dataclasses serves Hydra (structured configs), submission and the ranks, so the three
cannot drift. Plain, not frozen: OmegaConf cannot merge into nested frozen dataclasses (2.3.1).
Values are checked by `check`; nothing here reads or writes.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, Optional

from ftslurm.errors import SpecError

# `1-05:30` is refused, not guessed at: Slurm reads hours and minutes there.
_TIME = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", re.ASCII)


@dataclass
class ClusterSpec:
    """Where and how the job is placed; rendered into #SBATCH lines and srun arguments."""

    scheduler: str = "slurm"
    """slurm | local: `local` runs the same batch loop as one process tree on this machine."""
    job_name: str = "ftslurm"
    account: Optional[str] = None
    partition: Optional[str] = None
    qos: Optional[str] = None
    reservation: Optional[str] = None
    constraint: Optional[str] = None
    exclude: Optional[str] = None
    """Hostlist, e.g. `n[1-3,5]`."""
    comment: Optional[str] = None
    nodes: int = 1
    tasks_per_node: int = 1
    """One task is one rank."""
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    mem: Optional[str] = None
    """Per node, as sbatch --mem takes it, e.g. `64G`."""
    time: str = "01:00:00"
    """Limit as [DAYS-]HH:MM:SS or MM:SS."""
    signal: str = "USR1"
    """Warn signal to the ranks."""
    signal_lead_s: int = 120
    """Seconds before the limit at which the warn signal is asked for; Slurm may be 60 s early."""
    wait_s: int = 0
    """srun --wait: 0 never kills ranks because another one ended well before them."""
    python: Optional[str] = None
    """Interpreter of batch loop and ranks; default: the one that submits."""


@dataclass
class ParallelSpec:
    """How the model is spread over ranks."""

    strategy: str = "ddp"
    """ddp | fsdp"""
    backend: str = "auto"
    """auto | gloo | nccl: auto takes nccl when a rank has a GPU."""


@dataclass
class ModelSpec:
    """The reference GPT. A loop of your own may ignore it and use `user`."""

    layers: int = 2
    heads: int = 4
    width: int = 128
    context: int = 128
    dropout: float = 0.1
    tied_embeddings: bool = True


@dataclass
class DataSpec:
    """The token store and how it is read."""

    path: Optional[str] = None
    """Token store (HDF5) made by `ftslurm data build`; none: the text of Python's own library,
    built once beside the runs."""
    num_workers: int = 0
    """DataLoader workers per rank."""


@dataclass
class OptimSpec:
    """AdamW with warm-up and cosine decay."""

    lr: float = 1e-3
    min_lr_ratio: float = 0.1
    warmup_steps: int = 20
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    global_batch_size: int = 8
    """Sequences a step over all ranks."""
    micro_batch_size: int = 2
    """Most sequences a rank puts through the model at once; the rest is accumulation."""
    precision: str = "fp32"
    """fp32 | bf16 | fp16 (fp16 uses a GradScaler)"""


@dataclass
class CheckpointSpec:
    """When to save, what to keep, how long a save may take."""

    interval_steps: int = 250
    interval_s: float = 240.0
    """A save is due when either interval has passed; 0 switches that one off."""
    keep_last: int = 3
    keep_every_steps: int = 0
    """Steps divisible by this are never removed; 0: none."""
    when_busy: str = "wait"
    """wait | skip: what a save that is due does while the previous one is still persisting."""
    max_failed_saves: int = 3
    """Failed saves in a row after which the attempt ends."""
    digest: str = "xxh3_128"
    """xxh3_128 | sha256"""
    emergency_deadline_s: Optional[float] = None
    """Seconds an emergency save may take; none: derived at submit from the site's grace."""


@dataclass
class RecoverySpec:
    """How often to try again."""

    max_failures: int = 3
    """Failures in a row without a newly committed step after which the run stops."""


@dataclass
class RunSpec:
    """One run."""

    name: str = "run"
    runs_dir: str = "runs"
    entry: str = "ftslurm.train.reference:train"
    """`module:function` that takes a Session and trains; `rank:module:function` is called as the
    whole rank, without torch."""
    steps: int = 400
    seed: int = 0
    deterministic: bool = True
    eval_interval_steps: int = 0
    """Evaluate each so many steps; 0: never."""
    eval_batches: int = 4
    log_interval_steps: int = 10
    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    optim: OptimSpec = field(default_factory=OptimSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    recovery: RecoverySpec = field(default_factory=RecoverySpec)
    user: dict[str, Any] = field(default_factory=dict)
    """Free values for a loop of your own; reach it as `session.spec.user`."""

    @property
    def world_size(self) -> int:
        return self.cluster.nodes * self.cluster.tasks_per_node


def to_dict(spec: RunSpec) -> dict[str, Any]:
    return dataclasses.asdict(spec)


def from_dict(record: dict[str, Any]) -> RunSpec:
    """Build a spec from run.json's `spec`. Unknown keys are ignored: a newer writer is readable."""
    spec: RunSpec = _build(RunSpec, record)
    return spec


def _build(kind: Any, record: dict[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for item in dataclasses.fields(kind):
        if item.name in record:
            value = record[item.name]
            nested = dataclasses.is_dataclass(item.default_factory)
            values[item.name] = _build(item.default_factory, value) if nested else value
    return kind(**values)


def parse_time_s(text: str) -> int:
    """Seconds of a Slurm time limit ([DAYS-]HH:MM:SS, HH:MM:SS or MM:SS)."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise SpecError(f"cluster.time is `{text}`; write [DAYS-]HH:MM:SS or MM:SS, e.g. 04:00:00")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def check(spec: RunSpec) -> None:
    """Refuse values that cannot be right, by key, with what is expected."""
    _choice("cluster.scheduler", spec.cluster.scheduler, ("slurm", "local"))
    _choice("cluster.signal", spec.cluster.signal, ("USR1", "USR2"))
    _choice("parallel.strategy", spec.parallel.strategy, ("ddp", "fsdp"))
    _choice("parallel.backend", spec.parallel.backend, ("auto", "gloo", "nccl"))
    _choice("optim.precision", spec.optim.precision, ("fp32", "bf16", "fp16"))
    _choice("checkpoint.when_busy", spec.checkpoint.when_busy, ("wait", "skip"))
    _choice("checkpoint.digest", spec.checkpoint.digest, ("xxh3_128", "sha256"))
    _at_least(
        1,
        {
            "cluster.nodes": spec.cluster.nodes,
            "cluster.tasks_per_node": spec.cluster.tasks_per_node,
            "cluster.cpus_per_task": spec.cluster.cpus_per_task,
            "steps": spec.steps,
            "model.heads": spec.model.heads,
            "optim.global_batch_size": spec.optim.global_batch_size,
            "optim.micro_batch_size": spec.optim.micro_batch_size,
            "checkpoint.keep_last": spec.checkpoint.keep_last,
            "checkpoint.max_failed_saves": spec.checkpoint.max_failed_saves,
            "log_interval_steps": spec.log_interval_steps,
        },
    )
    _at_least(
        0,
        {
            "cluster.gpus_per_node": spec.cluster.gpus_per_node,
            "cluster.wait_s": spec.cluster.wait_s,
            "cluster.signal_lead_s": spec.cluster.signal_lead_s,
            "checkpoint.interval_steps": spec.checkpoint.interval_steps,
            "checkpoint.keep_every_steps": spec.checkpoint.keep_every_steps,
            "recovery.max_failures": spec.recovery.max_failures,
            "data.num_workers": spec.data.num_workers,
            "eval_interval_steps": spec.eval_interval_steps,
        },
    )
    if spec.checkpoint.interval_s < 0:
        raise SpecError(
            f"checkpoint.interval_s is {spec.checkpoint.interval_s}; it has to be at least 0"
        )
    deadline_s = spec.checkpoint.emergency_deadline_s
    if deadline_s is not None and deadline_s <= 0:
        raise SpecError(
            f"checkpoint.emergency_deadline_s is {deadline_s}; give seconds, or null to derive it"
        )
    if ":" not in spec.entry:
        raise SpecError(f"entry is `{spec.entry}`; write `package.module:function`")
    if spec.model.width % spec.model.heads:
        raise SpecError(
            f"model.width {spec.model.width} is not a multiple of model.heads {spec.model.heads}"
        )
    _check_time(spec.cluster)


def _check_time(cluster: ClusterSpec) -> None:
    limit_s = parse_time_s(cluster.time)
    # Slurm looks every 30 s and may send the warn signal 60 s early; a shorter limit would have it
    # fire while the ranks still import torch (submitit#1793).
    if limit_s <= cluster.signal_lead_s + 90:
        raise SpecError(
            f"cluster.time {cluster.time} is {limit_s} s, not more than cluster.signal_lead_s "
            f"{cluster.signal_lead_s} + 90 s; the warn signal would come at start: ask for more "
            "time or a shorter lead"
        )


def _choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SpecError(f"{key} is `{value}`; choose {' or '.join(choices)}")


def _at_least(least: int, values: dict[str, int]) -> None:
    for key, value in values.items():
        if value < least:
            raise SpecError(f"{key} is {value}; it has to be at least {least}")
