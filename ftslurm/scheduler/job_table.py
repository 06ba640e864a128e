"""sacct's table, line by line: one value for each run of a job, with its steps.

Pure: lines in, values out, as many at a time as one run of one job has. A row that cannot be read
is left out and counted; nothing a user has written (job names hold `|`, newlines, anything) can
shift a column or make a row of its own, as long as the delimiter was drawn by `new_delimiter`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Optional

from ftslurm.scheduler.slurm_parse import at

FIELDS = (
    "JobID", "JobIDRaw", "Cluster", "User", "UID", "Account", "Partition", "State", "ExitCode",
    "Submit", "Eligible", "Start", "End", "ElapsedRaw", "NNodes", "NodeList", "AllocTRES", "Reason",
    "FailedNode", "Restarts", "JobName",
)  # fmt: skip
"""FailedNode is of 23.02, Restarts of 24.11. JobName last: it may hold anything."""
_OF_STEP = ("JobID", "State", "ExitCode", "End", "JobName")
NEEDED = frozenset({"JobID", "State", "ExitCode"})

_CODE = re.compile(r"(\d+):(\d+)")
_GPUS = re.compile(r"(?:^|,)gres/gpu(:[^=,]+)?=(\d+)")
_NOTHING = ("", "None", "Unknown", "(null)", "N/A")


@dataclass(frozen=True)
class StepRow:
    step_id: str
    """`118.0`, `118.batch`"""
    state: str
    code: Optional[int]
    signal: Optional[int]
    end_at: Optional[float]
    name: str = ""


@dataclass
class JobRun:
    """One run of a job: from a start, or a wait for it, to its end or requeue. What Slurm does not
    say, or was not asked, is None or empty."""

    job_id: str
    """`118`, `70_1`, `70_[3-9%2]` for tasks that wait, `12+1` for a part of a het job."""
    state: str
    """First word, e.g. CANCELLED; REQUEUED and PREEMPTED end a run, not the job."""
    cancelled_by: Optional[int]
    """User id; None: it was not cancelled, or Slurm does not say by whom."""
    code: Optional[int]
    """Of the batch script. None: not known. Below 25.11 a code of 128 or more is printed less 128.
    """
    signal: Optional[int]
    start_at: Optional[float]
    end_at: Optional[float]
    failed_node: Optional[str]
    reason: str
    """Why it waited before this run: no reason for its end."""
    restarts: Optional[int]
    steps: list[StepRow] = field(default_factory=list)
    raw_id: str = ""
    cluster: str = ""
    user: str = ""
    uid: Optional[int] = None
    account: str = ""
    partition: str = ""
    name: str = ""
    submit_at: Optional[float] = None
    eligible_at: Optional[float] = None
    elapsed_s: float = 0.0
    num_nodes: int = 0
    nodes: str = ""
    """A host list."""
    gpus: int = 0
    more_node_s: float = 0.0
    """What it used before it was resized, beyond `elapsed_s` on the `num_nodes` of now."""
    more_gpu_s: float = 0.0


def new_delimiter() -> str:
    """One that nobody could put into a job's name beforehand."""
    return f"^|{os.urandom(4).hex()}|^"


def known_fields(helpformat: str, wanted: Sequence[str] = FIELDS) -> Optional[list[str]]:
    """Those of `wanted` that this sacct has; None where it is no list of fields."""
    known = set(helpformat.split())
    return [name for name in wanted if name in known] if known >= NEEDED else None


class Table:
    """The runs of a table. `left_out`: rows that could not be read, so far."""

    def __init__(self, names: Sequence[str], delimiter: str) -> None:
        self._names, self._delimiter = list(names), delimiter
        places = {name: place for place, name in enumerate(names)}
        # A field that this sacct lacks is the empty one behind the others.
        self._job_id = places.get("JobID", len(names))
        self._of_run = itemgetter(*(places.get(name, len(names)) for name in FIELDS))
        self._of_step = itemgetter(*(places.get(name, len(names)) for name in _OF_STEP))
        self.left_out = 0

    def runs(self, lines: Iterable[str]) -> Iterator[JobRun]:
        """In the order of the table; a run comes when its steps have. A step whose job is not above
        it is left out and counted: it would accuse another."""
        run: Optional[JobRun] = None
        its_steps = ""
        job_id, of_step, of_run = self._job_id, self._of_step, self._of_run
        for row in self._rows(lines):
            if "." in row[job_id] and "[" not in row[job_id]:  # 72_[1,3,...] waits
                if run is not None and row[job_id].startswith(its_steps):
                    run.steps.append(_step(of_step(row)))
                else:
                    self.left_out += 1
                continue
            following = _run(of_run(row))
            if run is not None and run.state == "RESIZING" and run.job_id == following.job_id:
                run = resized(run, following)
                continue
            if run is not None:
                yield run
            run, its_steps = following, f"{following.job_id}."
        if run is not None:
            yield run

    def _rows(self, lines: Iterable[str]) -> Iterator[list[str]]:
        """Each with an empty value behind it."""
        width, delimiter = len(self._names), self._delimiter
        has_name = self._names[-1] == "JobName"
        last: Optional[list[str]] = None
        for line in lines:
            values = line.rstrip("\n").split(delimiter)
            if len(values) > width and has_name:
                values[width - 1 :] = [delimiter.join(values[width - 1 :])]
            if len(values) == width and values[0]:
                if last is not None:
                    yield last
                values.append("")
                last = values
            elif last is not None and has_name and len(values) == 1:
                last[-2] += "\n" + line.rstrip("\n")  # the rest of a name with a newline in it
            elif line.strip():
                self.left_out += 1
        if last is not None:
            yield last


