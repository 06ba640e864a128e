"""`ftslurm report`: what broke, whose fault it was, what it cost, what to change.

Reads only. Jobs are printed as they are read, so that a million of them take no memory; the figures
of all together come last. Exit 0: nothing failed; 1: something did; 3: there is nothing to read.
"""

from __future__ import annotations

import argparse
import csv
import getpass
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

from ftslurm.errors import EXIT_FAILED, EXIT_OK, UsageError
from ftslurm.files import write_atomic
from ftslurm.report.fleet import GROUPS
from ftslurm.report.jobs import JobReport
from ftslurm.report.records import COLUMNS, SCHEMA_VERSION, csv_row, fleet_record, job_record
from ftslurm.report.sources import Reading, wanted_of
from ftslurm.report.text import LIST_HEAD, fleet_lines, job_line, job_lines, source_lines
from ftslurm.scheduler.sacct import Query, sacct_time

EXIT_NO_DATA = 3
MOST_LISTED = 40

_EXAMPLES = """\
examples:
  ftslurm report                        my jobs of the last 7 days, and the runs below runs/
  ftslurm report runs/gpt-20261130      one run: every attempt, why it ended, what it cost
  ftslurm report 4711 4712_3            jobs, of ours or not
  ftslurm report slurm-4711.out         the job that wrote this log
  ftslurm report --all-users --since 30d --by node
  ftslurm report --since 2026-11-01 --until 2026-12-01 --csv > november.csv
  ftslurm report --all-users --html report.html
  ftslurm report --json | jq .fleet.findings

exit code: 0 nothing failed, 1 something did, 2 wrong use, 3 nothing to read"""


def main(argv: Optional[list[str]] = None) -> int:
    options = _parser().parse_args(argv)
    if options.html and not Path(options.html).parent.is_dir():
        folder = Path(options.html).parent
        raise UsageError(f"there is no folder `{folder}` for the page; make it, or name another")
    wanted = wanted_of(options.what, [Path(options.runs_below)])
    user = "" if options.all_users or options.what else options.user or getpass.getuser()
    query = Query(sacct_time(options.since or "7d"), sacct_time(options.until or "now"), user)
    if options.what and (options.since or options.until or options.user or options.all_users):
        wanted.notes.append("what is named is reported whole, whenever it ran and whosever it is")
    reading = Reading(wanted, query)
    if options.html:
        _write_page(reading, query, Path(options.html))
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
    return EXIT_FAILED if fleet.total.failures or fleet.states.get("failed") else EXIT_OK


def _print_json(reading: Reading, query: Query) -> None:
    """Job by job: the list is never held."""
    head = {"schema_version": SCHEMA_VERSION, "since": query.since, "until": query.until}
    write = sys.stdout.write
    write(json.dumps(head)[:-1] + ', "jobs": [')
    for place, job in enumerate(reading.reports()):
        write(("," if place else "") + "\n" + json.dumps(job_record(job), sort_keys=True))
    source = {"accounting": reading.source.accounting, "notes": reading.source.notes}
    write(f'\n], "source": {json.dumps(source)}, "fleet": ')
    write(json.dumps(fleet_record(reading.fleet), sort_keys=True) + "}\n")


def _write_page(reading: Reading, query: Query, path: Path) -> None:
    """Whole or not at all; as many jobs as a page can carry, those that failed before others."""
    from ftslurm.report.page import MOST_LISTED, page  # late: few want it

    jobs: list[JobReport] = []
    left = 0
    for job in reading.reports():
        jobs.append(job)
        if len(jobs) > 2 * MOST_LISTED:
            jobs.sort(key=lambda one: -len(one.failures))
            left += len(jobs) - MOST_LISTED
            del jobs[MOST_LISTED:]
    data = {
        "schema_version": SCHEMA_VERSION,
        "since": query.since,
        "until": query.until,
        "source": {"accounting": reading.source.accounting, "notes": reading.source.notes},
        "fleet": fleet_record(reading.fleet),
        "jobs": [job_record(job) for job in jobs],
    }
    title = f"ftslurm report, {'all users' if not query.user else query.user}"
    text = page(jobs, reading.fleet, data, title=title, left=left)
    write_atomic(path, text.encode(), durable=False)  # it can be made again
    print(f"ftslurm: {len(jobs) + left} jobs, written to {path}", file=sys.stderr)  # noqa: T201


def _print_csv(reading: Reading) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(COLUMNS)
    for job in reading.reports():
        writer.writerow(csv_row(job))


def _print_text(reading: Reading, options: argparse.Namespace) -> None:
    listed, left = 0, 0
    for job in reading.reports():
        lines = _lines(job, options)
        if not lines:
            continue
        if listed >= MOST_LISTED and not (options.runs or options.what):
            left += 1
            continue
        if not listed:
            print(LIST_HEAD)  # noqa: T201
        listed += 1
        print("\n".join(lines))  # noqa: T201
    if left:
        print(f"... and {left} more; --runs lists all, --json and --csv too")  # noqa: T201
    if listed:
        print()  # noqa: T201
    print("\n".join(fleet_lines(reading.fleet, options.by)))  # noqa: T201


def _lines(job: JobReport, options: argparse.Namespace) -> list[str]:
    """Named jobs in full; of all others those that failed, one line each."""
    if options.runs or options.what:
        return list(_in_full(job))
    return [job_line(job)] if job.failures else []


def _in_full(job: JobReport) -> Iterator[str]:
    yield from job_lines(job)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ftslurm report",
        description="What broke, whose fault it was, what it cost, what to change.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("what", nargs="*", metavar="RUN|JOB|LOG", help="run directories, job ids, logs of jobs")
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
