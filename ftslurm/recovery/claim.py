"""`ftslurm claim RUN`: take the next attempt's number, for the batch script.

Prints `go ATTEMPT MASTER_ADDR MASTER_PORT STOP_AT NODES COUNT`, the names of the nodes that the
ranks run on and their number, and `preflight` where these are to be tried first; `done` when the
run has finished; `requeued` when this allocation cannot serve and the run's next job is queued
(allocation.py). Fails in a job that must not go on with the run (admission.py). The steps that are
committed by now are recorded as adopted: one that an older attempt publishes later is fenced. A run
that gets its next job by resubmission has it in the queue before the ranks start.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import hashlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Optional

from ftslurm.checkpoint.published import published_steps, step_folders
from ftslurm.checkpoint.sight import await_newest
from ftslurm.errors import EXIT_OK, FtslurmError, RunError, SchedulerError, warn
from ftslurm.files import Patience, best_effort, is_listed
from ftslurm.run.attempts import (
    AdoptedStep,
    Attempt,
    append_event,
    claim,
    claimed_numbers,
    read_attempt,
)
from ftslurm.run.layout import RunLayout, parse_step_name
from ftslurm.run.record import RESUBMIT, read_record
from ftslurm.run.spec import ClusterSpec
from ftslurm.run.trust import require_own
from ftslurm.scheduler import open_scheduler
from ftslurm.scheduler.protocol import Scheduler, Terms

if TYPE_CHECKING:
    from ftslurm.recovery.exclusion import Placement
    from ftslurm.recovery.own_job import OwnJob

# Below the ports that Linux gives to outgoing connections (ip_local_port_range: 32768 to 60999).
FIRST_PORT = 20_000
NUM_PORTS = 12_000


def main(argv: Optional[list[str]] = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ftslurm claim",
        description="Take the next attempt's number (called by the batch script).",
        epilog="example: read -r word attempt addr port stop_at nodes count < <(ftslurm claim RUN)",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    options = parser.parse_args(argv)
    layout = RunLayout(options.run)
    require_own(layout)
    try:
        print(claim_attempt(layout, os.environ))  # noqa: T201
    except FtslurmError:
        _make_end_final(layout, os.environ)
        raise
    return EXIT_OK


def _make_end_final(layout: RunLayout, environ: Mapping[str, str]) -> None:
    """The script fails now, and Slurm would hold a job that asked for --requeue=expedite."""
    with contextlib.suppress(FtslurmError):
        record = read_record(layout)
        if record.site and record.site.get("expedited_requeue"):
            scheduler = open_scheduler(record.scheduler, run_dir=layout.root)
            scheduler.forbid_requeue(scheduler.own_job_id(environ))


def claim_attempt(
    layout: RunLayout,
    environ: Mapping[str, str],
    *,
    submit: Optional[Callable[[Sequence[str]], str]] = None,
) -> str:
    """Claim, and say the one line for the batch script."""
    if is_listed(layout.done):
        return "done"
    # Not loaded to say `done`, nor for a word of help.
    from ftslurm.recovery.admission import admit
    from ftslurm.recovery.allocation import find_place, give_back, tell_of_given_up
    from ftslurm.recovery.ask_agents import tell_begin
    from ftslurm.recovery.keep_out import remember_last
    from ftslurm.recovery.own_job import OwnJob

    record = read_record(layout)
    scheduler = open_scheduler(record.scheduler, run_dir=layout.root)
    own_job = OwnJob.of(layout, record, scheduler, environ)
    if submit is not None:
        own_job = dataclasses.replace(own_job, submit=submit)
    admit(own_job, environ)
    decision = remember_last(layout)
    if record.spec.health.verdict_dir:
        from ftslurm.recovery.node_health import remember_roots_word  # late: many sites have none

        remember_roots_word(own_job)
    here = find_place(own_job, environ)
    tell_of_given_up(own_job, environ)
    if not here.serves:
        give_back(own_job, here)
        return "requeued"
    cluster = record.spec.cluster
    address = _master_address(cluster, scheduler, here.ranks_on)
    _note_skip(layout, decision.get("skip_steps"))
    adopted = adoptable(layout, before=decision.get("restore_before"))
    attempt = _claim(own_job, environ, here, adopted)
    port = choose_port(f"{own_job.job_id} {attempt.number}")
    _note(layout, attempt, port, here.doubts)
    terms = scheduler.terms(environ)
    _queue_successor(own_job, terms)
    stop_at = _stop_at(cluster, terms)
    tell_begin(own_job, attempt)
    count = (attempt.world_size or 0) // cluster.tasks_per_node
    line = f"go {attempt.number} {address} {port} {stop_at} {','.join(attempt.nodes)} {count}"
    return f"{line} preflight" if _wants_preflight(own_job, attempt, decision) else line


def _wants_preflight(job: OwnJob, attempt: Attempt, last: Mapping[str, Any]) -> bool:
    spec = job.record.spec
    mode = spec.health.preflight
    # In the place of a program's ranks, one may stand for all GPUs of a node, and torch for another
    # environment: what is tried there tells little.
    has_cause = bool(last) and not spec.program
    if job.scheduler.name == "local" or not (has_cause or mode == "always"):
        return False
    from ftslurm.recovery.suspicion import ask_for_preflight  # late: few attempts have one

    standby = spec.recovery.standby
    why = ask_for_preflight(job.layout, attempt, last, mode=mode, standby=standby)
    if why:
        # `attempt N: ` are the words with which recover ends an attempt (diagnosis/launcher_lines).
        print(f"ftslurm: preflight of attempt {attempt.number}, as {why}", file=sys.stderr)  # noqa: T201
    return bool(why)


def _note_skip(layout: RunLayout, steps: Optional[Sequence[int]]) -> None:
    """Which batches are passed over from now on, as the newest attempt was decided on."""
    if not steps:
        return
    from ftslurm.run.skipped import note_skip  # late: few runs pass over any

    first, last = steps
    with best_effort("the batches to pass over are not on record"):
        note_skip(layout, (first, last), attempt=claimed_numbers(layout)[-1])


def _claim(
    job: OwnJob, environ: Mapping[str, str], here: Placement, adopted: list[AdoptedStep]
) -> Attempt:
    from ftslurm.recovery.node_kinds import to_rows

    cluster = job.record.spec.cluster
    # This machine stands for all nodes of a local run.
    count = cluster.nodes if job.scheduler.name == "local" else len(here.ranks_on)
    return claim(
        job.layout,
        Attempt(
            number=0,  # given by the claim
            job_id=job.job_id,
            raw_job_id=environ.get("SLURM_JOB_ID", ""),
            cluster=environ.get("SLURM_CLUSTER_NAME", ""),
            restart_count=job.restart_count,
            nodes=here.ranks_on,
            claimed_at=time.time(),
            adopted=adopted,
            spares=here.spares,
            excluded=here.left_out,
            kinds=to_rows(here.kinds),
            tasks_per_node=cluster.tasks_per_node,
            world_size=count * cluster.tasks_per_node,
        ),
    )


def _queue_successor(job: OwnJob, terms: Terms) -> None:
    """Queued before anything can go wrong: a dead batch node, or a KILL, leaves the run with a next
    job. Also where it is Slurm that would not queue this job again, whatever the run asked for."""
    if job.record.continue_by != RESUBMIT and terms.may_requeue is not False:
        return
    from ftslurm.recovery.successor import ensure_successor  # late: few runs have one

    try:
        if not terms.are_known:
            raise SchedulerError("slurmctld does not answer")
        ensure_successor(job, give_up=lambda: True)
    except SchedulerError as error:
        warn(f"the run's next job is not queued yet, it will be when this attempt ends: {error}")


def _note(layout: RunLayout, attempt: Attempt, port: int, doubts: Sequence[str]) -> None:
    """A journal that cannot be written (disk full) costs its line, not the attempt."""
    for doubt in doubts:
        warn(doubt)
    more: dict[str, Any] = {"doubts": list(doubts)} if doubts else {}
    with best_effort("not in the journal"):
        append_event(
            layout.attempt(attempt.number),
            "claimed",
            job_id=attempt.job_id,
            restart_count=attempt.restart_count,
            nodes=attempt.nodes,
            port=port,
            adopted=[item.step for item in attempt.adopted],
            **more,
        )


def _master_address(cluster: ClusterSpec, scheduler: Scheduler, nodes: list[str]) -> str:
    """The batch script runs on the node that hosts rank 0."""
    if cluster.interface is not None:
        from ftslurm.node.interface import address_of

        return address_of(cluster.interface)
    return scheduler.master_address(nodes)


def _stop_at(cluster: ClusterSpec, terms: Terms) -> int:
    """UTC seconds at which the warn signal is due; 0 when the end of the job is not known.

    Slurm sends it once, to the job steps that run then: between two attempts it reaches nobody.
    """
    return 0 if terms.end_at is None else int(terms.end_at - cluster.signal_lead_s)


def adoptable(layout: RunLayout, *, before: Optional[int] = None) -> list[AdoptedStep]:
    """The committed steps that belong to the run's history by now, newest first.

    Not among them: what an attempt older than the newest one published after that was claimed. Its
    rank 0 may have died before it could put such a step aside. Nor, where the run has to go back,
    what is not `before` that step.
    """
    return [one for one in _unfenced(layout) if before is None or one.step < before]


def _unfenced(layout: RunLayout) -> list[AdoptedStep]:
    unseen = await_newest(layout)
    if unseen is not None:
        warn(f"`{layout.latest_json}` names step {unseen}, which is not there")
    steps = [AdoptedStep(item.step, item.committed_digest) for item in published_steps(layout)]
    claimed = claimed_numbers(layout)
    if not claimed:
        return steps
    newest, folders = read_attempt(layout, claimed[-1]), step_folders(layout)
    there = {parse_step_name(path.name) for path in folders}
    left = [one for one in newest.adopted if one.step in there]
    if len(left) == len(folders) and set(steps) <= set(left):
        return left
    # Late: a claim without new steps answers in under 100 ms.
    from ftslurm.checkpoint.store import CheckpointStore

    fenced = CheckpointStore(layout).fence(newest.number, newest.adopted)
    strays = {stray.step for stray in fenced}
    return [one for one in _as_known(folders, steps, newest) if one.step not in strays]


def _as_known(
    folders: Sequence[Path], steps: Sequence[AdoptedStep], newest: Attempt
) -> Iterator[AdoptedStep]:
    """All that is there: by its own word or, where this node does not read that rightly, as the
    newest attempt has known it or as one of its own. Else a good step would be a stray for ever."""
    from ftslurm.checkpoint.verification import verify_heads  # late, as above

    said = {one.step: one for one in steps}
    known = {one.step: one for one in newest.adopted}
    patience = Patience()
    for path in folders:
        step = parse_step_name(path.name)
        assert step is not None, path
        one = said.get(step)
        patience.renew()
        if one is None or (
            one != known.get(step) and verify_heads(path, patience=patience).manifest is None
        ):
            one = known.get(step, AdoptedStep(step, "", by=newest.number))
        yield one


def is_free_here(port: int) -> bool:
    """Bindable on this machine now; the batch script runs on the node that hosts rank 0."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def choose_port(key: str, *, is_free: Callable[[int], bool] = is_free_here) -> int:
    """A free port, another one for every key: an older attempt's ranks may still hold theirs."""
    start = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")
    for offset in range(NUM_PORTS):
        port = FIRST_PORT + (start + offset) % NUM_PORTS
        if is_free(port):
            return port
    raise RunError(
        f"no port from {FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1} is free on this node; rank 0 "
        "needs one: look for processes left over there"
    )
