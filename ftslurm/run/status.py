"""`ftslurm status RUN`: where a run stands and what happened to it, attempt by attempt.

Reads the run directory and writes nothing, so that it may be asked at any time from anywhere. Slurm
is asked one thing only, and only where the run waits or has just begun: whether its job is held,
which no time mends.
What else only Slurm knows is not guessed. `--json` carries every number that is printed, the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Optional

from ftslurm.errors import EXIT_OK, UsageError
from ftslurm.run.attempt_story import AttemptStory
from ftslurm.run.layout import RunLayout
from ftslurm.run.story import RunStory, queued_words, read_story
from ftslurm.run.sweep_layout import RUNS, SweepLayout, find_sweep, place_of_run
from ftslurm.run.timeline import ASKED, LAST_WORD, Timeline
from ftslurm.run.wording import format_count, format_span

if TYPE_CHECKING:
    from ftslurm.operate.held import Held
    from ftslurm.run.trained_twice import Twice

WAITING = ("never started", "waiting", "quiet")
"""States of a run whose job may be in the queue."""
TRACEBACK_LINES = 8
TWICE_ROWS = 20_000
"""Of traces: some tenths of a second."""

_EPILOG = """examples:
  ftslurm status                                              the newest runs and sweeps of ./runs
  ftslurm status runs/gpt-20260301-120000-3f9a                where it stands, each attempt
  ftslurm status runs/gpt-20260301-120000-3f9a --attempt 3    all that is on record of one
  ftslurm status runs/SWEEP                                   its tasks, and what they came to
  ftslurm status runs/SWEEP --all --json"""

PART_WORDS = {
    "detected": "detected",
    "gone": "ranks gone",
    "decided": "decided",
    "launched": "next srun",
    "restored": "restored",
    "first_step": "first step",
}


def main(argv: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ftslurm status",
        description="Where a run stands and what happened to it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run",
        metavar="RUN|SWEEP",
        nargs="?",
        help="directory of a run or a sweep, or its id under ./runs; a task is a run. Without it: "
        "the newest of ./runs, a line each",
    )
    parser.add_argument("--json", action="store_true", help="for programs; schema_version 1")
    parser.add_argument(
        "--attempt", type=int, metavar="N", help="all that is on record of one attempt"
    )
    parser.add_argument(
        "--all", action="store_true", help="of a large sweep: each task, also those that are done"
    )
    options = parser.parse_args(argv)
    if options.run is None:
        return _list(options)
    sweep = find_sweep(options.run)
    if sweep is not None:
        return _sweep(sweep, options)
    layout, now = RunLayout(place_of_run(options.run)), time.time()
    story = read_story(layout, now=now)
    if options.attempt is not None:
        print(_one_attempt(layout, story, options.attempt, as_json=options.json))  # noqa: T201
        return EXIT_OK
    held = _held(layout, story)
    twice = _twice(layout, story)
    if options.json:
        told = None if held is None else dataclasses.asdict(held)
        again = None if twice is None else dataclasses.asdict(twice)
        print(_json({**dataclasses.asdict(story), "held": told, "twice": again}))  # noqa: T201
    else:
        print(render_story(story, now=now, held=held.sentence if held else ""))  # noqa: T201
        if twice is not None and twice.differ:
            print(twice.sentence)  # noqa: T201
    return EXIT_OK


def _list(options: argparse.Namespace) -> int:
    from ftslurm.run.listing import as_record, list_runs, render_list  # late: seldom asked for

    if options.attempt is not None or options.all:
        raise UsageError("--attempt and --all are of one run or sweep; name it")
    now = time.time()
    listed = list_runs(RUNS, now=now)
    text = _json(as_record(RUNS, listed)) if options.json else render_list(RUNS, listed, now=now)
    print(text)  # noqa: T201
    return EXIT_OK


def _sweep(sweep: SweepLayout, options: argparse.Namespace) -> int:
    from ftslurm.operate.sweep_status import status_of_sweep  # late: a run is what is mostly asked

    if options.attempt is not None:
        raise UsageError("--attempt is of one run; name a task of the sweep")
    print(status_of_sweep(sweep, as_json=options.json, show_all=options.all))  # noqa: T201
    return EXIT_OK


def _twice(layout: RunLayout, story: RunStory) -> Optional[Twice]:
    if not story.steps_lost:
        return None
    from ftslurm.run.trained_twice import read_twice  # late: mostly, nothing was lost

    return read_twice(layout, most=TWICE_ROWS)


def _held(layout: RunLayout, story: RunStory) -> Optional[Held]:
    newest = story.attempts[-1] if story.attempts else None
    # The batch script begins when the prolog of its own node has ended; that of another node may
    # fail after it (seen), and the attempt that was claimed never trains.
    has_trained = newest is None or newest.last_step or story.program
    if story.state not in WAITING and (story.state != "running" or has_trained):
        return None
    from ftslurm.operate.held import look_for_hold  # late: a run mostly trains, or is over

    return look_for_hold(layout.root)


def _one_attempt(layout: RunLayout, story: RunStory, number: int, *, as_json: bool) -> str:
    from ftslurm.run.account import read_account, render_account  # late: seldom asked for

    account = read_account(layout, number)
    (attempt,) = [item for item in story.attempts if item.number == number]
    if as_json:
        return _json({**dataclasses.asdict(attempt), **dataclasses.asdict(account)})
    return "\n".join([*attempt_lines(attempt), *failure_lines(attempt), *render_account(account)])


def _json(record: dict[str, object]) -> str:
    return json.dumps({"schema_version": 1, **record}, indent=1, sort_keys=True)


def render_story(story: RunStory, *, now: float, held: str = "") -> str:
    lines = [f"{story.run_id}: {_headline(story, now)}"]
    if held:
        lines.append(f"held: {held}")
    if story.storage:
        lines.append(f"storage: {story.storage}")
    lines.extend(_program_lines(story) if story.program else _training_lines(story))
    lines.extend(f"excluded node {node}: {why}" for node, why in story.excluded.items())
    if story.excluded:
        lines.append("`ftslurm resume RUN --readmit NODE` has the run use such a node again")
    lines.extend(f"quarantined {item.name}: {item.reason}" for item in story.put_aside)
    hidden = len(story.quarantined) - len(story.put_aside)
    if hidden:
        lines.append(f"quarantined before: {hidden} more")
    if story.state == "stopped" and story.attempts:
        lines.extend(failure_lines(story.attempts[-1], last=TRACEBACK_LINES))
    return "\n".join(lines)


def _training_lines(story: RunStory) -> Iterator[str]:
    committed = "nothing committed yet"
    if story.committed_step is not None:
        kept = ", ".join(str(step) for step in story.committed_steps[-5:])
        committed = f"newest committed step {story.committed_step} (kept: {kept})"
    yield f"step {story.last_step or 0} of {story.steps}, {committed}"
    if story.loss is not None:
        speed = f", {story.tokens_per_s:.0f} tokens/s" if story.tokens_per_s else ""
        yield f"loss {story.loss:.4f}{speed}"
    pace = next((one.pace for one in reversed(story.attempts) if one.pace), None)
    if pace is not None:
        yield pace_line(pace)
    for attempt in story.attempts:
        yield from attempt_lines(attempt)
    tokens = f" ({story.tokens_lost:,} tokens)" if story.tokens_lost else ""
    yield f"{_attempts(story)}, {story.steps_lost} steps{tokens} trained twice"


def pace_line(pace: dict[str, Any]) -> str:
    """How the interval between saves was last chosen (`checkpoint.interval: auto`)."""
    limits = {"lag": ", no sooner than the last save is durable", "least": ", the least there is",
              "most": ", the most there is"}  # fmt: skip
    seen = (
        f"{pace['failures']} failures in {pace['gpu_hours']:.4g} GPU-hours of {pace['runs']} runs"
    )
    return (
        f"saves every {format_span(pace['interval_s'])}{limits.get(pace['limit'], '')}: "
        f"a save costs {pace['stall_s']:.2g} s and is durable after {pace['lag_s']:.2g} s, "
        f"a failure is due every {format_span(pace['mtbf_s'])} on {pace['gpus']} GPUs ({seen})"
    )


def _program_lines(story: RunStory) -> Iterator[str]:
    """What is known of a program: how its attempts ended."""
    yield f"program: {shlex.join(story.program)}"
    for attempt in story.attempts:
        yield f"  {_attempt_name(attempt)}: {attempt.ended}{_asked(attempt)}"
        yield from _after_lines(attempt, until="launched")
    yield _attempts(story)


def attempt_lines(attempt: AttemptStory) -> Iterator[str]:
    lost = ""
    if attempt.steps_lost:
        tokens = f" ({attempt.tokens_lost:,} tokens)" if attempt.tokens_lost else ""
        lost = f", {attempt.steps_lost} steps{tokens} lost"
    how = f"{attempt.ended}{_asked(attempt)}{lost}"
    yield f"  {_attempt_name(attempt)}: {_way(attempt)}, {how}"
    yield from _after_lines(attempt)


def _way(attempt: AttemptStory) -> str:
    if attempt.last_step is None:
        return "no step"
    return f"from step {attempt.restored_step or 0} to step {attempt.last_step}"


def failure_lines(attempt: AttemptStory, *, last: Optional[int] = None) -> Iterator[str]:
    """The rank that failed first, in its own words; `last`: so many lines of them."""
    failure = attempt.first_failure
    if failure is None:
        return
    where = "" if failure.step is None else f" at step {failure.step}"
    yield (
        f"attempt {attempt.number}: rank {failure.rank} on {failure.node or 'an unknown node'} "
        f"failed first{where}: {failure.error.splitlines()[0] if failure.error else 'unknown'}"
    )
    lines = failure.traceback if last is None else failure.traceback[-last:]
    yield from (f"    {line}" for line in lines)
    if failure.file:
        yield f"  all of it: {failure.file}"


def _after_lines(attempt: AttemptStory, *, until: str = "first_step") -> Iterator[str]:
    """`until`: the last moment that this kind of run has; a program's steps nobody knows."""
    if attempt.action:
        yield f"    {attempt.action}: {attempt.reason}"
    cause = _cause_words(attempt)
    if cause:
        yield f"    {cause}"
    for finding in attempt.findings:
        yield f"    agents: {finding.get('kind')}: {finding.get('why')}"
    # Between an order to leave and the next attempt lies what a person did.
    back = "" if attempt.order else _way_back(attempt.timeline, until)
    if back:
        yield f"    {back}"
    if attempt.late is not None:
        yield (
            f"    a leftover of it still wrote ({', '.join(attempt.late.kinds)}) "
            f"{attempt.late.after_s:.1f} s after the next attempt had begun"
        )


