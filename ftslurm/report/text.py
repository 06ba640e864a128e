"""A report as lines for a person, made for a terminal of 80 columns. Pure."""

from __future__ import annotations

import textwrap
import time
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Optional

from ftslurm.report.advice import findings, hours_told
from ftslurm.report.drains import LOST, OTHERS, OURS, Drains
from ftslurm.report.fleet import Fleet, Goodput, Group
from ftslurm.report.jobs import FAILURES, AttemptReport, JobReport
from ftslurm.report.lemons import Judged
from ftslurm.report.records import lost_gpu_hours

WIDTH, LABEL = 80, 21
LIST_HEAD = f"{'job':12} {'user':8} {'state':9} {'attempts':24} {'node':8} {'GPU-h lost':>10}  name"


def job_line(job: JobReport) -> str:
    """One logical job, its attempts folded; the name comes last and may pass the edge."""
    failed = next((one.node for one in job.failures if one.node), None) or ""
    lost = lost_gpu_hours(job)
    return (
        f"{_cell(job.job_id, 12)} {_cell(job.user, 8)} {_cell(job.state, 9)}"
        f" {_cell(_folded(job), 24)} {_cell(failed, 8)}"
        f" {'?' if lost is None else hours(lost):>10}  {clip(job.name, 40)}"
    )


def job_lines(job: JobReport) -> Iterator[str]:
    """The job and each attempt of it."""
    yield job_line(job)
    yield from _wrapped(_used(job), indent=4)
    for place, one in enumerate(job.attempts, start=1):
        # One of Slurm alone has no number among those of the run.
        yield from _attempt_lines(one, one.number or ("-" if job.run_dir else place))
    if job.twice is not None and job.twice.differ:
        yield from _wrapped(job.twice.sentence, indent=4)
    if job.run_dir:
        yield printable(f"    run {job.run_dir}")
    for note in job.notes:
        yield from _wrapped(f"not known: {note}", indent=4)


def fleet_lines(fleet: Fleet, by: Optional[str]) -> list[str]:
    total = fleet.total
    states = ", ".join(f"{count:,} {name}" for name, count in sorted(fleet.states.items()))
    lines = _wrapped(
        f"{counted(fleet.jobs, 'job')}{f' ({states})' if states else ''},"
        f" {counted(total.attempts, 'attempt')}, {counted(total.failures, 'failure')}"
    )
    for label, told in _figures(fleet):
        lines += _wrapped(f"  {label:{LABEL - 2}}{told}", indent=LABEL, first=0)
    name = by or "cause"
    lines += ["", *_group_lines(name, fleet.by[name])]
    found = findings(fleet)
    if found:
        lines += ["", "what to change, the dearest first:"]
    for one in found:
        lines += _wrapped(f"! {one.what}", indent=2, first=0)
        lines += _wrapped(one.advice, indent=4)
    return lines


def _figures(fleet: Fleet) -> Iterator[tuple[str, str]]:
    """Of those that nothing is known of, none."""
    total, good = fleet.total, fleet.goodput
    yield (
        "used",
        f"{hours(total.gpu_hours)} GPU-hours, {hours(total.node_hours)} node-hours",
    )
    lost = f"{hours(total.lost_gpu_hours)} GPU-hours of training, by what the runs recorded"
    if total.unknown_gpu_hours:
        lost += (
            f"; at most {hours(total.unknown_gpu_hours)} more in attempts that ended early and left"
            " no record of what they had saved"
        )
    yield "lost", lost
    if fleet.node_mtbf_h is not None:
        told = f"{hours(fleet.node_mtbf_h)} node-hours for each fault of a node or GPU"
        yield "between failures", f"{told} ({counted(fleet.node_faults, 'fault')})"
    if fleet.gpu_mtbf_h is not None:
        told = f"{hours(fleet.gpu_mtbf_h)} GPU-hours for each fault of the cluster, network and"
        told += f" storage included ({fleet.hardware_failures:,}), as `ftslurm plan --gpu-mtbf`"
        yield "", f"{told} takes it"
    if fleet.recovered_share is not None:
        told = f"{percent(fleet.recovered_share)} of the jobs that failed went on to their end"
        yield "recovered", told
    if fleet.hit_again_share is not None:
        told = f"{percent(fleet.hit_again_share)} of the attempts that followed a node's fault"
        yield "same node again", f"{told} were on that node again"
    if good.share is not None:
        yield "goodput", _goodput(good)
    if fleet.runs_untold:
        told = f"not known of {counted(fleet.runs_untold, 'run')}, which left no trace of steps"
        yield "goodput" if good.share is None else "", told
    if fleet.judged.nodes:
        yield "lemon nodes", _lemons(fleet.judged)
    if fleet.drains is not None:
        yield from _drains(fleet.drains)


def _drains(drains: Drains) -> Iterator[tuple[str, str]]:
    """What took nodes out of service, whoever did it."""
    by = {OURS: "drained by ftslurm", LOST: "lost, Slurm had no answer", OTHERS: "out for others"}
    label = "nodes out"
    for name, kind in drains.kinds.items():
        if kind.events:
            most = (f"{count} x {clip(reason, 40)}" for reason, count in kind.most())
            times = f"{counted(kind.events, 'time')} on {counted(len(kind.nodes), 'node')}"
            yield label, f"{by[name]}: {times}, {hours(kind.hours)} node-hours ({', '.join(most)})"
            label = ""


