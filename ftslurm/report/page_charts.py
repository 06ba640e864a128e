"""The drawings of a report's page: rows of bars, as text and boxes that a browser lays out. Pure.

Every number that is written beside a bar says by `data-of` where it stands in the JSON.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, Optional

from ftslurm.diagnosis.causes import MEANING
from ftslurm.errors import FtslurmError
from ftslurm.report.advice import WHOSE
from ftslurm.report.drains import LOST, OTHERS, OURS
from ftslurm.report.jobs import AttemptReport, JobReport
from ftslurm.report.page_style import BLAMED, COLOURS, FAILED, FINE, SET_ASIDE, colour
from ftslurm.report.text import counted, duration, hours, percent, stamp
from ftslurm.scheduler.hostlist import expand

MOST_DRAWN = 60
"""Rows of one drawing."""
MOST_DRAWN_ONCE = 25
"""Rows that are filled with jobs of one attempt."""
BINS = 60
"""Of the time that is drawn, at most."""
BIN_SIZES_S = (60.0, 600.0, 3600.0, 4 * 3600.0, 86_400.0, 7 * 86_400.0, 30 * 86_400.0)
TICKS = 5

Span = tuple[float, float]
"""From, to."""


def figure(data: Mapping[str, Any], path: str, form: Callable[[Any], str], tag: str = "b") -> str:
    """The value at `path` of the JSON, as it is shown."""
    return f"<{tag} data-of='{escape(path)}'>{escape(form(value_at(data, path)))}</{tag}>"


def value_at(data: Mapping[str, Any], path: str) -> Any:
    """`path`: e.g. `fleet.total.failures`."""
    value: Any = data
    for name in path.split("."):
        value = value[name]
    return value


def waterfall(data: Mapping[str, Any]) -> str:
    good = data["fleet"]["goodput"]
    names = ("trained_s", "lost_s", "stall_s", "restart_s", "other_s")
    allocated_s = sum(good[name] for name in names)
    if not allocated_s:
        return ""
    left = 1.0
    rows = []
    for name, what, shade in (
        ("restart_s", "starting", "#e67e22"), ("stall_s", "stopped for saves", "#d4ac0d"),
        ("lost_s", "trained again or lost", "#c0392b"), ("other_s", "other", "#95a5a6"),
        ("trained_s", "training that lasts", FINE),
    ):  # fmt: skip
        share = good[name] / allocated_s
        begin = 0.0 if name == "trained_s" else left - share
        left -= share
        told = figure(data, f"fleet.goodput.{name}", _node_hours, "span")
        rows.append(_row(what, [_bar(begin, share, shade)], f"{told} ({percent(share)})"))
    whole = f"{hours(allocated_s / 3600.0)} node-hours"
    first = _row("allocated", [_bar(0.0, 1.0, SET_ASIDE)], whole)
    queued = figure(data, "fleet.goodput.queue_s", _node_hours, "span")
    note = f"Besides, in the queue, jobs waited for the nodes that they had asked for: {queued}."
    return _section("Where the time of the nodes went", [first, *rows], sub=note)


def shares_of_causes(data: Mapping[str, Any]) -> str:
    groups = data["fleet"]["by"]["cause"]
    if not groups:
        return ""
    most = max(group["attempts"] for group in groups.values()) or 1
    rows = []
    for cause in sorted(groups, key=lambda name: -groups[name]["attempts"]):
        number = figure(data, f"fleet.by.cause.{cause}.attempts", "{:,}".format, "span")
        hours_had = figure(data, f"fleet.by.cause.{cause}.gpu_hours", hours, "span")
        rows.append(
            _row(
                cause,
                [_bar(0.0, groups[cause]["attempts"] / most, colour(cause))],
                f"{number} of them, {hours_had} GPU-h",
                why=why_of(cause),
            )
        )
    return _section(
        "Why attempts ended",
        rows,
        sub="Attempts by the cause of their end, and the GPU-hours that they had used.",
    )


def why_of(cause: str) -> str:
    """For a reader to whom the word alone says little."""
    return f"{MEANING[cause]} ({WHOSE[cause]})" if cause in MEANING else ""


def order(job: JobReport) -> tuple[int, int, float, str]:
    """By which jobs are listed: those that failed most, and of these the dearest first."""
    return -len(job.failures), -len(job.attempts), -job.gpu_hours, job.job_id


def attempts_over_time(jobs: Sequence[JobReport], left: int) -> str:
    """The jobs that failed most, each attempt a bar; a few of those that had one attempt alone."""
    drawn = [job for job in jobs if any(_is_drawn(one) for one in job.attempts)]
    in_order = sorted(drawn, key=order)
    several = [job for job in in_order if len(job.attempts) > 1]
    once = [job for job in in_order if len(job.attempts) == 1]
    shown = several[:MOST_DRAWN]
    shown += once[: max(0, MOST_DRAWN_ONCE - len(shown))]
    if not shown:
        return ""
    span = _span([one for job in shown for one in job.attempts if _is_drawn(one)])
    rows = []
    for job in shown:
        bars = [_span_bar(one, span) for one in job.attempts if _is_drawn(one)]
        told = f"{counted(len(job.begun), 'attempt')}, {len(job.failures):,} failed"
        rows.append(_row(f"{job.job_id} {job.name}", bars, told))
    seen = {one.cause for job in shown for one in job.attempts if _is_drawn(one)}
    more = len(drawn) - len(shown) + left
    sub = f"Those that failed most; {counted(more, 'other job')} not drawn." if more else ""
    return _section("Attempts over time", [*rows, _axis(span)], sub=sub, keys=_keys(seen))


def out_of_service(data: Mapping[str, Any]) -> str:
    """Nodes by who took them out, ftslurm's own drains told from the others."""
    drains = data["fleet"]["drains"] or {}
    most = max((kind["hours"] for kind in drains.values()), default=0.0)
    rows = []
    for name, what, shade in (
        (OURS, "drained by ftslurm", COLOURS["storage"]),
        (LOST, "lost, Slurm had no answer", COLOURS["node"]),
        (OTHERS, "taken out by others", SET_ASIDE),
    ):
        kind = drains.get(name) or {"events": 0}
        if kind["events"]:
            out = figure(data, f"fleet.drains.{name}.hours", hours, "span")
            often = "time" if kind["events"] == 1 else "times"
            times = figure(data, f"fleet.drains.{name}.events", "{:,}".format, "span")
            reasons = ", ".join(f"{count} x {why}" for why, count in kind["reasons"].items())
            bars = [_bar(0.0, kind["hours"] / most if most else 0.0, shade, reasons)]
            rows.append(_row(what, bars, f"{out} node-hours, {times} {often}"))
    sub = "A drain by ftslurm is its judgement of a node, between jobs; it ended none."
    return _section("Nodes out of service", rows, sub=sub) if rows else ""


