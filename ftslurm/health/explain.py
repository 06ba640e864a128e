"""A look at a node told to a person: in one line, or with all that was read and by which rule.

Text only, made of values; nothing here reads or decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ftslurm.health.report import NAGIOS, OK, Report, Told
from ftslurm.health.settings import HealthSettings
from ftslurm.health.xid_table import IGNORE

if TYPE_CHECKING:
    from ftslurm.health.probe import Probe
    from ftslurm.health.signals import Gpu, Reading, Signal

_MOST_PLACES = 8
_WIDTH = 24


def first_line(report: Report) -> str:
    """As Nagios and a log take it: the state, the worst verdict, how many others, what was done."""
    state = NAGIOS[report.word][1]
    told = [one for one in report.verdicts if not one.earlier and one.word != IGNORE]
    if not told:
        but = f"; but {report.complaints[0]}" if report.complaints else ""
        found = f"{report.gpus} GPUs, nothing found ({report.wall_s:.2f} s)"
        return f"{'WARNING' if but else state} - {found}{but}{_done(report)}"
    worst, others = told[0], len(told) - 1
    more = f"; {others} more" if others else ""
    place = f" {worst.place}" if worst.place else ""
    done = _done(report, known=worst.sentence)
    return f"{state} - {worst.word} {worst.code}{place}: {worst.sentence}{more}{done}"


def _done(report: Report, known: str = "") -> str:
    """What the line does not say yet: the acting's sentence may be the verdict's own."""
    if report.action in ("", "none"):
        return ""
    is_new = report.done and not (known and known in report.done)
    return f"; {report.action}: {report.done}" if is_new else f"; {report.action}"


def exit_code(report: Report) -> int:
    """Of Nagios. A complaint is a warning on a healthy node."""
    code = NAGIOS[report.word][0]
    return 1 if code == 0 and report.complaints else code


def explain(
    probe: Probe, report: Report, settings: HealthSettings, settings_from: str
) -> Iterator[str]:
    """What was read, each rule that fired and its source, and what was done."""
    reading = probe.reading
    job = f", job {reading.job} of {reading.user or 'nobody'}" if reading.job else ""
    yield f"node       {report.node}, boot {reading.boot_id[:8]}{job}"
    yield f"look       {reading.context} at {_when(reading.at)}, {probe.wall_s:.2f} s"
    yield f"settings   {settings_from}{_said(settings)}"
    yield f"baseline   {_baseline(probe)}"
    yield f"GPUs       {len(reading.gpus)}"
    for gpu in reading.gpus:
        index = "gpu?" if gpu.index is None else f"gpu{gpu.index}"
        yield f"  {index:6} {gpu.bus or 'no bus'}  {gpu.uuid}".rstrip()
    yield f"read       {len(reading.signals)} signals"
    yield from _signals(reading)
    yield f"not read   {len(reading.failures)}"
    yield from (f"  {one.source}: {one.text}" for one in reading.failures)
    fired = [one for one in report.verdicts if one.word != IGNORE or one.hands_to_run]
    yield f"rules      {len(fired)} fired"
    for told in fired:
        yield from _fired(told)
    benign = Counter(f"{one.rule} ({one.code})" for one in report.verdicts if one not in fired)
    yield from (f"  ignored: {rule}, {times} times" for rule, times in benign.items())
    if report.action:
        yield f"done       {report.action}: {report.done}"
    yield from (f"complaint  {text}" for text in report.complaints)
    yield from (f"note       {text}" for text in report.notes)
    yield f"result     {report.word if report.word != OK else 'ok, no rule fired'}"


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _said(settings: HealthSettings) -> str:
    """Only what differs from the defaults."""
    defaults = vars(HealthSettings())
    changed = {key: value for key, value in vars(settings).items() if value != defaults[key]}
    return "".join(f"; {key}={value}" for key, value in changed.items())


def _baseline(probe: Probe) -> str:
    if probe.baseline is None:
        return "none: counters say nothing of this look"
    if probe.baseline.boot_id != probe.reading.boot_id:
        return f"{_when(probe.baseline.at)}, of another boot: counters say nothing"
    return f"{probe.baseline.context} at {_when(probe.baseline.at)}; counters count from there"


def _signals(reading: Reading) -> Iterator[str]:
    """A line for each kind: the places of each value, where they differ."""
    everyone = {_gpu(gpu) for gpu in reading.gpus}
    by_kind: dict[str, dict[str, list[str]]] = {}
    for signal in reading.signals:
        values = by_kind.setdefault(signal.kind, {})
        values.setdefault(_value(signal), []).append(_place(signal))
    for kind, values in sorted(by_kind.items()):
        parts = [
            f"{value} ({_places(places, everyone)})" if any(places) else value
            for value, places in values.items()
        ]
        yield f"  {kind:{_WIDTH}} {'; '.join(parts)}"


def _value(signal: Signal) -> str:
    text = f" `{signal.text[:120]}`" if signal.text else ""
    times = f", {signal.count} times" if signal.count > 1 else ""
    return f"{signal.value}{text}{times}"


def _place(signal: Signal) -> str:
    gpu = _gpu(signal.gpu) if signal.gpu else ""
    link = "" if signal.link is None else f"link {signal.link}"
    return " ".join(part for part in (gpu, link, signal.where) if part)


def _gpu(gpu: Gpu) -> str:
    return gpu.bus if gpu.index is None else f"gpu{gpu.index}"


def _places(places: list[str], everyone: set[str]) -> str:
    shown = list(dict.fromkeys(places))
    if len(everyone) > 1 and everyone == set(shown):
        return "all GPUs"
    if len(shown) <= _MOST_PLACES:
        return ", ".join(shown)
    return f"{', '.join(shown[:2])} and {len(shown) - 2} more"


def _fired(told: Told) -> Iterator[str]:
    marks = [
        mark
        for mark, is_set in (
            ("found by an earlier look of this job", told.earlier),
            ("the program's own: told to the run, never drains", told.hands_to_run),
            ("never resumed but by a person", told.sticky),
        )
        if is_set
    ]
    place = f" {told.place}" if told.place else ""
    yield f"  {told.word} {told.code}{place}: {told.sentence}"
    yield f"    rule {told.rule}; source {told.source}{''.join(f'; {mark}' for mark in marks)}"
