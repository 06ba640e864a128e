"""A report as one page for a browser: no script, no other file, nothing fetched. Pure.

The figures are those of `--json`, which the page carries along (`#data`), of many jobs with those
alone that failed most: each that is shown says by `data-of` which one it is. Everything that a user
has named is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Optional

from ftslurm.report.jobs import JobReport
from ftslurm.report.page_charts import (
    NodeFailures,
    attempts_over_time,
    figure,
    nodes_over_time,
    order,
    out_of_service,
    shares_of_causes,
    value_at,
    waterfall,
)
from ftslurm.report.page_style import STYLE
from ftslurm.report.records import lost_gpu_hours
from ftslurm.report.text import counted, duration, hours, percent, stamp
from ftslurm.run.sweep_record import format_numbers

MOST_LISTED = 500
"""Jobs on the page; `--json` and `--csv` have them all."""


def page(
    jobs: Sequence[JobReport],
    failures: NodeFailures,
    data: Mapping[str, Any],
    *,
    title: str,
    period: Optional[tuple[Optional[float], Optional[float]]],
    left: int,
) -> str:
    """`failures`: of all jobs; `data`: what `--json` prints; `period`: since and until, as far as
    they are known, and None where what was named is told whole; `left`: jobs that are not among
    `jobs`."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width,initial-scale=1'>",
        "<meta name=color-scheme content='light dark'>",
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f"<h1>{escape(title)}</h1><p class=sub>{escape(_period(data, period))}</p>",
        *(f"<p class=note>{escape(note)}</p>" for note in data["source"]["notes"]),
    ]
    if data["fleet"]["jobs"]:
        parts += [
            _tiles(data),
            _findings(data),
            waterfall(data),
            shares_of_causes(data),
            attempts_over_time(jobs, left),
            nodes_over_time(failures),
            out_of_service(data),
            _sweeps(data),
            _table(jobs, left),
        ]
    else:
        parts.append("<p>There were no jobs.</p>")
    parts.append(f"<script type='application/json' id=data>{_embedded(data)}</script></html>")
    return "\n".join(part for part in parts if part)


def _embedded(data: Mapping[str, Any]) -> str:
    """No `</script>` in it, whatever a job is called."""
    return json.dumps(data, sort_keys=True).replace("<", "\\u003c")


def _period(
    data: Mapping[str, Any], period: Optional[tuple[Optional[float], Optional[float]]]
) -> str:
    when = "Whole, whenever it ran"
    if period is not None:
        words = (data["since"], data["until"])
        since, until = (text if at is None else stamp(at) for text, at in zip(words, period))
        when = f"{since} to {until}"
    by = {"sacct": "Slurm's accounting", "scontrol": "what slurmctld remembers"}
    source = by.get(data["source"]["accounting"], "the runs' own records alone")
    return f"{when}, by {source}. Local time."


def _tiles(data: Mapping[str, Any]) -> str:
    fleet = data["fleet"]
    total = fleet["total"]
    count = "{:,}".format
    told = [
        ("fleet.jobs", count, "job" if fleet["jobs"] == 1 else "jobs"),
        ("fleet.total.failures", count,
         f"failure{'' if total['failures'] == 1 else 's'} in"
         f" {counted(total['attempts'], 'attempt')}"),
        ("fleet.total.gpu_hours", hours, "GPU-hours used"),
        ("fleet.total.lost_gpu_hours", hours, "GPU-hours of training lost, by what runs recorded"),
        ("fleet.total.unknown_gpu_hours", hours,
         "GPU-hours at most lost besides, in attempts that ended early and left no record"),
        ("fleet.recovered_share", percent, "of the jobs that failed went on to their end"),
        ("fleet.gpu_mtbf_h", hours,
         "GPU-hours for each fault of the cluster"
         f" ({counted(fleet['hardware_failures'], 'fault')})"),
        ("fleet.goodput.share", percent, "goodput: of the allocated time, training that lasts"),
    ]  # fmt: skip
    tiles = "".join(
        f"<div class=tile>{figure(data, path, form)}<span>{what}</span></div>"
        for path, form, what in told
        if _is_told(data, path)
    )
    return f"<div class=tiles>{tiles}</div>"


def _is_told(data: Mapping[str, Any], path: str) -> bool:
    """Nothing is shown of what nobody knows, and no second loss where all of it is known."""
    value = value_at(data, path)
    return value is not None and (value != 0 or path != "fleet.total.unknown_gpu_hours")


def _findings(data: Mapping[str, Any]) -> str:
    told = data["fleet"]["findings"]
    if not told:
        return ""
    items = "".join(
        f"<li><b>{escape(one['what'])}</b><br>{escape(one['advice'])}</li>" for one in told
    )
    return f"<section><h2>What to change, the dearest first</h2><ul>{items}</ul></section>"


def _sweeps(data: Mapping[str, Any]) -> str:
    rows = [
        (one["sweep_id"], one["tasks"],
         ", ".join(f"{count} {state}" for state, count in sorted(one["states"].items())),
         format_numbers(one["failed"]) if one["failed"] else "",
         _value_of(one["lowest"]), _value_of(one["highest"]))
        for one in data["sweeps"]
    ]  # fmt: skip
    heads = (("sweep", ""), ("tasks", "n"), ("states", ""), ("tasks that failed", ""),
             ("lowest value", ""), ("highest value", ""))  # fmt: skip
    return _listing("Sweeps", heads, rows) if rows else ""


def _value_of(task: Optional[Mapping[str, Any]]) -> str:
    if task is None:
        return ""
    return f"{task['value']} of task {task['number']} ({' '.join(task['overrides'])})"


def _table(jobs: Sequence[JobReport], left: int) -> str:
    kinds = {"name": "w", "node": "w", "why they ended": "y"}
    kinds.update(dict.fromkeys(("attempts", "GPU-hours", "of them lost", "waited"), "n"))
    names = ("job", "name", "user", "state", "attempts", "why they ended", "node", "GPU-hours",
             "of them lost", "waited")  # fmt: skip
    heads = [(name, kinds.get(name, "")) for name in names]
    rows = []
    for job in sorted(jobs, key=order)[:MOST_LISTED]:
        why = ", ".join(f"{count} {cause}" for cause, count in job.causes().items())
        node = next((one.node for one in job.failures if one.node), None) or ""
        rows.append(
            (
                job.job_id,
                job.name[:60],
                job.user,
                job.state,
                len(job.begun),
                why,
                node,
                hours(job.gpu_hours),
                hours(lost_gpu_hours(job)),
                duration(job.wait_s),
            )
        )
    more = max(0, len(jobs) - MOST_LISTED) + left
    note = f"And {more:,} more, which --json and --csv list." if more else ""
    if any(lost_gpu_hours(job) is None for job in jobs):
        note = f"?: cut short without a record of what was lost. {note}"
    return _listing("Jobs", heads, rows) + (f"<p class=sub>{note}</p>" if note else "")


def _listing(title: str, heads: Sequence[tuple[str, str]], rows: Sequence[Sequence[object]]) -> str:
    kinds = [f" class={kind}" if kind else "" for _, kind in heads]
    head = "".join(f"<th{kind}>{name}</th>" for kind, (name, _) in zip(kinds, heads))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{escape(str(cell))}</td>" for kind, cell in zip(kinds, row))
        + "</tr>"
        for row in rows
    )
    return (
        f"<section><h2>{title}</h2><div class=scroll><table><tr>{head}</tr>{body}</table></div>"
        "</section>"
    )
