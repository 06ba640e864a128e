"""What was asked for: the schema of conf/, of `ftslurm submit` options and of run.json's `spec`.

One set of dataclasses serves Hydra (structured configs), submission and the ranks, so the three
cannot drift. Plain, not frozen: OmegaConf cannot merge into nested frozen dataclasses (2.3.1).
Values are checked in spec_check.py; nothing here reads or writes.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from dataclasses import dataclass, field
from typing import Any, Optional

from ftslurm.errors import SpecError
from ftslurm.health.settings import HealthSettings

# `1-05:30` is refused, not guessed at: Slurm reads hours and minutes there.
_TIME = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", re.ASCII)

LIVE = "live"
"""RunSpec.code: ranks import the folder that the run was submitted from."""

AUTO = "auto"
"""CheckpointSpec.interval: chosen while the run trains."""

PROGRAM_ENTRY = "rank:ftslurm.program.rank:main"
"""RunSpec.entry of a run that has a `program`."""


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
    licenses: Optional[str] = None
    """As sbatch --licenses takes it, e.g. `matlab:2`."""
    switches: Optional[str] = None
    """Leaf switches and how long to wait for them, e.g. `1@00:10:00`."""
    mail_user: Optional[str] = None
    mail_type: Optional[str] = None
    """As sbatch --mail-type takes it, e.g. `FAIL,END`."""
    nodes: int = 1
    """Nodes that ranks run on."""
    spares: int = 0
    """Nodes asked for beside these, on which no rank runs until one of the others is given up; then
    one that matches it in GPU model, count and network, as far as that is known."""
    tasks_per_node: int = 1
    """One task is one rank; the same on every node."""
    gpus_per_node: int = 0
    gpus_per_task: int = 0
    """GPUs bound to each rank (--gpus-per-task); 0: each rank sees all GPUs of its node."""
    gpu_bind: Optional[str] = None
    """As srun --gpu-bind takes it, e.g. `closest`."""
    cpu_bind: Optional[str] = None
    """As srun --cpu-bind takes it, e.g. `cores`."""
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
    """Interpreter of the batch loop, and of the ranks without `rank_python`; default: the one that
    submits."""
    rank_python: Optional[str] = None
    """Interpreter of the ranks, e.g. the one inside the container."""
    sbatch: list[str] = field(default_factory=list)
    """Further options of sbatch, one an entry, e.g. `--exclusive` or `--gres=gpu:h100:8`. Those
    that a key stands for are refused."""
    srun: list[str] = field(default_factory=list)
    """Further options of the srun that starts the ranks."""
    setup: list[str] = field(default_factory=list)
    """Commands of bash, each whole in its entry, that the batch script runs first, e.g. `module
    load cuda/12.4`. One that fails ends the job."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment of the job, e.g. NCCL_IB_HCA: mlx5, set after `setup`. No secrets: this is kept
    in run.json; sbatch passes on the environment of the shell that submits."""
    container: list[str] = field(default_factory=list)
    """Words before the ranks' command, e.g. [apptainer, exec, image.sif]; `{run_dir}` in them is
    the run directory, which has to be writable inside. The batch loop stays outside."""
    container_image: Optional[str] = None
    """Image for srun's pyxis plugin (--container-image)."""
    mounts: list[str] = field(default_factory=list)
    """SOURCE:TARGET[:FLAGS] that pyxis mounts beside the run directory (--container-mounts)."""
    mpi: Optional[str] = None
    """As srun --mpi takes it, e.g. `pmix` or `none`."""
    export: str = "ALL"
    """As srun --export takes it; sites that set NONE would strip the ranks' environment."""
    interface: Optional[str] = None
    """Network interface that rank 0's address, gloo and NCCL are bound to, e.g. `ib0`."""
    environment: Optional[str] = None
    """Python environment as one file (.tar, .tar.gz, .tgz, .tar.xz, .squashfs), bin/python at its
    top, that is unpacked on each node before the ranks start: an `import torch` makes some 13,000
    metadata calls a rank on the file system that holds it. `{environment}` in rank_python,
    container and env is the unpacked folder."""
    environment_dir: str = "/tmp"
    """Folder on each node that it is unpacked in, and stays in for the next attempt or job."""

    @property
    def ranks_are_inside(self) -> bool:
        """In a container or an archive: the machine that submits cannot ask their interpreter."""
        return bool(self.container or self.container_image or self.environment)

    @property
    def changes_path(self) -> bool:
        """The batch script's PATH may be another than that of the shell that submits."""
        return bool(self.setup) or "PATH" in self.env


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

    interval: str = "fixed"
    """fixed | auto: auto chooses the time between two saves from what a save costs and how often
    this run and those beside it have failed, sets interval_steps aside and takes interval_s until a
    save was measured. fixed is the default: how much a failure may cost is then yours to say."""
    interval_steps: int = 250
    interval_s: float = 240.0
    """A save is due when either interval has passed; 0 switches that one off."""
    keep_last: int = 3
    keep_every_steps: int = 0
    """Steps divisible by this are never removed; 0: none."""
    when_busy: str = "wait"
    """wait | skip: what a save that is due does while the previous one is still persisting."""
    max_failed_saves: int = 3
    """Failed saves in a row after which the attempt ends. Not counted: a full disk, a quota, a
    missing right, a read-only file system; no other attempt would fare better, so the run goes on
    and tries again."""
    digest: str = "xxh3_128"
    """xxh3_128 | sha256"""
    emergency_deadline_s: Optional[float] = None
    """Seconds an emergency save may take; none: what Slurm gives when the signal comes, or, where
    it does not answer then, what follows from the site's settings at submit."""


