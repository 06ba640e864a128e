"""A report as one page for a browser: no script, no other file, nothing fetched. Pure.

The figures are those of `--json`, which the page carries along as it is (`#data`); what is drawn is
drawn from the same values. Everything that a user has named is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Optional

from ftslurm.diagnosis.causes import MEANING
from ftslurm.report.fleet import Fleet
from ftslurm.report.jobs import FREE, AttemptReport, JobReport
from ftslurm.report.text import duration, hours, percent, stamp

MOST_DRAWN = 60
MOST_LISTED = 500
"""Jobs on the page; `--json` and `--csv` have them all."""
WIDTH, LABEL, ROW = 920, 190, 18

COLOURS = {
    "fine": "#4c9f70", "free": "#8fa9c4", "node": "#c0392b", "gpu": "#a93226", "code": "#e67e22",
    "hang": "#8e44ad", "straggler": "#9b59b6", "oom_host": "#d4ac0d", "oom_gpu": "#b7950b",
    "network_transient": "#2874a6", "storage": "#1f618d", "unknown": "#7f8c8d",
}  # fmt: skip
_OTHER = "#d35400"

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1d2733;max-width:980px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em;margin:0}h2{font-size:1.1em;margin:2em 0 .4em}p.sub{color:#5c6b7a;margin:.2em 0}
.tiles{display:flex;flex-wrap:wrap;gap:12px;margin:1.2em 0}
.tile{border:1px solid #d8dfe6;border-radius:6px;padding:10px 14px;min-width:120px}
.tile b{display:block;font-size:1.45em}.tile span{color:#5c6b7a;font-size:.85em}
table{border-collapse:collapse;width:100%;font-size:.88em}
th,td{text-align:left;padding:3px 8px;border-bottom:1px solid #e6ebf0}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
svg{width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#33414f}
.note{color:#8a5a00}
.key{display:inline-block;width:10px;height:10px;border-radius:2px;margin:0 4px 0 12px}
@media(prefers-color-scheme:dark){body{background:#12181f;color:#dde5ec}.tile{border-color:#33414f}
th,td{border-color:#26313c}svg text{fill:#b8c4cf}p.sub,.tile span{color:#93a1af}}
"""


