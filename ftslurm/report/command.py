"""`ftslurm report`: what broke, whose fault it was, what it cost, what to change.

Reads only. Jobs are printed as they are read, so that a million of them take no memory; the figures
of all together come last. Exit 0: nothing failed; 1: something did; 3: there is nothing to read, or
nothing failed as far as it could be read.
"""

from __future__ import annotations

import argparse
import csv
import gc
import getpass
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Optional

from ftslurm.errors import EXIT_FAILED, EXIT_OK, UsageError
from ftslurm.files import write_atomic
from ftslurm.report.fleet import GROUPS
from ftslurm.report.jobs import JobReport
from ftslurm.report.records import COLUMNS, SCHEMA_VERSION, csv_row, fleet_record, job_record
from ftslurm.report.sources import Reading
from ftslurm.report.sweeps import sweep_head, sweep_lines, sweep_record, task_name, value_lines
from ftslurm.report.text import LIST_HEAD, fleet_lines, job_line, job_lines, source_lines
from ftslurm.report.wanted import wanted_of
from ftslurm.scheduler.sacct import Query, sacct_time, when_at

EXIT_NO_DATA = 3
MOST_LISTED = 40

_EXAMPLES = """\
examples:
  ftslurm report                        my jobs of the last 7 days, and the runs below runs/
  ftslurm report runs/gpt-20261130      one run: every attempt, why it ended, what it cost
  ftslurm report sweep-20261130         a sweep or a run by its id below runs/
  ftslurm report 4711 4712_3            jobs, of ours or not
  ftslurm report slurm-4711.out         the job that wrote this log
  ftslurm report --all-users --since 30d --by node
  ftslurm report --since 2026-11-01 --until 2026-12-01 --csv > november.csv
  ftslurm report --all-users --html report.html
  ftslurm report --json | jq .fleet.findings

exit code: 0 nothing failed, 1 something did, 2 wrong use, 3 nothing to read, or
not to its end"""


def main(argv: Optional[list[str]] = None) -> int:
    options = _parser().parse_args(argv)
    if options.html:
        _check_place(Path(options.html))
    wanted = wanted_of(options.what, [Path(options.runs_below)])
    user = "" if options.all_users or options.what else options.user or getpass.getuser()
    query = Query(sacct_time(options.since or "7d"), sacct_time(options.until or "now"), user)
    if options.what and (options.since or options.until or options.user or options.all_users):
        wanted.notes.append("what is named is reported whole, whenever it ran and whosever it is")
    # Jobs come and go by the hundred thousand and hold no cycles; looking for some costs a tenth.
    gc.set_threshold(100_000)
    reading = Reading(wanted, query)
    if options.html:
        _write_page(reading, query, options)
    elif options.json:
        _print_json(reading, query)
    elif options.csv:
        _print_csv(reading)
    else:
        _print_text(reading, options)
    if options.csv or not options.json:
        for line in source_lines(reading.source.notes):
            print(f"ftslurm: {line}", file=sys.stderr)  # noqa: T201
    fleet = reading.fleet
    if reading.found_nothing or (not fleet.jobs and reading.source.accounting == "none"):
        return EXIT_NO_DATA
    if fleet.total.failures or fleet.states.get("failed"):
        return EXIT_FAILED
    return EXIT_OK if reading.source.is_whole else EXIT_NO_DATA


def _check_place(path: Path) -> None:
    """Before anything is read, which may take minutes."""
    if not path.parent.is_dir():
        raise UsageError(
            f"there is no folder `{path.parent}` for the page; make it, or name another"
        )
    if path.is_dir():
        raise UsageError(f"`{path}` is a folder; name a file in it for the page")


def _print_json(reading: Reading, query: Query) -> None:
    """Job by job: the list is never held."""
    head = {"schema_version": SCHEMA_VERSION, "since": query.since, "until": query.until}
    write = sys.stdout.write
    begin = json.dumps(head)[:-1] + ', "jobs": ['
    for job in reading.reports():
        write(begin + "\n" + json.dumps(job_record(job), sort_keys=True))
        begin = ","
    write("" if begin == "," else begin)
    sweeps = [sweep_record(one) for one in reading.sweeps.found]
    write(f'\n], "sweeps": {json.dumps(sweeps, sort_keys=True)}')
    source = {"accounting": reading.source.accounting, "notes": reading.source.notes}
    write(f', "source": {json.dumps(source)}, "fleet": ')
    write(json.dumps(fleet_record(reading.fleet), sort_keys=True) + "}\n")


