"""A report for programs: values to JSON and CSV. Pure; job by job, so that no list is needed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from ftslurm.report.advice import findings
from ftslurm.report.fleet import Fleet, Group
from ftslurm.report.jobs import JobReport

SCHEMA_VERSION = 1
COLUMNS = (
    "job_id", "name", "user", "account", "partition", "state", "attempts", "failures", "causes",
    "first_failing_rank", "failed_node", "committed_step", "last_step", "wait_s", "node_hours",
    "gpu_hours", "lost_gpu_hours", "run_dir",
)  # fmt: skip


def job_record(job: JobReport) -> dict[str, Any]:
    record = asdict(job)
    for told, one in zip(record["attempts"], job.attempts):
        told["gpu_hours"] = one.gpu_hours
        told["node_hours"] = one.node_hours
    return {
        **record,
        "causes": job.causes(),
        "failures": len(job.failures),
        "wait_s": job.wait_s,
        "gpu_hours": job.gpu_hours,
        "node_hours": job.node_hours,
        "lost_gpu_hours": lost_gpu_hours(job),
    }


def lost_gpu_hours(job: JobReport) -> Any:
    """None where nobody knows: of a job that was cut short and left no records."""
    if any(one.lost_s is None and one.elapsed_s for one in job.attempts if one.is_cut_short):
        return None
    return sum((one.lost_s or 0.0) * one.gpus / 3600.0 for one in job.attempts)


def csv_row(job: JobReport) -> list[Any]:
    failures = job.failures
    first = failures[0] if failures else None
    values = [
        job.job_id, job.name, job.user, job.account, job.partition, job.state, len(job.attempts),
        len(failures), " ".join(f"{cause}:{count}" for cause, count in job.causes().items()),
        first.rank if first else None, first.node if first else None, job.committed_step,
        job.last_step, job.wait_s, job.node_hours, job.gpu_hours, lost_gpu_hours(job), job.run_dir,
    ]  # fmt: skip
    return [_cell(value) for value in values]


def _cell(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula is marked as text."""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else value


def fleet_record(fleet: Fleet) -> dict[str, Any]:
    return {
        "jobs": fleet.jobs,
        "states": fleet.states,
        "total": asdict(fleet.total),
        "by": {name: _groups(groups.items()) for name, groups in fleet.by.items()},
        "node_mtbf_h": fleet.node_mtbf_h,
        "gpu_mtbf_h": fleet.gpu_mtbf_h,
        "node_faults": fleet.node_faults,
        "hardware_failures": fleet.hardware_failures,
        "lemons": [asdict(one) for one in fleet.lemons],
        "recovered_share": fleet.recovered_share,
        "hit_again_share": fleet.hit_again_share,
        "goodput": {**asdict(fleet.goodput), "share": fleet.goodput.share},
        "runs_untold": fleet.runs_untold,
        "findings": [asdict(one) for one in findings(fleet)],
    }


def _groups(items: Iterable[tuple[str, Group]]) -> dict[str, Any]:
    return {key: asdict(group) for key, group in sorted(items)}
