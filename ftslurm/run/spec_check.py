"""Refuse values of a spec that cannot be right, by key, with what is expected.

Pure: looks at the values alone. What depends on the site or on a file is refused in submit/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

from ftslurm.errors import SpecError
from ftslurm.health.settings import check_settings
from ftslurm.run.spec import AUTO, PROGRAM_ENTRY, ClusterSpec, RunSpec, parse_time_s

WITH_BUDGET = (
    "hang",
    "network_transient",
    "storage",
    "capacity",
    "oom_gpu",
    "oom_host",
    "code",
    "numeric",
    "data",
    "checkpoint",
    "node",
    "gpu",
    "straggler",
    "unknown",
)
"""Causes that cost an attempt: what recovery.budgets may name."""

PHASES_WITH_LIMIT = ("starting", "restoring", "compiling", "evaluating", "saving")


def check(spec: RunSpec) -> None:
    """Refuse values that cannot be right, by key, with what is expected."""
    _choice("cluster.scheduler", spec.cluster.scheduler, ("slurm", "local"))
    _choice("cluster.signal", spec.cluster.signal, ("USR1", "USR2"))
    _choice("parallel.strategy", spec.parallel.strategy, ("ddp", "fsdp"))
    _choice("parallel.backend", spec.parallel.backend, ("auto", "gloo", "nccl"))
    _choice("optim.precision", spec.optim.precision, ("fp32", "bf16", "fp16"))
    _choice("checkpoint.when_busy", spec.checkpoint.when_busy, ("wait", "skip"))
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
            "data.num_workers": spec.data.num_workers,
            "eval_interval_steps": spec.eval_interval_steps,
        },
    )
    _check_checkpoint(spec)
    if ":" not in spec.entry:
        raise SpecError(f"entry is `{spec.entry}`; write `package.module:function`")
    if bool(spec.program) != (spec.entry == PROGRAM_ENTRY):
        raise SpecError("program is no key to set; write `ftslurm run ... -- COMMAND`")
    if spec.model.width % spec.model.heads:
        raise SpecError(
            f"model.width {spec.model.width} is not a multiple of model.heads {spec.model.heads}"
        )
    _check_time(spec.cluster)
    _check_recovery(spec)
    check_settings(spec.health)


def _check_checkpoint(spec: RunSpec) -> None:
    _choice("checkpoint.interval", spec.checkpoint.interval, ("fixed", AUTO))
    if spec.checkpoint.interval == AUTO and not spec.checkpoint.interval_s > 0:
        raise SpecError(
            f"checkpoint.interval is auto and checkpoint.interval_s {spec.checkpoint.interval_s}; "
            "give the seconds to the first save, from which the interval is found"
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


def _check_recovery(spec: RunSpec) -> None:
    recovery = spec.recovery
    _choice("recovery.continue_by", recovery.continue_by, ("auto", "requeue", "resubmit"))
    _choice("recovery.evict", recovery.evict, ("report", "next", "now"))
    _choice("recovery.on_nan", recovery.on_nan, ("stop", "rollback", "skip"))
    _choice("recovery.elastic_lr", recovery.elastic_lr, ("keep", "scale", "refuse"))
    _at_least(
        0,
        {
            "recovery.max_failures": recovery.max_failures,
            "recovery.max_node_faults": recovery.max_node_faults,
            "recovery.node_fault_days": recovery.node_fault_days,
            "recovery.backoff_s": recovery.backoff_s,
            "recovery.backoff_max_s": recovery.backoff_max_s,
            "recovery.hang_floor_s": recovery.hang_floor_s,
            "recovery.straggler_lag_steps": recovery.straggler_lag_steps,
            **{f"recovery.budgets.{cause}": times for cause, times in recovery.budgets.items()},
            **{f"recovery.phase_limit_s.{name}": s for name, s in recovery.phase_limit_s.items()},
        },
    )
    _at_least(1, {"recovery.straggler_window_steps": recovery.straggler_window_steps})
    # At 1 or below, the run's usual step would already be one too many.
    for key in ("hang_factor", "straggler_factor", "spike_factor"):
        factor = getattr(recovery, key)
        if factor != 0 and not factor > 1:
            raise SpecError(f"recovery.{key} is {factor}; it has to be above 1, or 0 for never")
    _known_keys("recovery.budgets", recovery.budgets, WITH_BUDGET, complete=False)
    _known_keys("recovery.phase_limit_s", recovery.phase_limit_s, PHASES_WITH_LIMIT, complete=True)
    _check_control_dir(recovery.control_dir)
    _check_event_url(recovery.on_event_url)
    _check_metrics_dir(spec)
    least = recovery.min_nodes
    if least is not None and not 1 <= least <= spec.cluster.nodes:
        raise SpecError(
            f"recovery.min_nodes is {least}; it has to be from 1 to cluster.nodes "
            f"({spec.cluster.nodes}), or null for all of them"
        )


def _known_keys(
    key: str, given: Mapping[str, object], known: tuple[str, ...], *, complete: bool
) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise SpecError(f"{key} has `{unknown[0]}`; it takes {', '.join(known)}")
    missing = sorted(set(known) - set(given)) if complete else []
    if missing:
        raise SpecError(f"{key} lacks `{missing[0]}`; give its seconds, or 0 for no limit")


def _check_event_url(url: Optional[str]) -> None:
    if url is not None and not url.startswith(("http://", "https://")):
        raise SpecError(f"recovery.on_event_url is `{url}`; give an http:// or https:// address")


def _check_control_dir(control_dir: Optional[str]) -> None:
    if control_dir is not None and not control_dir.startswith("/"):
        raise SpecError(
            f"recovery.control_dir is `{control_dir}`; give an absolute path, the ranks run in "
            "another folder"
        )


def _check_metrics_dir(spec: RunSpec) -> None:
    folder = spec.recovery.metrics_dir
    if folder is None:
        return
    if not folder.startswith("/"):
        raise SpecError(
            f"recovery.metrics_dir is `{folder}`; give the absolute path of the folder that "
            "node_exporter reads on the nodes (--collector.textfile.directory)"
        )
    if spec.cluster.scheduler == "local" or not spec.recovery.agents:
        raise SpecError(
            f"recovery.metrics_dir is `{folder}`, and without the node agents (Slurm only, "
            "recovery.agents) nobody would write there; leave it out and run `ftslurm metrics RUN "
            f"--textfile {folder} --every 30` beside the run"
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


def _at_least(least: int, values: Mapping[str, float]) -> None:
    for key, value in values.items():
        if value < least:
            raise SpecError(f"{key} is {value}; it has to be at least {least}")
