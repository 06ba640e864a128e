"""Accounting of a busy cluster, and a `sacct` that prints it.

The rows are those that a real 22.05 cluster has printed, job by job, again and again: under new
numbers, names, users and nodes, longer than they were, one job in six with an end that is none of
success. They come as sacct sorts them, by Submit (22.05: seen); a requeue has a new one, so that
between two rows of a job stand those of all that were submitted while it ran. Everybody is answered
from the same rows, with the fields and the delimiter that he asks for; the answers are files,
written once.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "data" / "slurm-22.05"
BEGIN_AT = 1_790_000_000
JOBS_PER_S = 10_000 / 86_400.0
NODES, USERS, PROGRAMS = 500, 200, 4
LONGEST_S = 3 * 86_400.0
REQUEUED_SHARE = 0.1
ENDS = {"FAILED": ("1:0", 0.12), "TIMEOUT": ("0:0", 0.03), "OUT_OF_MEMORY": ("0:125", 0.01),
        "NODE_FAIL": ("0:0", 0.005)}  # fmt: skip
"""State -> exit code, share of all jobs."""
MARK = "\x1f"
"""Between the values of a written row."""

Row = Mapping[str, str]
_STAMPS = ("Submit", "Eligible", "Start", "End")
_CPUS = re.compile(r"(?:^|,)cpu=(\d+)")


class Job:
    """One that was recorded, to be run again."""

    def __init__(self, runs: list[list[dict[str, str]]]) -> None:
        self.runs = runs
        self.span_s = sum(_end_at(run[0]) - _at(run[0]["Submit"]) for run in runs)

    def again(self, source: random.Random, number: int, at: float) -> Iterator[list[Row]]:
        """Its runs, each a row and those of its steps, from `at` on; what was between two runs
        takes as long as it did."""
        user, program = source.randrange(USERS), source.randrange(PROGRAMS)
        first = source.randrange(1, NODES)
        stretch = min(LONGEST_S, source.lognormvariate(7.0, 1.5)) / max(1.0, self.span_s)
        changed = {"User": f"u{user}", "UID": f"{2000 + user}", "Timelimit": "3-00:00:00",
                   "JobName": f"program{program}-{number % 40}"}  # fmt: skip
        end = _end(source)
        for place, run in enumerate(self.runs):
            begun_at = _at(run[0]["Submit"])
            if place:
                at += begun_at - _end_at(self.runs[place - 1][0])
            rows = []
            for row in run:
                new = {**row, **_measured(row, stretch, is_step=row is not run[0])}
                for name in _STAMPS:
                    if row[name][:1].isdigit():
                        new[name] = f"{at + (_at(row[name]) - begun_at) * stretch:.0f}"
                _, dot, step = row["JobID"].partition(".")
                new["JobID"] = new["JobIDRaw"] = f"{number}{dot}{step}"
                new["NodeList"] = _nodes(row["NodeList"], first)
                rows.append(new)
            rows[0].update(changed, **(end if run is self.runs[-1] else {}))
            at += (_end_at(run[0]) - begun_at) * stretch
            yield rows


def rows(count: int, *, seed: int = 1) -> Iterator[Row]:
    """By Submit; what is held are the runs of jobs that are queued again later."""
    source, jobs = random.Random(seed), _recorded()
    once = [job for job in jobs if len(job.runs) == 1]
    often = [job for job in jobs if len(job.runs) > 1]
    later: list[tuple[float, int, int, list[Row]]] = []
    at, number, written = float(BEGIN_AT), 0, 0
    while True:
        number += 1
        at += source.expovariate(JOBS_PER_S)
        job = source.choice(often if source.random() < REQUEUED_SHARE else once)
        for place, run in enumerate(job.again(source, number, at)):
            heapq.heappush(later, (float(run[0]["Submit"]), number, place, run))
        while later and later[0][0] <= at:
            for row in heapq.heappop(later)[3]:
                if written == count:
                    return
                yield row
                written += 1


def sacct(words: Sequence[str]) -> None:
    """As far as report and reportseff ask it."""
    if "--helpformat" in words:
        print((RECORDED / "helpformat.txt").read_text())
        return
    assert {"-D", "--duplicates"} & set(words), "without it sacct leaves out all runs but the last"
    given = dict(word.partition("=")[::2] for word in words)
    names = given["--format"].split(",")
    in_seconds = os.environ.get("SLURM_TIME_FORMAT") == "%s"
    folder = Path(os.environ["BENCH_FOLDER"])
    path = folder / f"rows-{len(names)}-{names[-1]}-{in_seconds}"
    if not path.exists():
        with path.with_suffix(".new").open("w") as stream:
            for row in rows(int(os.environ["BENCH_ROWS"])):
                told = [_told(row, name, in_seconds) for name in names]
                stream.write(MARK.join([*told, ""] if "--parsable" in words else told) + "\n")
        path.with_suffix(".new").rename(path)
    mark, delimiter = MARK.encode(), given["--delimiter"].encode()
    with path.open("rb") as stream, contextlib.suppress(BrokenPipeError):
        while chunk := stream.read(1 << 18):
            sys.stdout.buffer.write(chunk.replace(mark, delimiter))
    (folder / "sacct-cpu-s").write_text(f"{time.process_time()}")


def _told(row: Row, name: str, in_seconds: bool) -> str:
    value = row.get("ReqMem" if name == "REQMEM" else name, "")
    if in_seconds or name not in _STAMPS or not value[:1].isdigit():
        return value
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(float(value)))


def _recorded() -> list[Job]:
    from ftslurm.scheduler.job_table import known_fields

    columns = (RECORDED.parent / "sacct-columns.txt").read_text().split()
    names = known_fields((RECORDED / "helpformat.txt").read_text(), columns)
    assert names is not None
    jobs: dict[str, list[list[dict[str, str]]]] = {}
    for line in (RECORDED / "sacct.txt").read_text().splitlines():
        row = dict(zip(names, line.split("^|^")))
        number, dot, _ = row["JobID"].partition(".")
        runs = jobs.setdefault(number, [])
        if not dot:
            runs.append([])
        runs[-1].append(row)
    return [Job(runs) for runs in jobs.values() if _is_whole(runs)]


def _is_whole(runs: list[list[dict[str, str]]]) -> bool:
    return all(row["Submit"][:1].isdigit() for run in runs for row in run)


def _measured(row: Row, stretch: float, *, is_step: bool) -> dict[str, str]:
    """What was not recorded, and reportseff asks for."""
    elapsed_s = int(int(row["ElapsedRaw"] or 0) * stretch)
    found = _CPUS.search(row["AllocTRES"])
    cpus = int(found[1]) if found else 1
    told = {"ElapsedRaw": f"{elapsed_s}", "Elapsed": _clock(elapsed_s), "AllocCPUS": f"{cpus}",
            "TotalCPU": _clock(int(0.8 * elapsed_s * cpus))}  # fmt: skip
    more = {"MaxRSS": "81234K", "NTasks": "2"} if is_step else {"ReqMem": "4000M"}
    return {**told, **more}


def _clock(seconds: int) -> str:
    days, rest = divmod(seconds, 86_400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def _end(source: random.Random) -> dict[str, str]:
    """What is told of the last run in place of what was; mostly nothing."""
    drawn = source.random()
    for state, (code, share) in ENDS.items():
        if drawn < share:
            return {"State": state, "ExitCode": code}
        drawn -= share
    return {}


def _nodes(recorded: str, first: int) -> str:
    """`n[1-2]` and `n3`: as many, elsewhere."""
    if "[" in recorded:
        return f"n[{first}-{first + 1}]"
    return f"n{first}" if recorded.startswith("n") and recorded[1:].isdigit() else recorded


def _end_at(row: Row) -> float:
    """Of one that has not ended, when it was submitted."""
    return _at(row["End"] if row["End"][:1].isdigit() else row["Submit"])


@cache
def _at(stamp: str) -> float:
    return time.mktime(time.strptime(stamp, "%Y-%m-%dT%H:%M:%S"))