def _phase_limits() -> dict[str, float]:
    return {
        "starting": 1800.0,
        "restoring": 3600.0,
        "compiling": 1800.0,
        "evaluating": 3600.0,
        "saving": 3600.0,
    }


def _budgets() -> dict[str, int]:
    return {
        "hang": 2,
        "network_transient": 5,
        "storage": 3,
        "capacity": 1,
        "oom_gpu": 1,
        "oom_host": 1,
        "code": 1,
        "numeric": 1,
        "data": 1,
        "checkpoint": 1,
    }


@dataclass
class RecoverySpec:
    """What a failure is taken for, and how often to try again."""

    max_failures: int = 3
    """Failures in a row without a newly committed step after which the run stops, whatever their
    cause; a cause with a larger budget of its own has that many."""
    budgets: dict[str, int] = field(default_factory=_budgets)
    """Failures of one cause without a newly committed step that are followed by another attempt; a
    cause that is not named here has max_failures. Preemption and time limits cost nothing."""
    max_node_faults: int = 1
    """Faults of one node after which no further attempt of the run is placed on it; 0: none is ever
    excluded."""
    node_fault_days: float = 7.0
    """So long a fault, or a decision to keep off a node, counts; 0: for good."""
    backoff_s: float = 5.0
    """Wait before the next attempt after the second failure in a row, doubled with each further
    one; none after a preemption or a time limit. 0: never wait."""
    backoff_max_s: float = 300.0
    """Most of it."""
    continue_by: str = "auto"
    """auto | requeue | resubmit: how the run gets its next job. requeue keeps the job id; resubmit
    queues a successor (--dependency=singleton) when a job begins, for sites that forbid requeueing;
    auto requeues where the site allows it. (`continue` is no name that Python can give a field.)"""
    control_dir: Optional[str] = None
    """Folder outside the run directory that is also looked at for RUN_ID.save, RUN_ID.stop and
    RUN_ID.pause, for people who may not enter the run directory."""
    agents: bool = True
    """One small process a node beside the ranks that watches them; off: a hang, a straggler and a
    lost batch node go unnoticed until the time limit."""
    hang_factor: float = 3.0
    """No rank has ended a step for this many times the run's usual step, plus hang_floor_s: hung.
    0: never."""
    hang_floor_s: float = 10.0
    phase_limit_s: dict[str, float] = field(default_factory=_phase_limits)
    """Longest stay in a phase that has no steps, before it is taken for hung; 0: no limit."""
    straggler_factor: float = 3.0
    """A rank whose own compute takes this many times the ranks' median over the window is named a
    straggler. 0: never."""
    straggler_window_steps: int = 10
    straggler_lag_steps: int = 3
    """A rank this many steps behind the others is named, too. 0: never."""
    evict: str = "report"
    """report | next | now: what is done about a straggler. report names it; next keeps its node out
    of the next attempt, whenever that is; now saves at the next step boundary and begins it."""
    on_nan: str = "rollback"
    """stop | rollback | skip: what follows a loss that is NaN or Inf, or a spike. rollback goes one
    committed step further back than the newest, and stops when it comes again; skip goes back
    likewise, and when it comes again passes over the batches that led to it."""
    spike_factor: float = 0.0
    """A loss above this many times the median of the last 100 steps counts as a spike; 0: never."""
    on_event: list[str] = field(default_factory=list)
    """Command, one word an entry, that is told of a stop, a third failure in a row, no commit in
    two intervals and an excluded node: the event is JSON on its stdin, its kind in
    FTSLURM_EVENT."""
    on_event_url: Optional[str] = None
    """http(s) address that the same JSON is posted to."""
    metrics_dir: Optional[str] = None
    """Folder of node_exporter's textfile collector, on the batch node, in which the leader of the
    agents has RUN_ID.prom written anew each half minute; needs prometheus-client there."""
    standby: bool = False
    """One process a node, torch imported and no GPU touched, forks the next attempt's ranks."""
    min_nodes: Optional[int] = None
    """Fewest nodes to go on with when no spare is left, the global batch unchanged; none: all."""
    elastic_lr: str = "keep"
    """keep | scale | refuse: the learning rate on fewer nodes. The global batch stays, so keep is
    exact; scale has the reference loop multiply it by the share of ranks that is left (a loop of
    your own has session.world_size for that); refuse never takes fewer."""