def _write_page(reading: Reading, query: Query, options: argparse.Namespace) -> None:
    """Whole or not at all; as many jobs as a page can carry, those that failed before others."""
    from ftslurm.report.page import MOST_LISTED, page  # late: few want it
    from ftslurm.report.page_charts import NodeFailures, order

    jobs: list[JobReport] = []
    left, failures = 0, NodeFailures()
    for job in reading.reports():
        jobs.append(job)
        failures.add(job)
        if len(jobs) > 2 * MOST_LISTED:
            jobs.sort(key=order)
            left += len(jobs) - MOST_LISTED
            del jobs[MOST_LISTED:]
    data = {
        "schema_version": SCHEMA_VERSION,
        "since": query.since,
        "until": query.until,
        "source": {"accounting": reading.source.accounting, "notes": reading.source.notes},
        "fleet": fleet_record(reading.fleet),
        "jobs": [job_record(job) for job in jobs],
        "sweeps": [sweep_record(one) for one in reading.sweeps.found],
    }
    whose = ", ".join(options.what[:3]) or query.user or "all users"
    now = time.time()
    text = page(
        jobs,
        failures,
        data,
        title=f"ftslurm report: {whose}{', ...' if len(options.what) > 3 else ''}",
        period=None if options.what else (when_at(query.since, now), when_at(query.until, now)),
        left=left,
    )
    write_atomic(
        Path(options.html), text.encode(errors="replace"), durable=False
    )  # it can be made again
    count = len(jobs) + left
    print(f"ftslurm: {count} jobs, written to {options.html}", file=sys.stderr)  # noqa: T201


def _print_csv(reading: Reading) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(COLUMNS)
    for job in reading.reports():
        writer.writerow(csv_row(job))


def _print_text(reading: Reading, options: argparse.Namespace) -> None:
    listed, left = 0, 0
    sweep_dir = ""
    for job in reading.reports():
        lines = _lines(job, options)
        if not lines:
            continue
        # Of a sweep that has just been queued there is nothing to tell a thousand times.
        is_told = options.what and (job.begun or job.sweep is None)
        if listed >= MOST_LISTED and not (options.runs or is_told):
            left += 1
            continue
        if not listed:
            print(LIST_HEAD)  # noqa: T201
        listed += 1
        here = job.sweep.sweep_dir if job.sweep is not None else ""
        if here != sweep_dir:
            print(sweep_head(here))  # noqa: T201
        sweep_dir = here
        print("\n".join(lines))  # noqa: T201
    if left:
        print(f"... and {left} more; --runs lists all, --json and --csv too")  # noqa: T201
    sweeps = reading.sweeps.found
    for sweep in sweeps:
        print("\n".join(["", *sweep_lines(sweep)]))  # noqa: T201
    if listed or sweeps:
        print()  # noqa: T201
    print("\n".join(fleet_lines(reading.fleet, options.by)))  # noqa: T201


def _lines(job: JobReport, options: argparse.Namespace) -> list[str]:
    """Named jobs in full; of all others those that failed, one line each."""
    # The tasks of a sweep all have the same name.
    shown = replace(job, name=task_name(job.sweep)) if job.sweep is not None else job
    if options.runs or options.what:
        return [*job_lines(shown), *value_lines(job.sweep)]
    return [job_line(shown)] if job.failures else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ftslurm report",
        description="What broke, whose fault it was, what it cost, what to change.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "what",
        nargs="*",
        metavar="RUN|SWEEP|JOB|LOG",
        help="folders or ids of runs and sweeps, job ids, logs of jobs",
    )
    add("--since", metavar="WHEN", help="7d, 12h, or a date sacct knows (7d)")
    add("--until", metavar="WHEN", help="(now)")
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--user", metavar="NAME", help="whose jobs (one's own)")
    whose.add_argument("--all-users", action="store_true", help="as far as the site shows them")
    add("--by", choices=GROUPS, help="what the figures are grouped by (cause)")
    add("--runs", action="store_true", help="list all jobs, with each attempt")
    add("--runs-below", default="runs", metavar="FOLDER", help="where runs lie (runs)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="for programs; schema_version 1")
    how.add_argument("--csv", action="store_true", help="one line a job")
    how.add_argument("--html", metavar="FILE", help="one page for a browser, nothing beside it")
    return parser