def _run(values: Sequence[str]) -> JobRun:
    """`values` in the order of FIELDS."""
    (job_id, raw_id, cluster, user, uid, account, partition, words, exit_code, submit, eligible,
     start, end, elapsed, num_nodes, nodes, tres, reason, failed_node, restarts,
     name) = values  # fmt: skip
    state, code, number = end_of(words, exit_code)
    return JobRun(
        job_id=job_id,
        state=state,
        cancelled_by=whole(words.partition(" by ")[2]),
        code=code,
        signal=number,
        start_at=at(start),
        end_at=at(end),
        failed_node=told(failed_node) or None,
        reason=told(reason),
        restarts=whole(restarts),
        raw_id=raw_id,
        cluster=cluster,
        user=user,
        uid=whole(uid),
        account=account,
        partition=partition,
        name=name,
        submit_at=at(submit),
        eligible_at=at(eligible),
        elapsed_s=float(whole(elapsed) or 0),
        num_nodes=whole(num_nodes) or 0,
        nodes=told(nodes),
        gpus=gpus_of(tres),
    )


def resized(before: JobRun, after: JobRun) -> JobRun:
    """A job that lost a node, or gave it back, goes on under a second row: still the same run. That
    row's Submit and Eligible are the moment of the resize (as_mysql_job.c), and so is its Start; on
    22.05 its Start and Elapsed are those of the whole job once that has ended (seen)."""
    if before.end_at is not None and after.start_at is not None:
        after.elapsed_s = max(0.0, after.elapsed_s - max(0.0, before.end_at - after.start_at))
    after.steps, after.start_at = before.steps + after.steps, before.start_at or after.start_at
    after.submit_at, after.eligible_at = before.submit_at, before.eligible_at
    spent_s = before.elapsed_s
    after.more_node_s = before.more_node_s + spent_s * (before.num_nodes - after.num_nodes)
    after.more_gpu_s = before.more_gpu_s + spent_s * (before.gpus - after.gpus)
    after.nodes = ",".join(dict.fromkeys(filter(None, (before.nodes, after.nodes))))
    after.elapsed_s += spent_s
    after.failed_node = after.failed_node or before.failed_node
    return after


def _step(values: Sequence[str]) -> StepRow:
    """`values` in the order of _OF_STEP."""
    step_id, words, exit_code, end, name = values
    state, code, number = end_of(words, exit_code)
    return StepRow(step_id, state, code, number, at(end), name)


@lru_cache(maxsize=4096)
def end_of(words: str, exit_code: str) -> tuple[str, Optional[int], Optional[int]]:
    """State, exit code and signal."""
    state = (words.split() or [""])[0]
    found = _CODE.fullmatch(exit_code)
    code, number = (int(found[1]), int(found[2])) if found else (None, None)
    # Of a job that runs, and for some seconds after slurmdbd has come back (seen), 0:0 is no code.
    if state in ("RUNNING", "PENDING", "RESIZING") or (state == "FAILED" and not (code or number)):
        code = number = None
    return state, code, number


@lru_cache(maxsize=4096)
def gpus_of(tres: str) -> int:
    """`gres/gpu=8` counts all; where only kinds are named (`gres/gpu:h100=8`), their sum."""
    found = _GPUS.findall(tres)
    whole = [int(count) for kind, count in found if not kind]
    return whole[0] if whole else sum(int(count) for _, count in found)


def whole(text: str) -> Optional[int]:
    return int(text) if text.isascii() and text.isdigit() else None


def told(value: str) -> str:
    return "" if value.strip() in _NOTHING or "assigned" in value else value.strip()