def _cause_words(attempt: AttemptStory) -> str:
    """Nothing for an attempt that was decided on without looking for a cause."""
    if attempt.cause is None or attempt.confidence is None:
        return ""
    words = f"cause {attempt.cause} ({attempt.confidence:.0%})"
    blamed = attempt.blamed or {}
    named = [f"{kind} {blamed[kind]}" for kind in ("node", "gpu", "rank")
             if blamed.get(kind) is not None]  # fmt: skip
    if named:
        words += f", blamed: {', '.join(named)}"
    if attempt.evidence:
        first = attempt.evidence[0]
        place = first.get("file") or ""
        line = f":{first['line']}" if first.get("line") else ""
        words += f"; {place}{line}: {str(first.get('text', '')).strip()}" if place else ""
    return words


def _way_back(line: Timeline, until: str) -> str:
    """One line: how long it took and where the time went; what is unknown is said to be."""
    if line.launched is None:
        return ""
    shown = list(PART_WORDS)[: list(PART_WORDS).index(until) + 1]
    seconds = {name: line.parts.get(name) for name in shown}
    parts = [
        f"{PART_WORDS[name]} {'unknown' if span is None else f'+{span:.1f}'}"
        for name, span in seconds.items()
    ]
    total = line.rto_s
    if until != "first_step":
        total = None if line.failed is None else sum(filter(None, seconds.values()))
    known = {LAST_WORD: "last step on record", ASKED: "asked to leave"}
    begin = known.get(line.failed_by, "failure")
    end = "first new step" if until == "first_step" else PART_WORDS[until]
    took = "unknown" if total is None else f"{total:.1f} s"
    return f"{begin} to {end} {took}: {', '.join(parts)}"