class NodeFailures:
    """When attempts failed on each node, of all jobs, also those that the page does not list: eight
    bytes a failure and node."""

    def __init__(self) -> None:
        self.ends_at: dict[str, array[float]] = {}
        """Negative where the node was blamed."""
        self.span: Optional[Span] = None

    def add(self, job: JobReport) -> None:
        drawn = [one for one in job.attempts if _is_drawn(one)]
        if drawn:
            first, last = _span(drawn)
            known = self.span or (first, last)
            self.span = min(first, known[0]), max(last, known[1])
        for one in job.attempts:
            end_at = one.last_at
            if not one.is_failure or end_at is None:
                continue
            first, last = self.span or (end_at, end_at)
            self.span = min(first, end_at), max(last, end_at)
            blamed = [one.node] if one.node else []
            for node in dict.fromkeys([*_expanded(one.nodes), *blamed]):
                ends = self.ends_at.setdefault(node, array("d"))
                ends.append(-end_at if node == one.node else end_at)


def nodes_over_time(failures: NodeFailures) -> str:
    """Nodes on which attempts failed, and when: those that were blamed first."""
    found, span = failures.ends_at, failures.span
    if not found or span is None:
        return ""
    order = sorted(found, key=lambda node: (-_blamed(found[node]), -len(found[node]), node))
    cells = {node: _cells(found[node], span) for node in order[:MOST_DRAWN]}
    most = max(count for told in cells.values() for count, _ in told.values())
    rows = []
    for node, told in cells.items():
        count, blamed = len(found[node]), _blamed(found[node])
        bars = list(_cell_bars(told, span, most))
        rows.append(_row(node, bars, f"{count:,} failed, {blamed:,} blamed on it"))
    more = len(order) - MOST_DRAWN
    sub = (
        "Attempts that failed on each node, by when they ended; the stronger the colour, the more."
    )
    sub += f" {counted(more, 'node')} with fewer not drawn." if more > 0 else ""
    keys = _key(BLAMED, "blamed on the node") + _key(FAILED, "failed, nobody or another blamed")
    return _section("Nodes and failures over time", [*rows, _axis(span)], sub=sub, keys=keys)


Cells = dict[int, tuple[int, int]]
"""Place in time -> failures, and how many of them were blamed on the node."""