@dataclass
class RunSpec:
    """One run."""

    name: str = "run"
    run_id: Optional[str] = None
    """Name of the run directory; none: name, time and four random digits."""
    runs_dir: str = "runs"
    entry: str = "ftslurm.train.reference:train"
    """`module:function` that takes a Session and trains; `rank:module:function` is called as the
    whole rank, without torch."""
    program: list[str] = field(default_factory=list)
    """Command that each rank runs in place of a loop; set by `ftslurm run -- COMMAND`."""
    code: str = "frozen"
    """frozen | live: frozen ranks import the copy made at submit, and a run whose modules have
    changed since its first attempt stops; live ranks import the folder the run was submitted
    from, as it then is."""
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
    health: HealthSettings = field(default_factory=HealthSettings)
    user: dict[str, Any] = field(default_factory=dict)
    """Free values for a loop of your own; reach it as `session.spec.user`."""

    @property
    def world_size(self) -> int:
        return self.cluster.nodes * self.cluster.tasks_per_node


def to_dict(spec: RunSpec) -> dict[str, Any]:
    """As dataclasses.asdict, in a third of its time: lists and maps are copies."""
    record: dict[str, Any] = _plain(spec)
    return record


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    kind: Any = type(value)
    names = _names(kind)
    if names is None:
        return copy.deepcopy(value)  # for its reader to refuse, who knows where it would be kept
    return {name: _plain(getattr(value, name)) for name in names}


@functools.cache
def _names(kind: Any) -> Optional[tuple[str, ...]]:
    """Of a dataclass's fields; None for what is none."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple(item.name for item in dataclasses.fields(kind))


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