def _goodput(good: Goodput) -> str:
    whole = good.allocated_s
    return (
        f"{percent(good.share)} of the time that was allocated is training that lasts; the rest:"
        f" {percent(good.restart_s / whole)} starting, {percent(good.stall_s / whole)} stopped for"
        f" saves, {percent(good.lost_s / whole)} trained again or lost,"
        f" {percent(good.other_s / whole)} other"
    )


def _lemons(judged: Judged) -> str:
    if judged.lemons:
        names = ", ".join(one.node for one in judged.lemons[:5])
        more = f" and {len(judged.lemons) - 5} more" if len(judged.lemons) > 5 else ""
        return f"{names}{more}: more failures than chance would give (below)"
    if judged.enough is None:
        return "one node alone has nothing to be compared with"
    where = f"{judged.nodes:,} nodes"
    if not judged.faults:
        return f"none, of {where} none was blamed for a failure"
    if judged.is_too_few:
        return (
            f"too few faults to tell: {judged.faults} on {where}, and {judged.enough} on one node"
            " would be needed"
        )
    return f"none of {where}; {judged.enough} of the {judged.faults:,} faults on one would make one"


def _group_lines(name: str, groups: dict[str, Group]) -> list[str]:
    if not groups:
        return [f"{name}: nothing to tell"]
    head = f"{name:30} {'jobs':>8} {'attempts':>9} {'failures':>9} {'GPU-h':>10} {'lost':>9}"
    rows = sorted(groups.items(), key=lambda item: (-item[1].failures, -item[1].jobs, item[0]))
    lines = [head] + [
        f"{_cell(key, 30)} {one.jobs:>8,} {one.attempts:>9,} {one.failures:>9,}"
        f" {hours(one.gpu_hours):>10} {_lost(one):>9}"
        for key, one in rows
    ]
    if any(one.unknown_gpu_hours for one in groups.values()):
        lines.append("  +: or more, by attempts that ended early and left no record")
    return lines


def _lost(group: Group) -> str:
    return hours(group.lost_gpu_hours) + ("+" if group.unknown_gpu_hours else "")


def _used(job: JobReport) -> str:
    counts = _counts(job)
    told = f"{counted(len(job.begun), 'attempt')}{f' ({counts})' if counts else ''}, "
    told += f"{hours(job.gpu_hours)} GPU-hours, {hours(job.node_hours)} node-hours, waited"
    told += f" {duration(job.wait_s)}"
    if job.committed_step is not None:
        told += f", last checkpoint at step {job.committed_step:,}"
    return told


def _attempt_lines(one: AttemptReport, number: object) -> Iterator[str]:
    parts = [one.cause or one.state.lower()]
    if one.node:
        parts.append(f"node {one.node}")
    if one.rank is not None:
        parts.append(f"rank {one.rank} first")
    if one.steps_lost:
        parts.append(f"{one.steps_lost:,} steps lost")
    if one.rto_s is not None:
        parts.append(f"back after {duration(one.rto_s)}")
    begin = stamp(one.start_at) if one.is_begun else "has not begun"
    when = f"{begin:16} {duration(one.elapsed_s):>8}"
    yield from _wrapped(f"  {number!s:>3} {when}  {', '.join(parts)}", indent=33, first=0)
    if one.sentence and one.sentence != one.cause:
        yield from _wrapped(clip(one.sentence, 220), indent=6)
    for item in one.evidence[:3]:
        where = f"{item.get('file')}:{item['line']}" if item.get("line") else item.get("file")
        yield from _wrapped(
            f"> {clip(str(item.get('text', '')), 140)}  ({where})", indent=8, first=6
        )


def _wrapped(text: str, *, indent: int = 0, first: Optional[int] = None) -> list[str]:
    """Lines of at most WIDTH columns; a word that is longer, such as a path, stays whole."""
    begin = indent if first is None else first
    return textwrap.wrap(
        printable(text), WIDTH, initial_indent=" " * begin, subsequent_indent=" " * indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _folded(job: JobReport) -> str:
    """`4 (1 node, 1 code, 2 preempted)`"""
    if job.tasks > 1:
        return f"{job.tasks} tasks{' wait' if job.state == 'waiting' else ''}"
    counts = _counts(job)
    return f"{len(job.begun)} ({counts})" if counts else f"{len(job.begun)}"


def _counts(job: JobReport) -> str:
    """Failures first: a line may be cut off."""
    found = sorted(job.causes().items(), key=lambda item: item[0] not in FAILURES)
    return ", ".join(f"{count} {cause}" for cause, count in found)


def printable(text: str) -> str:
    """One line of it: names of jobs and nodes, and whatever a run has on record, may hold anything,
    control characters of a terminal too."""
    return "".join(one if one.isprintable() else "?" for one in text)


def clip(text: str, width: int) -> str:
    """At most so many columns of a terminal."""
    shown = printable(text)
    if columns(shown) <= width:
        return shown
    while columns(shown) > width - 1:
        shown = shown[:-1]
    return f"{shown}~"


def columns(text: str) -> int:
    """Of a terminal: two for a wide sign (UAX 11), none for what is put on the one before."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(one) in "WF" for one in text)
    return len(text) + wide - sum(bool(unicodedata.combining(one)) for one in text)


def _cell(text: str, width: int) -> str:
    shown = clip(text, width)
    return shown + " " * (width - columns(shown))


def hours(value: Optional[float]) -> str:
    return "?" if value is None else hours_told(value)


def counted(number: int, what: str) -> str:
    """`1 fault`, `1,200 faults`"""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


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
