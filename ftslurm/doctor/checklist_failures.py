"""The questions of the checklist on failures: what was practised and what came of it.

Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable, Optional

from ftslurm.diagnosis.causes import CODE, NETWORK_TRANSIENT, NODE, PREEMPTED
from ftslurm.doctor.answer import Answer, Asked, known, newest, partly, unknown
from ftslurm.doctor.line import OK
from ftslurm.doctor.run_history import PastRun
from ftslurm.recovery.actions import STOP
from ftslurm.recovery.policy import CAUSE_ASKED
from ftslurm.run.attempt_records import ASKED_TO_LEAVE
from ftslurm.run.attempt_story import AttemptStory
from ftslurm.run.wording import format_count

_KILL = "end one rank of a run with KILL"
_ON_ITS_OWN = ("slurm.prolog", "slurm.epilog", "slurm.health_check")


@dataclass(frozen=True)
class End:
    """An attempt that ended otherwise than by finishing, and whether the next one trained."""

    run: PastRun
    attempt: AttemptStory
    recovered: bool


def _ends(runs: Sequence[PastRun]) -> list[End]:
    return [
        End(run, one, one.timeline.first_step is not None)
        for run in runs
        for one in run.attempts
        if one.ended not in ("finished", "running")
    ]


def _was_failure(end: End) -> bool:
    is_asked = end.attempt.cause in ASKED_TO_LEAVE
    return end.attempt.ended in ("failed", "killed") and not is_asked


def _last(ends: Sequence[End]) -> Optional[End]:
    return newest(ends, lambda end: end.attempt.claimed_at)


def recovery_unit(asked: Asked) -> Answer:
    question = "what is restarted after a failure (rank, group, job) is known and was seen"
    last = _last([end for end in _ends(asked.runs) if _was_failure(end) and end.recovered])
    if last is None:
        return unknown(question, "no run on record failed and trained on", _KILL)
    one = last.attempt
    seen = (
        f"all ranks, within the job where its nodes serve: attempt {one.number} of run"
        f" {last.run.name} ended with {one.cause or 'no cause on record'}, the next one trained on"
        f"{_in_time(one)}"
    )
    return known(question, seen, one.claimed_at)


def _in_time(one: AttemptStory) -> str:
    rto_s = one.timeline.rto_s
    return f" {rto_s:.1f} s after the failure" if rto_s is not None else ""


def isolation(asked: Asked) -> Answer:
    question = "sick nodes are set aside by themselves, errors of the user are not tried for ever"
    excluded = [End(run, one, True) for run in asked.runs for one in run.attempts if one.exclude]
    stopped = [end for end in _ends(asked.runs)
               if end.attempt.cause == CODE and end.attempt.action == STOP]  # fmt: skip
    node, code = _last(excluded), _last(stopped)
    lines = asked.slurm or {}
    own = [name for name in _ON_ITS_OWN if name in lines and lines[name].state == OK]
    parts, todo = [], []
    if node is not None:
        names = ", ".join(node.attempt.exclude)
        parts.append(f"run {node.run.name} kept off {names} after attempt {node.attempt.number}")
    else:
        parts.append("no run on record had to keep off a node")
        todo.append("cut a node off during a run")
    if code is not None:
        parts.append(f"run {code.run.name} stopped for a person: {code.attempt.reason}")
    else:
        parts.append("no run on record stopped over an error of its program")
        todo.append("submit a loop that raises")
    if lines:
        parts.append(
            f"of Prolog, Epilog and HealthCheckProgram {len(own)} run ours for XIDs and links"
        )
        todo += [lines[name].todo for name in _ON_ITS_OWN if name in lines and lines[name].todo][:1]
    else:
        parts.append("whether nodes look for XIDs and links, Slurm was not asked")
        todo.append("ask where Slurm's commands are")
    at = max((end.attempt.claimed_at or 0.0 for end in (node, code) if end), default=0.0)
    if node is None and code is None and not own:
        return unknown(question, "; ".join(parts), "; ".join(todo))
    if todo:
        return partly(question, "; ".join(parts), "; ".join(todo), at or None)
    return known(question, "; ".join(parts), at or None)


def _is_preempted(end: End) -> bool:
    asked_by = getattr(end.attempt, "asked_by", None)
    return end.attempt.cause == PREEMPTED or asked_by == PREEMPTED


def _is_killed(end: End) -> bool:
    first = end.attempt.first_failure
    words = f"{first.error if first else ''} {end.attempt.reason}".lower()
    return end.attempt.ended == "killed" or "killed" in words or "sigkill" in words


def _found(*kinds: str) -> Callable[[End], bool]:
    return lambda end: any(one.get("kind") in kinds for one in end.attempt.findings)


_PRACTICE: tuple[tuple[str, Callable[[End], bool], str], ...] = (
    ("preemption", _is_preempted, "have a job of a higher partition take its nodes"),
    ("kill", _is_killed, _KILL),
    (
        "lost node",
        lambda end: end.attempt.cause == NODE or _found("node_lost")(end),
        "power a node off during a run",
    ),
    (
        "network",
        lambda end: end.attempt.cause == NETWORK_TRANSIENT or _found("leader_lost")(end),
        "cut a node's network during a run",
    ),
)


def practised(asked: Asked) -> Answer:
    question = "practised: preemption, kill, lost node, network, bad checkpoint"
    ends = [end for end in _ends(asked.runs) if end.recovered]
    parts, todo, times = [], [], []
    for what, is_it, how in _PRACTICE:
        last = _last([end for end in ends if is_it(end)])
        if last is None:
            parts.append(f"{what}: never on record")
            todo.append(how)
            continue
        at = last.attempt.claimed_at or 0.0
        times.append(at)
        parts.append(f"{what}: run {last.run.name}, attempt {last.attempt.number}, it trained on")
    asked_to = _last([end for end in ends if end.attempt.cause == CAUSE_ASKED])
    if asked_to is not None and "preemption: never" in parts[0]:
        parts[0] += f", but run {asked_to.run.name} was asked by signal to leave, and trained on"
    bad = newest([(at, run) for run in asked.runs for at, _ in run.fallbacks], lambda row: row[0])
    if bad is None:
        parts.append("bad checkpoint: never on record")
        todo.append("change a byte of the newest step of a copy and resume it")
    else:
        times.append(bad[0])
        parts.append(f"bad checkpoint: run {bad[1].name} passed over one")
    if len(todo) == len(_PRACTICE) + 1:
        return unknown(question, "; ".join(parts), "; ".join(todo))
    # The oldest of what was practised says how old the whole is.
    oldest = min(times, default=0.0) or None
    if todo:
        return partly(question, "; ".join(parts), "; ".join(todo), oldest)
    return known(question, "; ".join(parts), oldest)


def figures(asked: Asked) -> Answer:
    question = "recorded: MTTD, RPO, RTO, lost steps, time in the queue, share of recoveries"
    ends = [end for end in _ends(asked.runs) if _was_failure(end)]
    last = _last(ends)
    if last is None:
        return unknown(question, "no run on record failed, so there is nothing to measure", _KILL)
    followed = [end for end in ends if end is not last or end.recovered]
    rto = [end.attempt.timeline.rto_s for end in ends]
    mttd = [end.attempt.timeline.mttd_s for end in ends]
    waits = [run.wait_s for run in asked.runs]
    parts = [
        _middle("MTTD", mttd),
        _middle("RTO", rto),
        f"RPO {max(end.attempt.steps_lost for end in ends)} steps at most,"
        f" {sum(end.attempt.steps_lost for end in ends)} lost in all",
        _middle("time in the queue before the first attempt", waits),
        f"{sum(end.recovered for end in ends)} of {len(followed)} failed attempts were followed by"
        " one that trained",
    ]
    of = f"{format_count(len(ends), 'failure')} in {format_count(len(asked.runs), 'run')}"
    told = f"{of}: {'; '.join(parts)}"
    lacks = not any(one is not None for one in rto) or not any(one is not None for one in mttd)
    if lacks:
        todo = "node agents (recovery.agents) see when a rank ends; `ftslurm report` has more"
        return partly(question, told, todo, last.attempt.claimed_at)
    return known(question, told, last.attempt.claimed_at)


def _middle(what: str, values: Sequence[Optional[float]]) -> str:
    there = [one for one in values if one is not None]
    if not there:
        return f"{what} not known"
    return f"{what} {statistics.median(there):.1f} s in the middle, {max(there):.1f} s at most"


def monitored(asked: Asked) -> Answer:
    question = "watched: age of the newest checkpoint, queue of saves, fallbacks"
    wanted = [run for run in asked.runs if run.metrics_file]
    last = newest(wanted, lambda run: run.metrics_at)
    how = "set recovery.metrics_dir to the folder of node_exporter's textfile collector"
    if last is None and wanted:
        seen = f"run {wanted[0].name} was to write {wanted[0].metrics_file}, which is not here"
        return unknown(question, seen, "look on the node that runs the batch loop")
    if last is None:
        return unknown(question, "no run on record writes metrics", how)
    seen = (
        f"run {last.name} keeps {last.metrics_file}; whether anybody is alerted by it, no record"
        " tells"
    )
    todo = "have your monitoring load the alert rules, and see one of them fire"
    return partly(question, seen, todo, last.metrics_at)


def attempts_traced(asked: Asked) -> Answer:
    question = "each attempt can be traced: nodes, ranks, errors, checkpoint"
    rows = [(run, one) for run in asked.runs for one in run.attempts]
    last = newest(rows, lambda row: row[1].claimed_at)
    if last is None:
        return unknown(question, "no attempt is on record", "submit a short run")
    lacking = [
        f"{run.name} attempt {one.number}" for run, one in rows
        if not one.nodes or (one.ended == "failed" and not (one.reason or one.first_failure))
    ]  # fmt: skip
    told = f"{len(rows)} attempts of {len(asked.runs)} runs"
    if lacking:
        todo = "their records were cut short; `ftslurm status RUN` tells what is left"
        seen = f"of {told}, {len(lacking)} lack nodes or a reason, e.g. {lacking[0]}"
        return partly(question, seen, todo, last[1].claimed_at)
    seen = f"{told}: all name their nodes, those that failed say why (`ftslurm status RUN`)"
    return known(question, seen, last[1].claimed_at)
