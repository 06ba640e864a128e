"""A report for programs: values to JSON and CSV. Pure; job by job, so that no list is needed.

The JSON is one object; times are UTC seconds, `_s` seconds, null is what nobody knows. New keys do
not raise `schema_version`; a key that goes, or means another thing, does.

What lies in the window counts, so that windows side by side add up: hours, losses and goodput are
of the time within, a wait is of the window with the start of the attempt, its end, cause and
failure of the one with the end. `start_at` is not before `since`; of one that ended after `until`
`end_at` is null, as of one that runs. `committed_step` and `last_step` are as of `until`, null
where no record dates them; `step_s` is of the whole run. Jobs and attempts that cross a border are
in both windows. What is named is told whole.

    since, until     as they were asked for
    source           accounting: sacct, scontrol or none; notes: what could not be read, for people
    jobs             a logical job each: fields of JobReport and of its AttemptReports (jobs.py);
                     besides causes (of its attempts, counted), failures, wait_s, node_hours,
                     gpu_hours, lost_gpu_hours
    sweeps           those whose tasks are among the jobs (sweeps.py)
    fleet            all together:
      jobs, states   how many, by state
      total          fields of Group (fleet.py); `by` has one for each cause, node (of the faults
                     that are said to be its own), user, run and partition
      node_mtbf_h, gpu_mtbf_h, node_faults, hardware_failures
                     hours for each fault, and how many faults there were
      lemons, suspects, lemon_test
                     nodes that fail jobs more often than chance would have it, those of which it
                     is too early to tell, and how many faults would be enough (lemons.py)
      recovered_share, hit_again_share
                     of the jobs that failed; of the attempts after a node's fault
      goodput        node-seconds of the runs whose records tell; share: of what was allocated
      runs_untold    runs that goodput leaves out
      differing      runs that trained steps again otherwise than before, though they had to be the
                     same; of a run: `twice` (run/trained_twice.py)
      drains         nodes out of service by ours, lost and others (drains.py); null: not asked
      findings       what, advice: as the text has them
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Optional

from ftslurm.report.advice import findings
from ftslurm.report.fleet import Fleet, Group
from ftslurm.report.jobs import JobReport

SCHEMA_VERSION = 1
COLUMNS = (
    "job_id", "name", "user", "account", "partition", "state", "attempts", "failures", "causes",
    "first_failing_rank", "failed_node", "committed_step", "last_step", "wait_s", "node_hours",
    "gpu_hours", "lost_gpu_hours", "run_dir", "value", "tasks",
)  # fmt: skip

_FORMULA = "=+-@\t\r\n|%"
"""With which a cell may begin that a spreadsheet works out, or hands to another program (OWASP)."""


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
    return [
        _text(job.job_id), _text(job.name), _text(job.user), _text(job.account),
        _text(job.partition), job.state, len(job.begun), len(failures),
        " ".join(f"{cause}:{count}" for cause, count in job.causes().items()),
        first.rank if first else None, _text(first.node) if first else None, job.committed_step,
        job.last_step, job.wait_s, job.node_hours, job.gpu_hours, lost_gpu_hours(job),
        _text(job.run_dir), _value(job), job.tasks,
    ]  # fmt: skip


def _value(job: JobReport) -> Any:
    """Of a task of a sweep: a number as it is, anything else as JSON."""
    value = job.sweep.value if job.sweep is not None else None
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    return _text(value if isinstance(value, str) else json.dumps(value))


def _text(value: Optional[str]) -> Optional[str]:
    """One that a spreadsheet would take for a formula is marked as text."""
    return f"'{value}" if value and value[0] in _FORMULA else value


def fleet_record(fleet: Fleet) -> dict[str, Any]:
    judged = fleet.judged
    return {
        "jobs": fleet.jobs,
        "states": fleet.states,
        "total": asdict(fleet.total),
        "by": {name: _groups(groups.items()) for name, groups in fleet.by.items()},
        "node_mtbf_h": fleet.node_mtbf_h,
        "gpu_mtbf_h": fleet.gpu_mtbf_h,
        "node_faults": fleet.node_faults,
        "hardware_failures": fleet.hardware_failures,
        "lemons": [asdict(one) for one in judged.lemons],
        "suspects": [asdict(one) for one in judged.suspects],
        "lemon_test": {
            "nodes": judged.nodes,
            "faults": judged.faults,
            "enough": judged.enough,
            "is_too_few": judged.is_too_few,
        },
        "recovered_share": fleet.recovered_share,
        "hit_again_share": fleet.hit_again_share,
        "goodput": {**asdict(fleet.goodput), "share": fleet.goodput.share},
        "runs_untold": fleet.runs_untold,
        "differing": fleet.differing,
        "drains": asdict(fleet.drains)["kinds"] if fleet.drains is not None else None,
        "findings": [asdict(one) for one in findings(fleet)],
    }


def _groups(items: Iterable[tuple[str, Group]]) -> dict[str, Any]:
    return {key: asdict(group) for key, group in sorted(items)}
