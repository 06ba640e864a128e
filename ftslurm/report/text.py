"""A report as lines for a person. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Optional

from ftslurm.report.advice import findings
from ftslurm.report.fleet import Fleet, Group
from ftslurm.report.jobs import AttemptReport, JobReport
from ftslurm.report.records import lost_gpu_hours

LIST_HEAD = (
    f"{'job':14} {'user':10} {'state':10} {'attempts':28} {'failed on':10} {'step':>9}"
    f" {'GPU-h':>9} {'lost':>8} {'waited':>8}  name"
)


def job_line(job: JobReport) -> str:
    """One logical job, its attempts folded."""
    failed = next((one.node for one in job.failures if one.node), None) or ""
    lost = lost_gpu_hours(job)
    step = "" if job.committed_step is None else f"{job.committed_step}"
    return (
        f"{clip(job.job_id, 14):14} {clip(job.user, 10):10} {clip(job.state, 10):10}"
        f" {clip(_folded(job), 28):28} {clip(failed, 10):10} {step:>9} {hours(job.gpu_hours):>9}"
        f" {'?' if lost is None else hours(lost):>8} {duration(job.wait_s):>8}"
        f"  {clip(job.name, 40)}"
    )


def job_lines(job: JobReport) -> Iterator[str]:
    """The job and each attempt of it."""
    yield job_line(job)
    for place, one in enumerate(job.attempts, start=1):
        # One of Slurm alone has no number among those of the run.
        yield printable(_attempt_line(one, one.number or ("-" if job.run_dir else place)))
        for item in one.evidence[:3]:
            where = f"{item.get('file')}:{item['line']}" if item.get("line") else item.get("file")
            yield printable(f"      {clip(str(item.get('text', '')), 90)}  ({where})")
    if job.run_dir:
        yield printable(f"    run {job.run_dir}")
    for note in job.notes:
        yield printable(f"    not known: {note}")


def fleet_lines(fleet: Fleet, by: Optional[str]) -> list[str]:
    total, good = fleet.total, fleet.goodput
    states = ", ".join(f"{count} {name}" for name, count in sorted(fleet.states.items()))
    lines = [
        f"{fleet.jobs:,} jobs ({states}), {total.attempts:,} attempts, {total.failures:,} failures",
        f"  used               {hours(total.gpu_hours)} GPU-hours, {hours(total.node_hours)}"
        " node-hours",
        f"  lost               {hours(total.lost_gpu_hours)} GPU-hours by the runs' own records;"
        f" {hours(total.unknown_gpu_hours)} more in attempts that were cut short and left none",
        f"  between failures   of a node {hours(fleet.node_mtbf_h)} node-hours"
        f" ({fleet.node_faults:,} faults), of a GPU {hours(fleet.gpu_mtbf_h)} GPU-hours"
        f" ({fleet.hardware_failures:,})",
        f"  recovered          {percent(fleet.recovered_share)} of the jobs that failed and have"
        f" ended; on a bad node again {percent(fleet.hit_again_share)}",
    ]
    if good.share is not None:
        whole = good.allocated_s
        lines.append(
            f"  goodput            {percent(good.share)}; lost {percent(good.lost_s / whole)},"
            f" saves {percent(good.stall_s / whole)}, starting {percent(good.restart_s / whole)},"
            f" other {percent(good.other_s / whole)}"
        )
    if fleet.runs_untold:
        lines.append(
            f"  goodput            of {fleet.runs_untold:,} runs it is not known: no trace of steps"
        )
    name = by or "cause"
    lines += ["", *_group_lines(name, fleet.by[name])]
    told = findings(fleet)
    if told:
        lines.append("")
    for one in told:
        lines += [printable(f"! {one.what}"), printable(f"    {one.advice}")]
    return lines


def _group_lines(name: str, groups: dict[str, Group]) -> list[str]:
    if not groups:
        return [f"{name}: nothing to tell"]
    head = f"{name:32} {'jobs':>8} {'attempts':>9} {'failures':>9} {'GPU-h':>10} {'lost':>10}"
    rows = sorted(groups.items(), key=lambda item: (-item[1].failures, -item[1].jobs, item[0]))
    return [head] + [
        f"{clip(key, 32):32} {one.jobs:>8,} {one.attempts:>9,} {one.failures:>9,}"
        f" {hours(one.gpu_hours):>10} {hours(one.lost_gpu_hours):>10}"
        for key, one in rows
    ]


def _attempt_line(one: AttemptReport, number: object) -> str:
    parts = [one.cause or one.state.lower()]
    if one.node:
        parts.append(f"node {one.node}")
    if one.rank is not None:
        parts.append(f"rank {one.rank} first")
    if one.steps_lost:
        parts.append(f"{one.steps_lost} steps lost")
    if one.rto_s is not None:
        parts.append(f"back after {duration(one.rto_s)}")
    told = f": {clip(one.sentence, 110)}" if one.sentence else ""
    when = f"{stamp(one.start_at)} {duration(one.elapsed_s):>8}"
    return f"  {number!s:>3} {when}  {', '.join(parts)}{told}"


def _folded(job: JobReport) -> str:
    """`4 (2 preempted, 1 node, 1 code)`"""
    if job.tasks > 1:
        return f"{job.tasks} tasks wait"
    causes = ", ".join(f"{count} {cause}" for cause, count in job.causes().items())
    return f"{len(job.attempts)} ({causes})" if causes else f"{len(job.attempts)}"


def printable(text: str) -> str:
    """One line of it: names of jobs and nodes, and whatever a run has on record, may hold anything,
    control characters of a terminal too."""
    return "".join(one if one.isprintable() else "?" for one in text)


def clip(text: str, width: int) -> str:
    shown = printable(text)
    return shown if len(shown) <= width else f"{shown[: width - 1]}~"


def hours(value: Optional[float]) -> str:
    if value is None:
        return "?"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(share: Optional[float]) -> str:
    return "?" if share is None else f"{100 * share:.1f} %"


def duration(seconds: Optional[float]) -> str:
    if seconds is None:
        return "?"
    for unit, size, most in (("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, 172_800.0)):
        if seconds < most:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86_400.0:.1f} d"


def stamp(at: Optional[float]) -> str:
    return "?" * 16 if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def source_lines(notes: Sequence[str]) -> list[str]:
    return [printable(f"note: {note}") for note in notes]