def _cells(ends_at: Sequence[float], span: Span) -> Cells:
    size_s = _bin_size_s(span)
    found: Cells = {}
    for at in ends_at:
        place = int((abs(at) - span[0]) // size_s)
        count, blamed = found.get(place, (0, 0))
        found[place] = count + 1, blamed + (at < 0)
    return found


def _cell_bars(cells: Cells, span: Span, most: int) -> Iterator[str]:
    size_s = _bin_size_s(span)
    whole_s = max(1.0, span[1] - span[0])
    for place, (count, blamed) in sorted(cells.items()):
        begin = min(1.0, place * size_s / whole_s)
        width = min(size_s / whole_s, 1.0 - begin)
        told = f"{stamp(span[0] + place * size_s)}: {count} failed, {blamed} blamed on it"
        shade = BLAMED if blamed else FAILED
        yield _bar(begin, width, shade, told, 0.35 + 0.65 * count / most)


def _bin_size_s(span: Span) -> float:
    whole_s = span[1] - span[0]
    return next((size for size in BIN_SIZES_S if whole_s <= size * BINS), BIN_SIZES_S[-1])


def _blamed(ends_at: Sequence[float]) -> int:
    return sum(at < 0 for at in ends_at)


def _expanded(nodes: str) -> list[str]:
    try:
        return expand(nodes) if nodes else []
    except FtslurmError:
        return []


def _row(what: str, bars: Sequence[str], told: str, *, why: str = "") -> str:
    """`told` is HTML, `what` and `why` are not."""
    said, more = escape(what), f"<span class=why>{escape(why)}</span>" if why else ""
    return (
        f'<div class=row><span class=of title="{said}">{said}</span>'
        f"<span class=track>{''.join(bars)}</span><span class=at>{told}</span>{more}</div>"
    )


def _bar(
    begin: float, share: float, shade: str, told: str = "", opacity: Optional[float] = None
) -> str:
    """`begin` and `share`: of the whole row."""
    title = f' title="{escape(told)}"' if told else ""
    faint = "" if opacity is None else f";opacity:{opacity:.2f}"
    where = f"left:{100 * begin:.3f}%;width:{100 * share:.3f}%"
    return f'<i style="{where};background:{shade}{faint}"{title}></i>'


def _span_bar(one: AttemptReport, span: Span) -> str:
    whole_s = max(1.0, span[1] - span[0])
    start_at = one.start_at or span[0]
    end_at = max(start_at, one.last_at or span[1])
    told = f"{stamp(start_at)}, {duration(one.elapsed_s)}: {one.cause or one.state.lower()}"
    told += f", node {one.node}" if one.node else ""
    told += f": {one.sentence}" if one.sentence else ""
    begin = (start_at - span[0]) / whole_s
    return _bar(begin, (end_at - start_at) / whole_s, colour(one.cause), told)


def _axis(span: Span) -> str:
    step_s = (span[1] - span[0]) / (TICKS - 1)
    # A date, or the day and the hour: five of them fit.
    cut = slice(0, 10) if step_s > 86_400.0 else slice(5, 16)
    marks = "".join(
        f'<span style="left:{100 * place / (TICKS - 1):.0f}%">'
        f"{stamp(span[0] + place * step_s)[cut]}</span>"
        for place in range(TICKS)
    )
    return f"<div class=axis><span class=ticks>{marks}</span></div>"


def _keys(seen: set[Optional[str]]) -> str:
    """Of the colours that are there, each once."""
    named: dict[str, list[str]] = {}
    for cause in sorted(seen, key=lambda one: (one is not None, one or "")):
        named.setdefault(colour(cause), []).append(cause or "ended well or runs")
    return "".join(_key(shade, ", ".join(names)) for shade, names in named.items())


def _key(shade: str, what: str) -> str:
    return f'<span><i style="background:{shade}"></i>{escape(what)}</span>'


def _section(title: str, rows: Sequence[str], *, sub: str = "", keys: str = "") -> str:
    told = f"<p class=sub>{sub}</p>" if sub else ""
    shades = f"<div class=keys>{keys}</div>" if keys else ""
    return f"<section><h2>{escape(title)}</h2>{told}{shades}{''.join(rows)}</section>"


def _node_hours(seconds: float) -> str:
    return f"{hours(seconds / 3600.0)} node-hours"


def _is_drawn(one: AttemptReport) -> bool:
    return one.start_at is not None


def _span(attempts: Sequence[AttemptReport]) -> Span:
    starts = [one.start_at for one in attempts if one.start_at is not None]
    ends = [one.last_at for one in attempts if one.last_at is not None]
    return min(starts), max([*ends, *starts])
