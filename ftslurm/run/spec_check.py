"""Refuse values of a spec that cannot be right, by key, with what is expected.

Pure: looks at the values alone. What depends on the site or on a file is refused in submit/.
"""

from __future__ import annotations

from typing import Optional

from ftslurm.errors import SpecError
from ftslurm.run.spec import PROGRAM_ENTRY, ClusterSpec, RunSpec, parse_time_s


def check(spec: RunSpec) -> None:
    """Refuse values that cannot be right, by key, with what is expected."""
    _choice("cluster.scheduler", spec.cluster.scheduler, ("slurm", "local"))
    _choice("cluster.signal", spec.cluster.signal, ("USR1", "USR2"))
    _choice("parallel.strategy", spec.parallel.strategy, ("ddp", "fsdp"))
    _choice("parallel.backend", spec.parallel.backend, ("auto", "gloo", "nccl"))
    _choice("optim.precision", spec.optim.precision, ("fp32", "bf16", "fp16"))
    _choice("checkpoint.when_busy", spec.checkpoint.when_busy, ("wait", "skip"))
    _choice("recovery.continue_by", spec.recovery.continue_by, ("auto", "requeue", "resubmit"))
    _choice("code", spec.code, ("frozen", "live"))
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
            "cluster.gpus_per_task": spec.cluster.gpus_per_task,
            "cluster.spares": spec.cluster.spares,
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
    if bool(spec.program) != (spec.entry == PROGRAM_ENTRY):
        raise SpecError("program is no key to set; write `ftslurm run ... -- COMMAND`")
    if spec.model.width % spec.model.heads:
        raise SpecError(
            f"model.width {spec.model.width} is not a multiple of model.heads {spec.model.heads}"
        )
    _check_time(spec.cluster)
    _check_control_dir(spec.recovery.control_dir)


def _check_control_dir(control_dir: Optional[str]) -> None:
    if control_dir is not None and not control_dir.startswith("/"):
        raise SpecError(
            f"recovery.control_dir is `{control_dir}`; give an absolute path, the ranks run in "
            "another folder"
        )


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