# By what a last save's time was told (run/deadline.py).
_BY = {
    "preempted": "the grace",
    "time_limit": "the time limit",
    "ending": "the job is being ended",
    "agents": "a slow node is given up",
    "submit": "as at submit",
}


def _asked(attempt: AttemptStory) -> str:
    """Who asked it to leave."""
    if attempt.order:
        return f" by the order `{attempt.order}`"
    if not attempt.signal:
        return ""
    had = ""
    if attempt.deadline:
        left_s, by = max(0.0, attempt.deadline["left_s"]), attempt.deadline["by"]
        had = f", {left_s:.0f} s for the save ({_BY.get(by, by)})"
    return f" on {attempt.signal}{had}"


def _attempts(story: RunStory) -> str:
    return format_count(len(story.attempts), "attempt")


def _attempt_name(attempt: AttemptStory) -> str:
    restart = f" restart {attempt.restart_count}" if attempt.restart_count else ""
    return f"attempt {attempt.number} (job {attempt.job_id}{restart}, {','.join(attempt.nodes)})"


def _headline(story: RunStory, now: float) -> str:
    if queued := queued_words(story, now):
        return f"{story.state}; {queued}"
    if story.last_sign_at is None or story.state in ("done", "never started"):
        return story.state
    return f"{story.state}, last sign {format_span(now - story.last_sign_at)} ago"