def page(
    jobs: Sequence[JobReport], fleet: Fleet, data: Mapping[str, Any], *, title: str, left: int
) -> str:
    """`data`: what `--json` prints; `left`: jobs that are not among `jobs`."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width'>",
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{escape(title)}</h1>",
        f"<p class=sub>{escape(_span(data))}</p>",
        *(f"<p class=note>{escape(note)}</p>" for note in data["source"]["notes"]),
        _tiles(fleet),
        _waterfall(fleet),
        _causes(fleet),
        _timeline(jobs),
        _nodes(jobs),
        _findings(data),
        _table(jobs, left),
        f"<script type='application/json' id=data>{_embedded(data)}</script></html>",
    ]
    return "\n".join(part for part in parts if part)


def _embedded(data: Mapping[str, Any]) -> str:
    """No `</script>` in it, whatever a job is called."""
    return json.dumps(data, sort_keys=True).replace("<", "\\u003c")


def _span(data: Mapping[str, Any]) -> str:
    return f"{data['since']} to {data['until']}, by {data['source']['accounting']}"


def _tiles(fleet: Fleet) -> str:
    total = fleet.total
    told = (
        (f"{fleet.jobs:,}", "jobs"),
        (f"{total.failures:,}", f"failures in {total.attempts:,} attempts"),
        (hours(total.gpu_hours), "GPU-hours used"),
        (hours(total.lost_gpu_hours), "GPU-hours lost, by the runs' own records"),
        (
            hours(total.unknown_gpu_hours),
            "GPU-hours of attempts that were cut short and left no records",
        ),
        (percent(fleet.recovered_share), "of failed jobs done all the same"),
        (
            hours(fleet.gpu_mtbf_h),
            f"GPU-hours between hardware failures ({fleet.hardware_failures:,} of them)",
        ),
        (percent(fleet.goodput.share), "goodput"),
    )
    tiles = "".join(
        f"<div class=tile><b>{value}</b><span>{what}</span></div>" for value, what in told
    )
    return f"<div class=tiles>{tiles}</div>"


def _waterfall(fleet: Fleet) -> str:
    good = fleet.goodput
    if not good.allocated_s:
        return ""
    steps = (
        ("allocated", good.allocated_s, "#5d6d7e"), ("starting", -good.restart_s, "#e67e22"),
        ("stopped for saves", -good.stall_s, "#d4ac0d"), ("trained again or lost", -good.lost_s,
        "#c0392b"), ("other", -good.other_s, "#95a5a6"), ("trained", good.trained_s, "#4c9f70"),
    )  # fmt: skip
    bars, left_s = [], 0.0
    for place, (what, value_s, colour) in enumerate(steps):
        begin_s = left_s + value_s if value_s < 0 else 0.0
        left_s = left_s + value_s if value_s < 0 else value_s
        bars.append(
            _bar(
                place,
                what,
                begin_s,
                abs(value_s),
                good.allocated_s,
                colour,
                f"{duration(abs(value_s))}, {percent(abs(value_s) / good.allocated_s)}",
            )
        )
    return _figure("Where the time of the nodes went", bars, len(steps))  # fmt: skip


def _causes(fleet: Fleet) -> str:
    groups = sorted(fleet.by["cause"].items(), key=lambda item: -item[1].attempts)
    if not groups:
        return ""
    most = max(group.attempts for _, group in groups) or 1
    bars = [
        _bar(place, cause, 0.0, group.attempts, most, _colour(cause),
             f"{group.attempts:,} attempts, {MEANING.get(cause, '')}")
        for place, (cause, group) in enumerate(groups)
    ]  # fmt: skip
    return _figure("Why attempts ended", bars, len(groups))


def _timeline(jobs: Sequence[JobReport]) -> str:
    """The jobs that failed most, each attempt a bar."""
    shown = sorted(jobs, key=lambda job: (-len(job.failures), job.job_id))[:MOST_DRAWN]
    spans = [one for job in shown for one in job.attempts if _is_drawn(one)]
    if not spans:
        return ""
    begin, end = _limits(spans)
    rows = []
    for place, job in enumerate(shown):
        label = escape(f"{job.job_id} {job.name}"[:28])
        rows.append(f"<text x=0 y={place * ROW + 13}>{label}</text>")
        rows += [_span_bar(place, one, begin, end) for one in job.attempts if _is_drawn(one)]
    axis = f"<text x={LABEL} y={len(shown) * ROW + 14}>{stamp(begin)}</text>"
    axis += f"<text x={WIDTH} y={len(shown) * ROW + 14} text-anchor=end>{stamp(end)}</text>"
    return _figure("Attempts over time", [*rows, axis], len(shown) + 1, key=True)


def _nodes(jobs: Sequence[JobReport]) -> str:
    """Nodes that were blamed, and when."""
    blamed: dict[str, list[AttemptReport]] = {}
    for job in jobs:
        for one in job.failures:
            if one.node and _is_drawn(one):
                blamed.setdefault(one.node, []).append(one)
    if not blamed:
        return ""
    nodes = sorted(blamed, key=lambda node: (-len(blamed[node]), node))[:MOST_DRAWN]
    begin, end = _limits([one for node in nodes for one in blamed[node]])
    rows = []
    for place, node in enumerate(nodes):
        rows.append(f"<text x=0 y={place * ROW + 13}>{escape(node[:28])}</text>")
        rows += [_span_bar(place, one, begin, end) for one in blamed[node]]
    return _figure("Nodes that were blamed", rows, len(nodes))


def _findings(data: Mapping[str, Any]) -> str:
    told = data["fleet"]["findings"]
    if not told:
        return ""
    items = "".join(
        f"<li><b>{escape(one['what'])}</b><br>{escape(one['advice'])}</li>" for one in told
    )
    return f"<h2>What to change</h2><ul>{items}</ul>"


def _table(jobs: Sequence[JobReport], left: int) -> str:
    head = "".join(
        f"<th{' class=n' if is_number else ''}>{name}</th>"
        for name, is_number in (
            ("job", False), ("user", False), ("state", False), ("attempts", True),
            ("causes", False), ("node", False), ("GPU-h", True), ("waited", True), ("name", False),
        )
    )  # fmt: skip
    rows = []
    for job in sorted(jobs, key=lambda job: -len(job.failures))[:MOST_LISTED]:
        causes = ", ".join(f"{count} {cause}" for cause, count in job.causes().items())
        node = next((one.node for one in job.failures if one.node), None) or ""
        cells = (job.job_id, job.user, job.state, len(job.attempts), causes, node,
                 hours(job.gpu_hours), duration(job.wait_s), job.name[:60])  # fmt: skip
        rows.append("<tr>" + "".join(
            f"<td{' class=n' if place in (3, 6, 7) else ''}>{escape(str(cell))}</td>"
            for place, cell in enumerate(cells)
        ) + "</tr>")  # fmt: skip
    more = max(0, len(jobs) - MOST_LISTED) + left
    note = f"<p class=sub>and {more:,} more, which --json and --csv list</p>" if more else ""
    return f"<h2>Jobs</h2><table><tr>{head}</tr>{''.join(rows)}</table>{note}"


def _bar(
    place: int, what: str, begin: float, size: float, whole: float, colour: str, told: str
) -> str:
    scale = (WIDTH - LABEL - 330) / whole
    x, width = LABEL + begin * scale, max(1.0, size * scale)
    y = place * ROW
    return (
        f"<text x=0 y={y + 13}>{escape(what)}</text>"
        f"<rect x={x:.1f} y={y + 3} width={width:.1f} height={ROW - 6} fill='{colour}'/>"
        f"<text x={x + width + 6:.1f} y={y + 13}>{escape(told)}</text>"
    )


def _span_bar(place: int, one: AttemptReport, begin: float, end: float) -> str:
    scale = (WIDTH - LABEL) / max(1.0, end - begin)
    start_at, end_at = one.start_at or begin, one.end_at or end
    x, width = LABEL + (start_at - begin) * scale, max(2.0, (end_at - start_at) * scale)
    told = escape(f"{stamp(start_at)}, {duration(one.elapsed_s)}: {one.cause or one.state}"
                  f" {one.sentence}")  # fmt: skip
    return (
        f"<rect x={x:.1f} y={place * ROW + 3} width={width:.1f} height={ROW - 6}"
        f" fill='{_colour(one.cause)}'><title>{told}</title></rect>"
    )


def _figure(title: str, parts: Sequence[str], rows: int, *, key: bool = False) -> str:
    keys = ""
    if key:
        names = ("fine", "free", "node", "code", "hang", "unknown")
        keys = "<p class=sub>" + "".join(
            f"<span class=key style='background:{COLOURS[name]}'></span>{_KEYS.get(name, name)}"
            for name in names
        ) + "</p>"  # fmt: skip
    height = rows * ROW + 6
    drawn = f"<svg viewBox='0 0 {WIDTH} {height}' role=img>{''.join(parts)}</svg>"
    return f"<h2>{title}</h2>{keys}{drawn}"


_KEYS = {"fine": "ended well or runs", "free": "preempted, time limit, cancelled"}


def _colour(cause: Optional[str]) -> str:
    if cause is None:
        return COLOURS["fine"]
    return COLOURS["free"] if cause in FREE else COLOURS.get(cause, _OTHER)


def _is_drawn(one: AttemptReport) -> bool:
    return one.start_at is not None


def _limits(spans: Sequence[AttemptReport]) -> tuple[float, float]:
    starts = [one.start_at for one in spans if one.start_at is not None]
    ends = [one.end_at for one in spans if one.end_at is not None]
    return min(starts), max([*ends, *starts])
