"""What an attempt left in the run directory, read into the values the policy decides on.

Reads only; a record that a crash left torn counts as absent, never as a reason to fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Optional

from ftslurm.checkpoint.published import published_steps
from ftslurm.errors import FormatError
from ftslurm.files import is_listed, read_json
from ftslurm.program.progress import has_progressed, progressed_between
from ftslurm.recovery.policy import CAUSE_FAILED, Evidence, PastAttempt, RankFailure
from ftslurm.run.attempts import Outcome, claimed_numbers, read_attempt, read_events, read_outcome
from ftslurm.run.control import control_files
from ftslurm.run.layout import AttemptLayout, RunLayout
from ftslurm.run.record import read_record

_MESSAGE_CHARACTERS = 300

ECHO = "PeerLost"
"""Type of a rank's error that only says that another rank is gone."""


def read_evidence(
    layout: RunLayout, number: int, *, rc: int, term: bool, settled: Optional[Outcome] = None
) -> Evidence:
    """`settled`: the outcome, where it may not have come to the disk."""
    paths = layout.attempt(number)
    record = read_record(layout)
    return Evidence(
        number=number,
        rc=rc,
        term=term,
        done=is_listed(layout.done),
        outcome=settled or _outcome(paths),
        progressed=has_gone_on(layout, number),
        committed_step=newest_committed(layout),
        logs=str(paths.logs),
        first_failure=_first_failure(layout, number),
        order=control_files(layout, record).read_leaving(),
        ranks_signalled=any(event["kind"] == "signal" for event in read_events(paths)),
        is_program=bool(record.spec.program),
    )


def has_gone_on(layout: RunLayout, number: int) -> bool:
    """Whether the newest attempt, `number`, has brought the run forward."""
    if read_record(layout).spec.program:
        return has_progressed(layout, number)
    return _is_newer(newest_committed(layout), _newest_adopted(layout, number))


def read_history(layout: RunLayout, number: int) -> list[PastAttempt]:
    """Attempts before `number`, oldest first; one that was cut off in its claim had no ranks."""
    earlier = [past for past in claimed_numbers(layout) if past < number]
    return [
        PastAttempt(
            number=past,
            failed=read_decision(layout.attempt(past)).get("cause") == CAUSE_FAILED,
            progressed=progressed,
        )
        for past, progressed in zip(earlier, _progressed_between(layout, [*earlier, number]))
    ]


def _progressed_between(layout: RunLayout, attempts: Sequence[int]) -> list[bool]:
    """For each attempt but the last: whether the next one began further on."""
    if read_record(layout).spec.program:
        return progressed_between(layout, attempts)
    adopted = [_newest_adopted(layout, attempt) for attempt in attempts]
    return [_is_newer(after, before) for before, after in zip(adopted, adopted[1:])]


def read_decision(paths: AttemptLayout) -> dict[str, Any]:
    """What was decided after an attempt; empty when its batch shell died before it could."""
    try:
        return read_json(paths.decision_json)
    except (FileNotFoundError, FormatError):
        return {}


def newest_committed(layout: RunLayout) -> Optional[int]:
    return max((item.step for item in published_steps(layout)), default=None)


def ranks_were_started(paths: AttemptLayout) -> bool:
    """The launcher makes a rank's log before the rank runs."""
    return any(paths.logs.iterdir())


def _newest_adopted(layout: RunLayout, number: int) -> Optional[int]:
    """None also for an attempt whose claim was cut short."""
    try:
        attempt = read_attempt(layout, number)
    except (FileNotFoundError, FormatError):
        return None
    return max((item.step for item in attempt.adopted), default=None)


def _is_newer(step: Optional[int], than: Optional[int]) -> bool:
    return step is not None and (than is None or step > than)


def _outcome(paths: AttemptLayout) -> Optional[Outcome]:
    try:
        return read_outcome(paths)
    except FormatError:
        return None


def _first_failure(layout: RunLayout, number: int) -> Optional[RankFailure]:
    """Earliest by time that is no echo; else the one rank that could not say a word."""
    paths = layout.attempt(number)
    records = sorted(_rank_errors(paths), key=lambda record: float(record["at"]))
    own = [record for record in records if record["type"] != ECHO]
    if own:
        message = " ".join(str(own[0]["message"]).split())[:_MESSAGE_CHARACTERS]
        error = f"{own[0]['type']}: {message}" if message else str(own[0]["type"])
        return _failure(paths, int(own[0]["rank"]), str(own[0]["node"]), error)
    cluster = read_record(layout).spec.cluster
    world = range(cluster.nodes * cluster.tasks_per_node)
    silent = sorted(set(world) - {int(record["rank"]) for record in records})
    if not records or len(silent) != 1:
        return None
    # srun fills one node after the other (its default distribution).
    nodes = read_attempt(layout, number).nodes
    place = silent[0] // cluster.tasks_per_node
    node = nodes[place] if place < len(nodes) else "unknown node"
    error = "left without a word: killed from outside, or out of memory"
    return _failure(paths, silent[0], node, error)


def _failure(paths: AttemptLayout, rank: int, node: str, error: str) -> RankFailure:
    return RankFailure(rank, node, error, log=str(paths.logs / f"rank-{rank}.log"))


def _rank_errors(paths: AttemptLayout) -> Iterator[dict[str, Any]]:
    for path in paths.ranks.glob("rank-*.json"):
        try:
            yield read_json(path)
        except FormatError:
            continue
