"""Many jobs of accounting at once: sacct's table, read while it comes; what is known without it.

Whoever reads takes one run of one job after the other; the table is never held. Where accounting is
off or away, `scontrol show job` still knows the jobs of the last minutes (MinJobAge), by one run
each, and the caller has to say so.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Optional

from ftslurm.errors import SchedulerError, UsageError
from ftslurm.scheduler.job_table import (
    JobRun,
    Table,
    end_of,
    gpus_of,
    known_fields,
    new_delimiter,
    told,
    whole,
)
from ftslurm.scheduler.slurm import Runner, clean_environment, run_command
from ftslurm.scheduler.slurm_parse import at

ASK_S = 30.0
"""For a list of fields, or of the jobs that slurmctld knows."""

ANSWER_S = 120.0
"""For each row of the table: sacct sorts all of them before it prints the first."""
_TELLS_OF_PRIVATE_DATA = (24, 11)
_TIME_REFUSED = "Invalid time specification"
_TIMES_SWAPPED = "requested is after end time"
_NO_USER = "Invalid user id"

_SHOWN = re.compile(r"(?:^| )([A-Z][A-Za-z/:]*)=(\S*)")
_NAME = re.compile(
    r" JobName=(?P<name>.*?) UserId=(?P<user>\S+)\((?P<uid>\d+)\) GroupId=\S+\(\d+\)(?= |\Z)"
)


class NoAccounting(SchedulerError):
    """Accounting is off, away, or does not answer."""


@dataclass(frozen=True)
class Query:
    """Which jobs. `since` and `until` as sacct takes them (`now-7days`, `2026-11-30T10:00:00`);
    with `jobs`, all that ever had these numbers."""

    since: str = "now-7days"
    until: str = "now"
    user: str = ""
    """Of one user; empty: of all (a site may show a user only his own)."""
    jobs: tuple[str, ...] = ()
    answer_s: float = ANSWER_S
    """So long sacct may be silent."""


@contextmanager
def open_table(query: Query, *, run: Runner = run_command) -> Iterator[tuple[Table, Iterator[str]]]:
    """The table and its lines; NoAccounting when there is none, also in the midst of it; UsageError
    when sacct does not understand `since` or `until`."""
    names = _fields(run)
    delimiter = new_delimiter()
    argv = ["sacct", "--duplicates", "--noheader", "--parsable2", f"--delimiter={delimiter}",
            *_filters(query), f"--format={','.join(names)}"]  # fmt: skip
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said,
            env=clean_environment(), encoding="utf-8", errors="replace",
        )  # fmt: skip
        assert process.stdout is not None
        watch = _Watch(process, query.answer_s)
        try:
            yield Table(names, delimiter), watch.lines(process.stdout)
            with watch.waiting():
                code = process.wait()
            if watch.is_late:
                raise NoAccounting(_why(f"it was silent for {query.answer_s:g} s"))
            if code != 0:
                said.seek(0)
                raise _error(said.read(65_536).decode(errors="replace"), query)
        finally:
            watch.ends()
            process.kill()  # a reader that has had enough
            process.wait()
            process.stdout.close()


class _Watch:
    """Kills sacct when it was waited for too long; the time that the reader takes is its own."""

    def __init__(self, process: subprocess.Popen[str], answer_s: float) -> None:
        self.is_late = False
        self._process, self._answer_s = process, answer_s
        self._since: Optional[float] = None
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def lines(self, stream: Iterable[str]) -> Iterator[str]:
        lines = iter(stream)
        while True:
            self._since = time.monotonic()
            line = next(lines, None)
            self._since = None
            if line is None:
                return
            yield line

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._since = time.monotonic()
        yield
        self._since = None

    def ends(self) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(min(1.0, self._answer_s / 4)):
            since = self._since
            if since is not None and time.monotonic() - since > self._answer_s:
                self.is_late = True
                self._process.kill()
                return


def _error(said: str, query: Query) -> Exception:
    when = f"--since {query.since}, --until {query.until}"
    if query.user and _NO_USER in said:  # also a word of slurmctld's, of other things
        return UsageError(f"there is no user `{query.user}` here; see --user, and --all-users")
    if _TIMES_SWAPPED in said:
        return UsageError(f"there is no time between these two ({when}): --since has to be earlier")
    if _TIME_REFUSED in said:
        return UsageError(f"sacct takes no such time ({when}); {_TIMES}")
    return NoAccounting(_why(said))


def _fields(run: Runner) -> list[str]:
    done = run(["sacct", "--helpformat"], ASK_S)
    names = known_fields(done.stdout) if done.rc == 0 else None
    if names is None:
        raise NoAccounting(_why(done.stderr))
    return names


def _filters(query: Query) -> list[str]:
    if query.jobs:
        # With a start sacct leaves out what is older; without one some versions take midnight.
        return [f"--jobs={','.join(query.jobs)}", "--starttime=1970-01-02", "--endtime=now"]
    who = [f"--user={query.user}"] if query.user else ["--allusers"]
    return [*who, f"--starttime={query.since}", f"--endtime={query.until}"]


def _last_line(said: str) -> str:
    """The one that ended it, behind all that it tried."""
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it gave no reason"


def _why(said: str) -> str:
    told = _last_line(said)
    return f"sacct has no answer ({told}); see `scontrol show config | grep AccountingStorage`"


def sees_others(user: str, *, run: Runner = run_command) -> Optional[bool]:
    """Whether sacct tells `user` of everybody's jobs; None: nobody says. With PrivateData=jobs in
    slurmdbd.conf (that of slurm.conf is slurmctld's) it leaves others' out without a word, but for
    operators; a coordinator sees those of the account. sacctmgr tells of it as of 22.05 and 24.11;
    that of 26.05.5 prints `none` whatever is set (seen)."""
    of = ["sacctmgr", "--noheader", "--parsable2", "show"]
    shown = run([*of, "config"], ASK_S).stdout
    # sacctmgr's own come first, which are slurm.conf's; slurmdbd's last.
    words = re.findall(r"^PrivateData\s*=(.*)$", shown, re.MULTILINE)
    version = re.search(r"^SLURMDBD_VERSION\s*= (\d+)\.(\d+)", shown, re.MULTILINE)
    if not words or version is None:
        return None
    are_hidden = "jobs" in words[-1].strip().split(",")
    is_told = are_hidden or (int(version[1]), int(version[2])) <= _TELLS_OF_PRIVATE_DATA
    if is_told and not are_hidden:
        return True
    level = run([*of, "user", user, "format=AdminLevel"], ASK_S).stdout.strip()
    if level in ("Operator", "Administrator"):
        return True
    return False if is_told else None


def jobs_without_accounting(query: Query, *, run: Runner = run_command) -> list[JobRun]:
    """What slurmctld still knows, MinJobAge (300 s) after a job's end at most: the newest run of
    each job. SchedulerError when it does not answer either."""
    argv = ["scontrol", "--oneliner", "--all", "show", "job"]
    done = run(argv, ASK_S)
    if done.rc != 0 and "No jobs" not in done.stdout + done.stderr:
        raise SchedulerError(f"`{' '.join(argv)}` failed: {_last_line(done.stderr)}")
    runs = filter(None, map(parse_shown_job, done.stdout.splitlines()))
    wanted = set(query.jobs)
    return [
        one
        for one in runs
        if (not wanted or wanted & {one.job_id, one.raw_id, re.split(r"[_+]", one.job_id)[0]})
        and (not query.user or one.user == query.user)
    ]


def parse_shown_job(line: str) -> Optional[JobRun]:
    """A line of `scontrol -o show job`; None for any other."""
    name = _NAME.search(line)
    if not line.startswith("JobId=") or name is None:
        return None
    # Before the name and behind it, for a name may look like anything; the first of each key, for
    # so may a comment or a path, and those come last.
    shown: dict[str, str] = {}
    for key, value in _SHOWN.findall(line[: name.start()] + " " + line[name.end() :]):
        shown.setdefault(key, value)
    state, code, number = end_of(shown.get("JobState", ""), shown.get("ExitCode", ""))
    start_at, end_at = at(shown.get("StartTime", "")), at(shown.get("EndTime", ""))
    is_over = state not in ("RUNNING", "PENDING", "SUSPENDED", "CONFIGURING")
    return JobRun(
        job_id=_shown_id(shown),
        state=state,
        cancelled_by=None,
        code=code,
        signal=number,
        start_at=None if state == "PENDING" else start_at,
        end_at=end_at if is_over else None,
        failed_node=None,
        reason=told(shown.get("Reason", "")),
        restarts=whole(shown.get("Restarts", "")),
        raw_id=shown["JobId"],
        user=name["user"],
        uid=int(name["uid"]),
        account=shown.get("Account", ""),
        partition=shown.get("Partition", ""),
        name=name["name"],
        submit_at=at(shown.get("SubmitTime", "")),
        eligible_at=at(shown.get("EligibleTime", "")),
        elapsed_s=_elapsed_s(shown.get("RunTime", "")),
        num_nodes=whole(shown.get("NumNodes", "").partition("-")[0]) or 0,
        nodes=told(shown.get("NodeList", "")),
        gpus=gpus_of(shown.get("AllocTRES") or shown.get("TRES") or ""),
    )


def _shown_id(shown: Mapping[str, str]) -> str:
    """As sacct writes it: tasks that wait as a range, parts of a het job by their offset."""
    array, task = shown.get("ArrayJobId", ""), shown.get("ArrayTaskId", "")
    if array and task:
        return f"{array}_{task}" if task.isdigit() else f"{array}_[{task}]"
    het, offset = shown.get("HetJobId", ""), shown.get("HetJobOffset", "")
    return f"{het}+{offset}" if het and offset else shown["JobId"]


def _elapsed_s(text: str) -> float:
    """`1-02:03:04`"""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        return 0.0
    hours, minutes, seconds = map(int, parts)
    return float(((whole(days) or 0) * 24 + hours) * 3600 + minutes * 60 + seconds)


_AGO = re.compile(r"(\d{1,6})([mhdw])\Z")
_AGO_WORDS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGO_TOLD = re.compile(r"now(?:-(\d{1,6})(minutes|hours|days|weeks))?")
_AGO_S = {"minutes": 60.0, "hours": 3600.0, "days": 86_400.0, "weeks": 604_800.0}
_TIMES = "write 7d, 12h, 2026-11-30 or 2026-11-30T08:00:00"
_WHEN = re.compile(r"[0-9A-Za-z:./+-]{1,40}\Z")


def sacct_time(text: str) -> str:
    """`7d` as `now-7days`; what sacct understands itself is left to it. UsageError for neither."""
    ago = _AGO.match(text)
    if ago is not None:
        return f"now-{ago[1]}{_AGO_WORDS[ago[2]]}"
    if not _WHEN.match(text):
        raise UsageError(f"`{text}` is no time; {_TIMES}")
    return text


def when_at(text: str, now: float) -> Optional[float]:
    """What `sacct_time` gave, in UTC seconds; None for the words that only sacct understands."""
    ago = _AGO_TOLD.fullmatch(text)
    if ago is not None:
        return now - int(ago[1] or 0) * _AGO_S[ago[2] or "minutes"]
    for form in ("%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"):
        with suppress(ValueError, OverflowError):
            return time.mktime(time.strptime(text, form))
    return None
